"""e4m3 with scales: the quantiser, and attention whose forward runs on it."""

import torch

from tessera import _native, _ops
from tessera._error import Error

_BLOCK = 128  # rows that share a scale, unless the caller says otherwise


def quantize_fp8(x, *, block=_BLOCK, cu_seqlens=None, max_seqlen=None, rotate=False):
    """x as float8_e4m3fn, and its scales: x is about out * scale.

    x: [B, S, H, D], or packed [total, H, D] with cu_seqlens (int32 [B + 1]) and max_seqlen; float16, bfloat16 or, on the
    CPU, float32. Scales are powers of two, float32 [B, H, blocks] with block=64 or 128 rows of a sequence to each,
    [B, H, 1] with block="head", [1, 1, 1] with block="tensor". rotate: rows are multiplied by a random-sign Hadamard
    matrix first, as precision="fp8_rotated" does with q and k. Not differentiable.
    """
    _ops.expect_tensors(x=x, cu_seqlens=cu_seqlens)
    x = x.detach()
    if block not in (64, 128, "head", "tensor"):
        raise Error(f"block is {block!r}; 64, 128, 'head' and 'tensor' are accepted")
    if x.dim() != (4 if cu_seqlens is None else 3):
        raise Error(f"x has {x.dim()} dims; 4 are accepted, [B, S, H, D], or 3 with cu_seqlens")
    if cu_seqlens is not None and max_seqlen is None:
        raise Error("max_seqlen is None; cu_seqlens needs it, for the number of blocks")
    seq = x.shape[1] if cu_seqlens is None else int(max_seqlen)
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    blocks = 1 if isinstance(block, str) else max(1, -(-seq // block))
    shape = (1, 1, 1) if block == "tensor" else (batch, x.shape[-2], blocks)
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return out, scale.fill_(1.0)
    _native.quantize_fp8(x, out.view(torch.uint8), scale, cu_seqlens, 0 if cu_seqlens is None else seq,
                         _ops.FP8_ROTATE * bool(rotate))
    return out, scale


def dequantize_fp8(x, scale, dtype, cu_seqlens=None, block=_BLOCK):
    """The values of quantize_fp8(x), exactly: scales are powers of two."""
    if cu_seqlens is None:
        rows = scale.repeat_interleave(block, 2)[:, :, : x.shape[1]] if scale.shape[2] > 1 else scale
        return (x.to(torch.float32) * rows.transpose(1, 2).unsqueeze(-1)).to(dtype)
    begins, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(ends, row, right=True)
    outside = sequence == ends.numel()
    sequence = sequence.clamp(max=ends.numel() - 1)
    place = ((row - begins[sequence]) // block).clamp(max=scale.shape[2] - 1)
    factor = scale.expand(ends.numel(), -1, -1)[sequence, :, place].masked_fill(outside.unsqueeze(-1), 1.0)
    return (x.to(torch.float32) * factor.unsqueeze(-1)).to(dtype)


def _rounded(x, cu_seqlens, max_seqlen, flags):
    """What e4m3 and a scale for each head hold of x, in x's type."""
    if x.numel() == 0:
        return x
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.zeros_like(x, memory_format=torch.contiguous_format) if cu_seqlens is not None else torch.empty(
        x.shape, dtype=x.dtype, device=x.device
    )
    scale = torch.empty((batch, x.shape[-2], 1), dtype=torch.float32, device=x.device)
    longest = 0 if cu_seqlens is None else min(max_seqlen or x.shape[0], x.shape[0])
    _native.quantize_fp8(x, out, scale, cu_seqlens, longest, flags)
    return out


class Fp8Attention(torch.autograd.Function):
    """Forward on e4m3; the backward is that of q's type, on the rounded values, and passes through the rounding."""

    @staticmethod
    def forward(ctx, q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, options):
        out, lse = _native.forward(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, options, False, True)
        ctx.save_for_backward(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, out, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        _ops.refuse_tangents((dout, dlse))
        scale, softcap, flags, *rest = ctx.options
        *_, max_q, max_k, _ = rest
        values = (
            _rounded(q, cu_seqlens_q, max_q, flags & _ops.FP8_ROTATE),
            _rounded(k, cu_seqlens_k, max_k, flags & _ops.FP8_ROTATE),
            _rounded(v, cu_seqlens_k, max_k, 0),
        )
        options = (scale, softcap, flags & ~(_ops.FP8 | _ops.FP8_ROTATE | _ops.FP8_FAST), *rest)
        # With create_graph=True, differentiating the result must raise: there is no second derivative.
        run = _ops.Backward.apply if torch.is_grad_enabled() else _ops.backward
        gradients = run(*values, alibi, cu_seqlens_q, cu_seqlens_k, options, False, out, lse, dout, dlse)
        return *gradients, None, None, None, None

    jvp = staticmethod(_ops.refuse_forward_mode)
