"""Two linear layers with an activation or a gated pair between them: the operators, and tessera.mlp on top."""

import torch

from tessera import _native
from tessera._error import Error
from tessera._gemm import _activation, _check_residual
from tessera._ops import GRADIENTS, PLAIN, _TAGS, eager_mode, lib, prepared, refuse_forward_mode, refuse_tangents
from tessera._ops import _flat, _rows, refuse_vmap, register_autograd, register_fake, want_gradients

lib.define(
    "mlp(Tensor x, Tensor up, Tensor down, Tensor? gate, Tensor? up_bias, Tensor? gate_bias, Tensor? down_bias, "
    "Tensor? residual, int activation, bool save) -> (Tensor out, Tensor hidden, Tensor before, Tensor before_gate)",
    tags=_TAGS,
)
lib.define(
    "mlp_backward(Tensor dout, Tensor x, Tensor up, Tensor down, Tensor? gate, Tensor? up_bias, Tensor? gate_bias, "
    "Tensor hidden, Tensor before, Tensor before_gate, int activation, bool needs_x, bool needs_weights) "
    "-> (Tensor dx, Tensor dup, Tensor ddown, Tensor dgate, Tensor dbefore, Tensor dbefore_gate)",
    tags=_TAGS,
)


# Bits of what is made: the place of a tensor in tessera_mlp.
_OUT, _BEFORE, _BEFORE_GATE, _HIDDEN = 1 << 3, 1 << 10, 1 << 11, 1 << 12
_DX, _DUP, _DDOWN, _DGATE, _DBEFORE, _DBEFORE_GATE = (1 << place for place in range(13, 19))


def _forward(x, up, down, gate, up_bias, gate_bias, down_bias, residual, activation, save):
    """out; if it saves, out, before, and hidden or, with a gate, before_gate."""
    tensors = map(_rows, (x, up, down, None, None, gate, up_bias, gate_bias, down_bias, residual))
    kept = _BEFORE | (_HIDDEN if gate is None else _BEFORE_GATE) if save else 0
    return _native.mlp((*tensors, *(None,) * 9), activation, _OUT | kept)


def _backward(dout, x, up, down, gate, up_bias, gate_bias, before, kept, activation, needs_x, needs_weights):
    """dx if it is needed; dup, ddown and, with a gate, dgate if they are; dbefore and, with a gate, dbefore_gate.

    kept: hidden, or, with a gate, before_gate; before and kept are None if they are to be computed again.
    """
    before_gate, hidden = (None, kept) if gate is None else (kept, None)
    tensors = map(
        _rows, (x, up, down, None, dout, gate, up_bias, gate_bias, None, None, before, before_gate, hidden)
    )
    wanted = _DBEFORE | (_DX if needs_x else 0)
    if gate is not None:
        wanted |= _DBEFORE_GATE | (_DGATE if needs_weights else 0)
    if needs_weights:
        wanted |= _DUP | _DDOWN
    return _native.mlp((*tensors, *(None,) * 6), activation, wanted)


def _mlp(x, up, down, gate, up_bias, gate_bias, down_bias, residual, activation, save):
    made = _forward(x, up, down, gate, up_bias, gate_bias, down_bias, residual, activation, save)
    before, kept = made[1:] if save else (x.new_empty(0), x.new_empty(0))
    hidden, before_gate = (kept, x.new_empty(0)) if gate is None else (x.new_empty(0), kept)
    return made[0], hidden, before, before_gate


def _mlp_backward(
    dout, x, up, down, gate, up_bias, gate_bias, hidden, before, before_gate, activation, needs_x, needs_weights
):
    kept = hidden if gate is None else before_gate
    if before.numel() == 0 and kept.numel() == 0:
        before = kept = None
    made = iter(
        _backward(dout, x, up, down, gate, up_bias, gate_bias, before, kept, activation, needs_x, needs_weights)
    )
    here = (needs_x, needs_weights, needs_weights, needs_weights and gate is not None, True, gate is not None)
    return tuple(next(made) if one else x.new_empty(0) for one in here)


for _name, _function in {"mlp": _mlp, "mlp_backward": _mlp_backward}.items():
    for _device in ("CPU", "CUDA"):
        lib.impl(_name, _function, _device)
    lib.impl(_name, refuse_vmap, "FuncTorchBatched")


def _fake_hidden(x, width):
    return x.new_empty_strided((x.shape[0], width), ((width + 63) // 64 * 64, 1))


def _fake_mlp(x, up, down, gate, up_bias, gate_bias, down_bias, residual, activation, save):
    nothing = x.new_empty(0)
    hidden = _fake_hidden(x, up.shape[0]) if save and gate is None else nothing
    before = _fake_hidden(x, up.shape[0]) if save else x.new_empty(0)
    before_gate = _fake_hidden(x, up.shape[0]) if save and gate is not None else x.new_empty(0)
    return x.new_empty((x.shape[0], down.shape[0])), hidden, before, before_gate


def _fake_mlp_backward(
    dout, x, up, down, gate, up_bias, gate_bias, hidden, before, before_gate, activation, needs_x, needs_weights
):
    def weight(like, needed):
        return like.new_empty(like.shape) if needed else x.new_empty(0)

    dbefore = _fake_hidden(x, up.shape[0])
    return (
        x.new_empty(x.shape) if needs_x else x.new_empty(0),
        weight(up, needs_weights),
        weight(down, needs_weights),
        weight(gate, needs_weights) if gate is not None else x.new_empty(0),
        dbefore,
        _fake_hidden(x, up.shape[0]) if gate is not None else x.new_empty(0),
    )


register_fake("mlp", _fake_mlp)
register_fake("mlp_backward", _fake_mlp_backward)


def _setup_context(ctx, inputs, output):
    x, up, down, gate, up_bias, gate_bias, down_bias, residual, activation, _ = inputs
    ctx.save_for_backward(x, up, down, gate, up_bias, gate_bias, *output[1:])
    ctx.activation = activation
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _input_gradients(needed, dout, dx, dup, ddown, dgate, dbefore, dbefore_gate):
    """Those of the arguments of tessera::mlp."""
    return (
        dx if needed[0] else None,
        dup if needed[1] else None,
        ddown if needed[2] else None,
        dgate if needed[3] else None,
        dbefore.sum(0) if needed[4] else None,
        dbefore_gate.sum(0) if needed[5] else None,
        dout.sum(0) if needed[6] else None,
        dout if needed[7] else None,
        None,
        None,
    )


def _gradients(ctx, dout, *_):
    if dout is None:
        return (None,) * 10
    x, up, down, gate, up_bias, gate_bias, hidden, before, before_gate = ctx.saved_tensors
    needed = ctx.needs_input_grad
    made = (None,) * 6
    if any(needed[:6]):
        made = _mlp_backward_op(
            *(dout, x, up, down, gate, up_bias, gate_bias, hidden, before, before_gate, ctx.activation),
            *(needed[0], any(needed[1:4])),
        )
    return _input_gradients(needed, dout, *made)


def _refuse_gradient(ctx, *_):
    raise Error("tessera.mlp has no second gradient", "unsupported")


_mlp_op = register_autograd("mlp", _gradients, _setup_context)
_mlp_backward_op = register_autograd("mlp_backward", _refuse_gradient)


class _Mlp(torch.autograd.Function):
    """The gradient of an eager call on plain tensors; all other calls use that of torch.ops.tessera.mlp."""

    @staticmethod
    def forward(ctx, *inputs):
        x, up, down, gate, up_bias, gate_bias, _, _, ctx.activation, save = inputs
        out, *kept = _forward(*inputs)
        ctx.save_for_backward(x, up, down, gate, up_bias, gate_bias, *(kept if save else (None, None)))
        return out

    @staticmethod
    def backward(ctx, dout):
        refuse_tangents((dout,))
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad
        gated = saved[3] is not None
        dx = dup = ddown = dgate = dbefore = dbefore_gate = None
        if any(needed[:6]):
            # With create_graph=True, differentiating the result must raise: there is no second derivative.
            run = _MlpBackward.apply if torch.is_grad_enabled() else _backward
            weights = any(needed[1:4])
            made = iter(run(dout, *saved, ctx.activation, needed[0], weights))
            dx = next(made) if needed[0] else None
            dup, ddown = (next(made), next(made)) if weights else (None, None)
            dgate = next(made) if weights and gated else None
            dbefore, dbefore_gate = next(made), next(made) if gated else None
        return _input_gradients(needed, dout, dx, dup, ddown, dgate, dbefore, dbefore_gate)

    jvp = staticmethod(refuse_forward_mode)


class _MlpBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        return _backward(*inputs)

    backward = staticmethod(_refuse_gradient)
    jvp = staticmethod(refuse_forward_mode)


def mlp(
    x,
    up,
    down,
    gate=None,
    *,
    activation="silu",
    up_bias=None,
    gate_bias=None,
    down_bias=None,
    residual=None,
    recompute=False,
):
    """activation(x @ up.T + up_bias) @ down.T + down_bias + residual, with gradients.

    With a gate, the hidden rows are (x @ up.T + up_bias) * activation(x @ gate.T + gate_bias).
    x: [..., K]; up and gate: [H, K]; down: [N, H]; residual: [..., N]. Hidden rows are kept at a padded stride, which
    makes products with any H fast. recompute: the backward computes them again instead of keeping them from the forward.
    """
    mode, (x, up, down, gate, up_bias, gate_bias, down_bias, residual) = prepared(
        x=x, up=up, down=down, gate=gate, up_bias=up_bias, gate_bias=gate_bias, down_bias=down_bias, residual=residual
    )
    if (gate_bias is not None) != (gate is not None and up_bias is not None):
        raise Error("with a gate, up_bias and gate_bias are given both or neither; without, gate_bias is not accepted")
    _check_residual(x, residual)
    tensors = (_flat(x), up, down, gate, up_bias, gate_bias, down_bias, _flat(residual))
    if mode == GRADIENTS:
        out = _Mlp.apply(*tensors, _activation(activation), not recompute)
    elif mode == PLAIN:
        (out,) = _forward(*tensors, _activation(activation), False)
    else:
        out = _mlp_op(*tensors, _activation(activation), want_gradients(*tensors) and not recompute)[0]
    return out if x.dim() == 2 else out.reshape(*x.shape[:-1], down.shape[0])


def block_diagonal(down, missing, plain):
    """[G, N, H] as the blocks of a matrix, and `missing` rows of zeros; rows start at multiples of 16 bytes."""
    groups, outputs, hidden = down.shape
    columns = groups * hidden
    if plain:
        blocks = down.new_zeros(groups * outputs + missing, columns + -columns % 8)
        width = blocks.stride(0)
        blocks.as_strided(down.shape, (outputs * width + hidden, width, 1)).copy_(down)
    else:
        blocks = torch.diagonal_scatter(down.new_zeros(groups, outputs, groups, hidden), down.permute(1, 2, 0), 0, 0, 2)
        blocks = torch.nn.functional.pad(blocks.flatten(2).flatten(0, 1), (0, -columns % 8, 0, missing))
    return blocks[:, :columns]


def mlp_of_groups(x, up, down, activation, up_bias, down_bias):
    """grouped_mlp for groups with the same input, x: [..., K], as one MLP whose second layer is block-diagonal.

    A tile of the second product has more columns than all groups together have outputs, so the zeros cost nothing; in
    return, activations and their derivatives are epilogues. Outputs are padded to rows of whole 16 bytes, and so are the rows of
    the second weight, which one kernel for both layers needs.
    """
    groups, outputs, _ = down.shape
    pad = torch.nn.functional.pad
    missing = -groups * outputs % 8
    out = mlp(
        x,
        up.flatten(0, 1),
        block_diagonal(down, missing, eager_mode(x, up, down, up_bias, down_bias) == PLAIN),
        activation=activation,
        up_bias=None if up_bias is None else up_bias.flatten(),
        down_bias=None if down_bias is None else pad(down_bias.flatten(), (0, missing)),
    )
    return out[..., : groups * outputs].unflatten(-1, (groups, outputs))
