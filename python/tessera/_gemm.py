"""Matrix products with fused epilogues: the operators as torch.library knows them, and the functions on top."""

import torch

from tessera import _native
from tessera._error import Error
from tessera._ops import GRADIENTS, PLAIN, _TAGS, expect_tensors, final, lib, prepared, refuse_forward_mode
from tessera._ops import _flat, _rows, refuse_tangents, refuse_vmap, register_autograd, register_fake

# Constants of tessera/gemm.h.
ACTIVATIONS = {"none": 0, "relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}
A_TRANSPOSED, B_TRANSPOSED = 1, 2
# Options of _native.gemm: bindings/torch/gemm.cc.
_GROUPED, _PREACTIVATION, _OUT_FP32, _INTERLEAVED, _PADDED = 1, 2, 4, 8, 16

lib.define(
    "gemm(Tensor a, Tensor b, Tensor? bias, Tensor? gate, Tensor? gate_bias, Tensor? saved, Tensor? residual, "
    "int activation, int flags, bool out_fp32, bool padded=False) -> Tensor",
    tags=_TAGS,
)
lib.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation) -> (Tensor out, Tensor saved)",
    tags=_TAGS,
)
lib.define(
    "grouped_gemm(Tensor a, Tensor b, Tensor? offsets, Tensor? bias, Tensor? gate, Tensor? gate_bias, Tensor? saved, "
    "Tensor? residual, int activation, int flags, bool out_fp32, bool interleaved) -> Tensor",
    tags=_TAGS,
)
lib.define(
    "grouped_linear(Tensor x, Tensor weight, Tensor? offsets, Tensor? bias, int activation) -> (Tensor out, Tensor saved)",
    tags=_TAGS,
)


def _gemm(a, b, bias, gate, gate_bias, saved, residual, activation, flags, out_fp32, padded=False):
    tensors = map(_rows, (a, b, bias, gate, gate_bias, saved, residual))
    options = (_OUT_FP32 if out_fp32 else 0) | (_PADDED if padded else 0)
    return _native.gemm(*tensors, None, activation, flags, options)


def _linear(x, weight, bias, residual, activation):
    tensors = (_rows(x), _rows(weight), _rows(bias), None, None, None, _rows(residual), None)
    if activation == 0:  # its gradient needs no preactivation
        return _native.gemm(*tensors, activation, 0, 0), x.new_empty(0)
    return _native.gemm(*tensors, activation, 0, _PREACTIVATION)


def _grouped_gemm(
    a, b, offsets, bias, gate, gate_bias, saved, residual, activation, flags, out_fp32, interleaved
):
    tensors = map(_rows, (a, b, bias, gate, gate_bias, saved, residual))
    options = _GROUPED | (_OUT_FP32 if out_fp32 else 0) | (_INTERLEAVED if interleaved else 0)
    return _native.gemm(*tensors, offsets, activation, flags, options)


def _grouped_linear(x, weight, offsets, bias, activation, trains=True):
    saves = trains and activation != 0
    # Without offsets, x is [rows, G, K] and so is the result: the library sees the groups first.
    rows = _rows(x) if offsets is not None else _rows(x).transpose(0, 1)
    options = _GROUPED | (_INTERLEAVED if offsets is None else 0) | (_PREACTIVATION if saves else 0)
    made = _native.gemm(rows, _rows(weight), _rows(bias), *(None,) * 4, offsets, activation, 0, options)
    out, saved = made if saves else (made, x.new_empty(0))
    if offsets is not None:
        return out, saved
    return out.transpose(0, 1), saved.transpose(0, 1) if saves else saved


_IMPLEMENTATIONS = {
    "gemm": _gemm,
    "linear": _linear,
    "grouped_gemm": _grouped_gemm,
    "grouped_linear": _grouped_linear,
}
for _name, _function in _IMPLEMENTATIONS.items():
    for _device in ("CPU", "CUDA"):
        lib.impl(_name, _function, _device)
    lib.impl(_name, refuse_vmap, "FuncTorchBatched")


def _fake_gemm(a, b, bias, gate, gate_bias, saved, residual, activation, flags, out_fp32, padded=False):
    m = a.shape[1] if flags & A_TRANSPOSED else a.shape[0]
    n = b.shape[1] if flags & B_TRANSPOSED else b.shape[0]
    dtype = torch.float32 if out_fp32 else a.dtype
    if not padded:
        return a.new_empty((m, n), dtype=dtype)
    whole = 128 // dtype.itemsize
    return a.new_empty_strided((m, n), ((n + whole - 1) // whole * whole, 1), dtype=dtype)


def _fake_linear(x, weight, bias, residual, activation):
    out = x.new_empty((x.shape[0], weight.shape[0]))
    return out, x.new_empty((0,) if activation == 0 else out.shape)


def _fake_grouped_gemm(
    a, b, offsets, bias, gate, gate_bias, saved, residual, activation, flags, out_fp32, interleaved
):
    m = a.shape[-1] if flags & A_TRANSPOSED else a.shape[-2]
    n = b.shape[-1] if flags & B_TRANSPOSED else b.shape[-2]
    dtype = torch.float32 if out_fp32 else a.dtype
    if offsets is not None and b.dim() == 3:
        return a.new_empty((m, n), dtype=dtype)
    groups = b.shape[0] if offsets is None else offsets.shape[0] - 1
    if interleaved:
        return a.new_empty((m, groups, n), dtype=dtype).transpose(0, 1)
    return a.new_empty((groups, m, n), dtype=dtype)


def _fake_grouped_linear(x, weight, offsets, bias, activation):
    out = x.new_empty((*x.shape[:-1], weight.shape[1]))
    return out, x.new_empty((0,) if activation == 0 else out.shape)


register_fake("gemm", _fake_gemm)
register_fake("linear", _fake_linear)
register_fake("grouped_gemm", _fake_grouped_gemm)
register_fake("grouped_linear", _fake_grouped_linear)


def _setup_context(ctx, inputs, output):
    x, weight, bias, residual, activation = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.activation = activation
    ctx.has_bias = bias is not None
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _activation_gradient(activation, dout, saved, x, weight):
    if activation == 0:
        return dout
    if activation == 1:
        made = torch.ops.aten.threshold_backward(dout, saved, 0)
    elif activation == 2:
        made = torch.ops.aten.silu_backward(dout, saved)
    else:
        made = torch.ops.aten.gelu_backward(dout, saved, approximate="tanh" if activation == 3 else "none")
    return final(made, x, weight)  # of which saved was made


def _gradients(ctx, dout, _=None, run=None):
    """run: what computes a product; the operator by default."""
    if dout is None:
        return None, None, None, None, None
    x, weight, saved = ctx.saved_tensors
    dx = dweight = dbias = None
    before = _activation_gradient(ctx.activation, dout, saved, x, weight)

    def product(a, b, flags):
        return (run or _gemm_op)(a, b, None, None, None, None, None, 0, flags, False)

    if ctx.needs_input_grad[0]:
        dx = product(before, weight, B_TRANSPOSED)
    if ctx.needs_input_grad[1]:
        dweight = product(before, x, A_TRANSPOSED | B_TRANSPOSED)
    if ctx.has_bias and ctx.needs_input_grad[2]:
        dbias = before.sum(0)
    dresidual = dout if ctx.has_residual and ctx.needs_input_grad[3] else None
    return dx, dweight, dbias, dresidual, None


def _setup_grouped_context(ctx, inputs, output):
    x, weight, offsets, bias, activation = inputs
    ctx.save_for_backward(x, weight, offsets, output[1])
    ctx.activation = activation
    ctx.has_bias = bias is not None
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _grouped_gradients(ctx, dout, _):
    if dout is None:
        return None, None, None, None, None
    x, weight, offsets, saved = ctx.saved_tensors
    dx = dweight = dbias = None
    before = _activation_gradient(ctx.activation, dout, saved, x, weight)

    def product(a, b, flags, interleaved=False):
        return _grouped_gemm_op(
            a, b, offsets, None, None, None, None, None, 0, flags, False, interleaved
        )

    if offsets is None:  # [rows, G, N]
        first, x = before.transpose(0, 1), x.transpose(0, 1)
        if ctx.needs_input_grad[0]:
            dx = product(first, weight, B_TRANSPOSED, True).transpose(0, 1)
        if ctx.has_bias and ctx.needs_input_grad[3]:
            dbias = before.sum(0)
    else:
        first = before
        if ctx.needs_input_grad[0]:
            dx = product(first, weight, B_TRANSPOSED)
            row = torch.arange(dx.shape[0], device=dx.device)
            dx.masked_fill_((row >= offsets[-1])[:, None], 0)  # the product does not write rows of no group
        if ctx.has_bias and ctx.needs_input_grad[3]:
            # The sums of each group's rows, as a product with a column of ones.
            ones = before.new_ones((before.shape[0], 8))
            dbias = product(first, ones, A_TRANSPOSED | B_TRANSPOSED)[..., 0]
    if ctx.needs_input_grad[1]:
        dweight = product(first, x, A_TRANSPOSED | B_TRANSPOSED)
    return dx, dweight, None, dbias, None


def _refuse_gradient(ctx, *_):
    raise Error(
        "tessera.gemm has no gradient, and tessera.linear no second derivative; use tessera.linear to train",
        "unsupported",
    )


_linear_op = register_autograd("linear", _gradients, _setup_context)
_gemm_op = register_autograd("gemm", _refuse_gradient)
_grouped_linear_op = register_autograd("grouped_linear", _grouped_gradients, _setup_grouped_context)
_grouped_gemm_op = register_autograd("grouped_gemm", _refuse_gradient)


class _Linear(torch.autograd.Function):
    """The gradient of an eager call on plain tensors; all other calls use that of torch.ops.tessera.linear."""

    @staticmethod
    def forward(ctx, *inputs):
        x, weight, bias, residual, ctx.activation = inputs
        out, saved = _linear(*inputs)
        ctx.save_for_backward(x, weight, saved)
        ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
        return out

    @staticmethod
    def backward(ctx, dout):
        refuse_tangents((dout,))
        # With create_graph=True, differentiating the result must raise: the operator does.
        return _gradients(ctx, dout, run=None if torch.is_grad_enabled() else _gemm)

    jvp = staticmethod(refuse_forward_mode)


def _activation(name):
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise Error(f"activation is {name!r}; {', '.join(ACTIVATIONS)} are accepted")
    return ACTIVATIONS[name]


def _check_residual(x, residual):
    if x.dim() == 0:
        raise Error("x has 0 dims; [..., K] is accepted")
    check_leading_dims(x, residual=residual)


def check_leading_dims(x, **given):
    """Rows are flattened, so that other leading dims with as many rows would go to the wrong ones."""
    for name, tensor in given.items():
        if tensor is not None and tensor.dim() != 2 and tensor.shape[:-1] != x.shape[:-1]:
            raise Error(f"{name} is {list(tensor.shape)}, but x is {list(x.shape)}; all dims but the last must be the same")


def linear(x, weight, bias=None, *, activation="none", residual=None):
    """activation(x @ weight.T + bias) + residual, in one kernel, with gradients.

    x: [..., K]; weight: [N, K], as in torch.nn.Linear; bias: [N]; residual: [..., N]. fp16 and bf16, fp32 on the CPU; sums
    are fp32. activation: "none", "relu", "silu", "gelu_tanh" or "gelu" (erf).
    """
    mode, (x, weight, bias, residual) = prepared(x=x, weight=weight, bias=bias, residual=residual)
    _check_residual(x, residual)
    if weight is None or weight.dim() != 2 or weight.shape[1] != x.shape[-1] or weight.dtype != x.dtype:
        got = "None" if weight is None else f"{list(weight.shape)} of {weight.dtype}"
        wanted = f"[N, {x.shape[-1]}] of {x.dtype} is accepted"
        raise Error(f"weight is {got}, but x is {list(x.shape)} of {x.dtype}; {wanted}")
    rows, added = _flat(x), _flat(residual)
    number = _activation(activation)
    if mode == GRADIENTS:
        out = _Linear.apply(rows, weight, bias, added, number)
    elif mode == PLAIN:  # nothing is saved
        tensors = (_rows(rows), _rows(weight), _rows(bias), None, None, None, _rows(added), None)
        out = _native.gemm(*tensors, number, 0, 0)
    else:
        out, _ = _linear_op(rows, weight, bias, added, number)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def grouped_linear(x, weight, offsets=None, bias=None, *, activation="none"):
    """A linear layer per group, activation(x @ weight[g].T + bias[g]), in one kernel, with gradients.

    weight: [G, N, K]; bias: [G, N].
    With offsets, an int32 tensor [G + 1] on x's device: rows offsets[g] to offsets[g + 1] of x, [rows, K], are group g's;
    groups may be empty. The result is [rows, N]; its rows from offsets[G] on are not written, and the gradients of x's are 0.
    The host does not read offsets.
    Without: x is [..., G, K], or [..., 1, K] if all groups have the same input, and the result is [..., G, N].
    """
    mode, (x, weight, bias, _) = prepared(x=x, weight=weight, bias=bias, offsets=offsets)
    if weight is None or weight.dim() != 3 or x.dim() == 0 or weight.shape[2] != x.shape[-1]:
        got = None if weight is None else list(weight.shape)
        raise Error(f"weight is {got}, but x is {list(x.shape)}; [G, N, K] is accepted, with x's last dim as K")
    groups, n, k = weight.shape
    number = _activation(activation)

    def run(rows):
        if mode == PLAIN:  # nothing is saved
            return _grouped_linear(rows, weight, offsets, bias, number, trains=False)[0]
        return _grouped_linear_op(rows, weight, offsets, bias, number)[0]

    if offsets is not None:
        return run(x)
    if x.dim() < 2 or x.shape[-2] not in (1, groups):
        raise Error(f"x is {list(x.shape)}; without offsets, [..., {groups}, K] and [..., 1, K] are accepted")
    lead = x.shape[:-2]
    if x.shape[-2] == 1:  # one product with all weights side by side
        flat = None if bias is None else bias.reshape(-1)
        return linear(x.squeeze(-2), weight.flatten(0, 1), flat, activation=activation).reshape(*lead, groups, n)
    return run(x.reshape(-1, groups, x.shape[-1])).reshape(*lead, groups, n)


def grouped_mlp(x, up, down, *, activation="silu", up_bias=None, down_bias=None):
    """An MLP per group, such as heads side by side: grouped_linear twice, with an activation between them, with gradients.

    x: [..., G, K], or [..., 1, K] if all groups have the same input; up: [G, H, K]; down: [G, N, H]; biases: [G, H] and
    [G, N]. The result is [..., G, N]. On a GPU, groups with the same input and few outputs are one tessera.mlp; for others whose
    H is no multiple of 16, weights are copied with zeros, so that hidden rows start at multiples of 32 bytes.
    """
    expect_tensors(x=x, up_bias=up_bias, down_bias=down_bias)
    for name, weight in (("up", up), ("down", down)):
        expect_tensors(**{name: weight})
        if weight.dim() != 3:
            raise Error(f"{name} has {weight.dim()} dims; 3 are accepted")
    for dim, expected in ((0, up.shape[0]), (2, up.shape[1])):
        if down.shape[dim] != expected:
            raise Error(f"down has size {down.shape[dim]} in dim {dim}; {expected} is expected")
    for name, bias, weight in (("up_bias", up_bias, up), ("down_bias", down_bias, down)):
        if bias is not None and bias.shape != weight.shape[:2]:
            raise Error(f"{name} is {list(bias.shape)}; {list(weight.shape[:2])} is expected")
    if x.is_cuda and x.dim() >= 2 and x.shape[-2] == 1 and down.shape[0] * down.shape[1] <= 64:
        from tessera._mlp import mlp_of_groups  # which uses this file

        return mlp_of_groups(x.squeeze(-2), up, down, activation, up_bias, down_bias)
    if x.is_cuda and (missing := -up.shape[1] % 16):
        pad = torch.nn.functional.pad
        up, down = pad(up, (0, 0, 0, missing)), pad(down, (0, missing))
        up_bias = None if up_bias is None else pad(up_bias, (0, missing))
    return grouped_linear(grouped_linear(x, up, None, up_bias, activation=activation), down, None, down_bias)


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
    padded=False,
):
    """The C function of that name (docs/contract.md): A B with an epilogue, without gradients.

    a: [M, K], or [K, M] if transpose_a; b and gate: [N, K], or [K, N] if transpose_b; out_dtype: a's (default) or
    torch.float32. padded: rows of the result start at multiples of 128 bytes, whatever their length.
    """
    for name, tensor in (("a", a), ("b", b)):
        expect_tensors(**{name: tensor})
    if out_dtype not in (None, a.dtype, torch.float32):
        raise Error(f"out_dtype is {out_dtype}; {a.dtype} and torch.float32 are accepted")
    flags = (A_TRANSPOSED if transpose_a else 0) | (B_TRANSPOSED if transpose_b else 0)
    out_fp32 = out_dtype == torch.float32 and a.dtype != torch.float32
    return _gemm_op(
        a, b, bias, gate, gate_bias, saved, residual, _activation(activation), flags, out_fp32, padded
    )


def grouped_gemm(
    a,
    b,
    offsets=None,
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
    """The C library's grouped product (docs/contract.md): one product per group, without gradients.

    offsets and b [G, N, K]: groups of a's rows, [M, K], to [M, N]. offsets and b [K, N], with transpose_a and transpose_b:
    groups of terms, to [G, M, N]. No offsets: a [G, M, K], or [M, K] if the groups share it, b [G, N, K], to [G, M, N].
    """
    for name, tensor in (("a", a), ("b", b)):
        expect_tensors(**{name: tensor})
    if out_dtype not in (None, a.dtype, torch.float32):
        raise Error(f"out_dtype is {out_dtype}; {a.dtype} and torch.float32 are accepted")
    flags = (A_TRANSPOSED if transpose_a else 0) | (B_TRANSPOSED if transpose_b else 0)
    out_fp32 = out_dtype == torch.float32 and a.dtype != torch.float32
    return _grouped_gemm_op(
        a, b, offsets, bias, gate, gate_bias, saved, residual, _activation(activation), flags, out_fp32, False
    )
