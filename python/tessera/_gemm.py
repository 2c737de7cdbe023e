"""Matrix products with fused epilogues: the operators as torch.library knows them, and the functions on top."""

import torch

from tessera import _native
from tessera._error import Error
from tessera._ops import lib, refuse_vmap, _TAGS

# Constants of tessera/gemm.h.
ACTIVATIONS = {"none": 0, "relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}
A_TRANSPOSED, B_TRANSPOSED = 1, 2

lib.define(
    "gemm(Tensor a, Tensor b, Tensor? bias, Tensor? gate, Tensor? gate_bias, Tensor? saved, Tensor? residual, "
    "int activation, int flags, bool out_fp32) -> Tensor",
    tags=_TAGS,
)
lib.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation) -> (Tensor out, Tensor saved)",
    tags=_TAGS,
)


def _rows(tensor):
    """The tensor with a contiguous last dim, which the kernels need; gradients are often expanded or transposed."""
    if tensor is None or tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1:
        return tensor
    return tensor.contiguous()


def _gemm(a, b, bias, gate, gate_bias, saved, residual, activation, flags, out_fp32):
    tensors = map(_rows, (a, b, bias, gate, gate_bias, saved, residual))
    return _native.gemm(*tensors, activation, flags, False, out_fp32)


def _linear(x, weight, bias, residual, activation):
    tensors = (_rows(x), _rows(weight), _rows(bias), None, None, None, _rows(residual))
    if activation == 0:  # its gradient needs no preactivation
        return _native.gemm(*tensors, activation, 0, False, False), x.new_empty(0)
    return _native.gemm(*tensors, activation, 0, True, False)


for _device in ("CPU", "CUDA"):
    lib.impl("gemm", _gemm, _device)
    lib.impl("linear", _linear, _device)
for _name in ("gemm", "linear"):
    lib.impl(_name, refuse_vmap, "FuncTorchBatched")


def _fake_gemm(a, b, bias, gate, gate_bias, saved, residual, activation, flags, out_fp32):
    m = a.shape[1] if flags & A_TRANSPOSED else a.shape[0]
    n = b.shape[1] if flags & B_TRANSPOSED else b.shape[0]
    return a.new_empty((m, n), dtype=torch.float32 if out_fp32 else a.dtype)


def _fake_linear(x, weight, bias, residual, activation):
    out = x.new_empty((x.shape[0], weight.shape[0]))
    return out, x.new_empty((0,) if activation == 0 else out.shape)


torch.library.register_fake("tessera::gemm", _fake_gemm, lib=lib)
torch.library.register_fake("tessera::linear", _fake_linear, lib=lib)


def _setup_context(ctx, inputs, output):
    x, weight, bias, residual, activation = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.activation = activation
    ctx.has_bias = bias is not None
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _activation_gradient(activation, dout, saved):
    if activation == 0:
        return dout
    if activation == 1:
        return torch.ops.aten.threshold_backward(dout, saved, 0)
    if activation == 2:
        return torch.ops.aten.silu_backward(dout, saved)
    return torch.ops.aten.gelu_backward(dout, saved, approximate="tanh" if activation == 3 else "none")


def _gradients(ctx, dout, _):
    if dout is None:
        return None, None, None, None, None
    x, weight, saved = ctx.saved_tensors
    dx = dweight = dbias = None
    before = _activation_gradient(ctx.activation, dout, saved)

    def product(a, b, flags):
        return torch.ops.tessera.gemm(a, b, None, None, None, None, None, 0, flags, False)

    if ctx.needs_input_grad[0]:
        dx = product(before, weight, B_TRANSPOSED)
    if ctx.needs_input_grad[1]:
        dweight = product(before, x, A_TRANSPOSED | B_TRANSPOSED)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        dbias = before.sum(0)
    dresidual = dout if ctx.has_residual and ctx.needs_input_grad[3] else None
    return dx, dweight, dbias, dresidual, None


def _refuse_gradient(ctx, *_):
    raise Error(
        "tessera.gemm has no gradient: it is one product of an op's forward or backward; use tessera.linear to train",
        "unsupported",
    )


torch.library.register_autograd("tessera::linear", _gradients, setup_context=_setup_context, lib=lib)
torch.library.register_autograd("tessera::gemm", _refuse_gradient, lib=lib)


def _activation(name):
    if name not in ACTIVATIONS:
        raise Error(f"activation is {name!r}; {', '.join(ACTIVATIONS)} are accepted")
    return ACTIVATIONS[name]


def linear(x, weight, bias=None, *, activation="none", residual=None):
    """activation(x @ weight.T + bias) + residual, in one kernel, with gradients.

    x: [..., K]; weight: [N, K], as in torch.nn.Linear; bias: [N]; residual: [..., N]. fp16 and bf16, fp32 on the CPU; sums
    are fp32. activation: "none", "relu", "silu", "gelu_tanh" or "gelu" (erf).
    """
    rows = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(-1, residual.shape[-1])
    out, _ = torch.ops.tessera.linear(rows, weight, bias, added, _activation(activation))
    return out.reshape(*x.shape[:-1], weight.shape[0])


def gemm(
    a,
    b,
    *,
    transpose_a=False,
    transpose_b=False,
    bias=None,
    activation="none",
    gate=None,
    gate_bias=None,
    saved=None,
    residual=None,
    out_dtype=None,
):
    """The C function of that name (docs/contract.md): A B with an epilogue, without gradients.

    a: [M, K], or [K, M] if transpose_a; b and gate: [N, K], or [K, N] if transpose_b; out_dtype: a's (default) or
    torch.float32.
    """
    if out_dtype not in (None, a.dtype, torch.float32):
        raise Error(f"out_dtype is {out_dtype}; {a.dtype} and torch.float32 are accepted")
    flags = (A_TRANSPOSED if transpose_a else 0) | (B_TRANSPOSED if transpose_b else 0)
    out_fp32 = out_dtype == torch.float32 and a.dtype != torch.float32
    return torch.ops.tessera.gemm(
        a, b, bias, gate, gate_bias, saved, residual, _activation(activation), flags, out_fp32
    )
