"""RMSNorm, LayerNorm and rotary embedding: the operators as torch.library knows them, and the functions on top."""

from numbers import Real

import torch

from tessera import _native
from tessera._error import Error
from tessera._ops import _TAGS, _flat, _rows, expect_tensors, lib, refuse_vmap, register_autograd, register_fake

# Constants of tessera/norm.h.
CENTERED, INTERLEAVED, INVERSE = 1, 2, 4

lib.define(
    "norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, bool centered) "
    "-> (Tensor out, Tensor sum, Tensor rstd, Tensor mean)",
    tags=_TAGS,
)
lib.define(
    "norm_backward(Tensor dout, Tensor x, Tensor? weight, Tensor rstd, Tensor mean, Tensor? dsum, bool centered, "
    "bool with_dweight, bool with_dbias) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    tags=_TAGS,
)
lib.define(
    "rotary(Tensor x, Tensor cos, Tensor sin, Tensor? positions, bool interleaved, bool inverse) -> Tensor",
    tags=_TAGS,
)


def _norm(x, weight, bias, residual, eps, centered):
    out, total, rstd, mean = _native.norm_forward(
        _rows(x), _rows(weight), _rows(bias), _rows(residual), eps, CENTERED if centered else 0
    )
    return (
        out,
        x.new_empty(0) if total is None else total,
        rstd,
        rstd.new_empty(0) if mean is None else mean,
    )


def _norm_backward(dout, x, weight, rstd, mean, dsum, centered, with_dweight, with_dbias):
    dx, dweight, dbias = _native.norm_backward(
        _rows(dout),
        _rows(x),
        _rows(weight),
        rstd,
        mean if centered else None,
        _rows(dsum),
        CENTERED if centered else 0,
        with_dweight,
        with_dbias,
    )
    return dx, x.new_empty(0) if dweight is None else dweight, x.new_empty(0) if dbias is None else dbias


def _rotary(x, cos, sin, positions, interleaved, inverse):
    flags = (INTERLEAVED if interleaved else 0) | (INVERSE if inverse else 0)
    return _native.norm_rotary(_rows(x), _rows(cos), _rows(sin), _rows(positions), flags)


for _device in ("CPU", "CUDA"):
    lib.impl("norm", _norm, _device)
    lib.impl("norm_backward", _norm_backward, _device)
    lib.impl("rotary", _rotary, _device)
for _name in ("norm", "norm_backward", "rotary"):
    lib.impl(_name, refuse_vmap, "FuncTorchBatched")


def _fake_norm(x, weight, bias, residual, eps, centered):
    rstd = x.new_empty((x.shape[0],), dtype=torch.float32)
    total = x.new_empty((0,) if residual is None else x.shape)
    return x.new_empty(x.shape), total, rstd, rstd.new_empty((x.shape[0],) if centered else (0,))


def _fake_norm_backward(dout, x, weight, rstd, mean, dsum, centered, with_dweight, with_dbias):
    width = (x.shape[1],)
    return x.new_empty(x.shape), x.new_empty(width if with_dweight else (0,)), x.new_empty(width if with_dbias else (0,))


def _fake_rotary(x, cos, sin, positions, interleaved, inverse):
    return x.new_empty(x.shape)


register_fake("norm", _fake_norm)
register_fake("norm_backward", _fake_norm_backward)
register_fake("rotary", _fake_rotary)


def _setup_norm(ctx, inputs, output):
    x, weight, bias, residual, _, centered = inputs
    _, total, rstd, mean = output
    ctx.save_for_backward(x if residual is None else total, weight, rstd, mean)
    ctx.centered = centered
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(*((rstd, mean) if ctx.has_residual else (total, rstd, mean)))
    ctx.set_materialize_grads(False)


def _norm_gradients(ctx, dout, dsum, *_):
    x, weight, rstd, mean = ctx.saved_tensors
    if not ctx.has_residual:
        dsum = None
    if dout is None:
        return (dsum, None, None, dsum, None, None)
    dx, dweight, dbias = _norm_backward_op(
        dout, x, weight, rstd, mean, dsum, ctx.centered, ctx.needs_input_grad[1], ctx.needs_input_grad[2]
    )
    return (
        dx if ctx.needs_input_grad[0] else None,
        dweight if ctx.needs_input_grad[1] else None,
        dbias if ctx.needs_input_grad[2] else None,
        dx if ctx.has_residual and ctx.needs_input_grad[3] else None,
        None,
        None,
    )


def _setup_rotary(ctx, inputs, output):
    _, cos, sin, positions, ctx.interleaved, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin, positions)


def _rotary_gradients(ctx, dout):
    cos, sin, positions = ctx.saved_tensors
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        raise Error("tessera.rotary has no gradient for cos and sin", "unsupported")
    dx = _rotary_op(dout, cos, sin, positions, ctx.interleaved, not ctx.inverse)
    return dx, None, None, None, None, None


def _refuse_gradient(ctx, *_):
    raise Error("tessera has no second derivatives of norms", "unsupported")


_norm_op = register_autograd("norm", _norm_gradients, _setup_norm)
_rotary_op = register_autograd("rotary", _rotary_gradients, _setup_rotary)
_norm_backward_op = register_autograd("norm_backward", _refuse_gradient)


def _apply(x, weight, bias, residual, eps, centered):
    expect_tensors(x=x, weight=weight, bias=bias, residual=residual)
    if x.dim() == 0:
        raise Error("x has 0 dims; [..., N] is accepted")
    if isinstance(eps, torch.Tensor):
        raise Error("eps is a torch.Tensor; a number is expected")
    if not isinstance(eps, (float, Real, torch.SymFloat)):
        raise Error(f"eps is {eps!r}; a number is accepted")
    if residual is not None and residual.shape != x.shape:
        raise Error(f"residual has shape {list(residual.shape)}, but x has {list(x.shape)}")
    out, total, _, _ = _norm_op(_flat(x), weight, bias, _flat(residual), eps, centered)
    return out.reshape(x.shape) if residual is None else (out.reshape(x.shape), total.reshape(x.shape))


def rms_norm(x, weight=None, residual=None, eps=1e-6):
    """RMSNorm over the last dim: h / sqrt(mean(h^2) + eps) * weight, with h = x + residual. With gradients.

    x, residual: [..., N]; weight: [N], or None for ones. fp16, bf16 or fp32, all alike; sums are fp32, in a fixed order.
    Returns the norm, and if there is a residual (norm, h): h is the residual of the next layer.
    """
    return _apply(x, weight, None, residual, eps, False)


def layer_norm(x, weight=None, bias=None, residual=None, eps=1e-5):
    """LayerNorm over the last dim: (h - mean) / sqrt(var + eps) * weight + bias, with h = x + residual; as rms_norm."""
    return _apply(x, weight, bias, residual, eps, True)


def rotary(x, cos=None, sin=None, *, positions=None, interleaved=False, inverse=False, base=10000.0, rotated=None):
    """Rotary position embedding of queries or keys, with a gradient for x.

    x: [B, S, H, D]. cos, sin: [T, R / 2], of x's type or fp32; dims from R on are copied. Without them, they are made for
    R = rotated (default: D) from base. positions: int [S] or [B, S], rows of the tables; default: 0 to S - 1. Pairs are
    dims i and i + R / 2, or, if interleaved, 2 i and 2 i + 1. inverse: by the negative angle.
    """
    expect_tensors(x=x, cos=cos, sin=sin, positions=positions)
    if x.dim() != 4:
        raise Error(f"x has {x.dim()} dims; 4 are accepted, [B, S, H, D]")
    if (cos is None) != (sin is None):
        raise Error("cos and sin are given together")
    if positions is not None and (positions.is_floating_point() or positions.dtype == torch.bool):
        raise Error(f"positions is {positions.dtype}; integers are accepted")
    if cos is None:
        width = x.shape[-1] if rotated is None else rotated
        if width % 2 or not 0 <= width <= x.shape[-1]:
            raise Error(f"rotated is {width}; an even number up to {x.shape[-1]} is accepted")
        if not base > 0:
            raise Error(f"base is {base}; a number above 0 is accepted")
        where = torch.arange(x.shape[1], device=x.device) if positions is None else positions.flatten()
        angles = where.double()[:, None] * base ** (-torch.arange(0, width, 2, device=x.device).double() / width)
        cos, sin = angles.cos().float(), angles.sin().float()
        if positions is not None:
            rows = torch.arange(positions.numel(), device=x.device, dtype=torch.int32)
            positions = rows.reshape(positions.shape)
    elif rotated is not None and rotated != 2 * cos.shape[-1]:
        raise Error(f"rotated is {rotated}, but cos has {cos.shape[-1]} columns")
    elif positions is not None and positions.dtype != torch.int32:  # clamped: a cast alone could make a position of what is none
        positions = positions.long().clamp(-1, 2**31 - 1).to(torch.int32)
    return _rotary_op(x, cos, sin, positions, interleaved, inverse)
