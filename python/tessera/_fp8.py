"""e4m3 with scales: the quantiser, and attention whose forward runs on it."""

import torch

from tessera import _native, _ops
from tessera._error import Error

# Rows that share a scale in attention(precision="fp8").
_BLOCK = 128


def quantize_fp8(x, *, block=_BLOCK, cu_seqlens=None, max_seqlen=None):
    """x as float8_e4m3fn, and its scales: x is about out * scale.

    x: [B, S, H, D], or packed [total, H, D] with cu_seqlens (int32 [B + 1]) and max_seqlen; float16, bfloat16 or, on the
    CPU, float32. Scales are powers of two, float32 [B, H, blocks] with block=64 or 128 rows of a sequence to each,
    [B, H, 1] with block="head", [1, 1, 1] with block="tensor". Not differentiable.
    """
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
    _native.quantize_fp8(x, out.view(torch.uint8), scale, cu_seqlens, 0 if cu_seqlens is None else seq)
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


def attention_fp8(q, k, v, scales, dtype, alibi, cu_seqlens_q, cu_seqlens_k, options):
    """(out, lse) of e4m3 q, k and v with scales (q's, k's, v's); dtype: of out."""
    bits = (t.view(torch.uint8) for t in (q, k, v))
    return _native.forward_fp8(*bits, alibi, cu_seqlens_q, cu_seqlens_k, options, *scales, dtype)


class Fp8Attention(torch.autograd.Function):
    """Forward on e4m3; the backward is that of q's type, on the dequantised values, and passes through the rounding."""

    @staticmethod
    def forward(ctx, q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, options):
        *_, max_q, max_k, _ = options
        lengths = ((cu_seqlens_q, max_q), (cu_seqlens_k, max_k), (cu_seqlens_k, max_k))
        quantised, scales = zip(
            *(quantize_fp8(t, cu_seqlens=cu, max_seqlen=longest) for t, (cu, longest) in zip((q, k, v), lengths))
        )
        out, lse = attention_fp8(*quantised, scales, q.dtype, alibi, cu_seqlens_q, cu_seqlens_k, options)
        ctx.save_for_backward(*quantised, *scales, alibi, cu_seqlens_q, cu_seqlens_k, out, lse)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, q_scale, k_scale, v_scale, alibi, cu_seqlens_q, cu_seqlens_k, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        _ops.refuse_tangents((dout, dlse))
        values = (
            dequantize_fp8(q, q_scale, out.dtype, cu_seqlens_q),
            dequantize_fp8(k, k_scale, out.dtype, cu_seqlens_k),
            dequantize_fp8(v, v_scale, out.dtype, cu_seqlens_k),
        )
        # With create_graph=True, differentiating the result must raise: there is no second derivative.
        run = _ops.Backward.apply if torch.is_grad_enabled() else _ops.backward
        gradients = run(*values, alibi, cu_seqlens_q, cu_seqlens_k, ctx.options, False, out, lse, dout, dlse)
        return *gradients, None, None, None, None

    jvp = staticmethod(_ops.refuse_forward_mode)
