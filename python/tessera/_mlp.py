"""Two linear layers with an activation or a gated pair between them: the operators, and tessera.mlp on top."""

import torch

from tessera import _native
from tessera._error import Error
from tessera._gemm import _activation, _rows
from tessera._ops import lib, refuse_vmap, _TAGS

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


# The tensors of tessera_mlp, in its order.
_NAMES = (
    *("x", "up", "down", "out", "dout", "gate", "up_bias", "gate_bias", "down_bias", "residual"),
    *("before", "before_gate", "hidden", "dx", "dup", "ddown", "dgate", "dbefore", "dbefore_gate"),
)


def _run(activation, wanted, **given):
    """What the library makes of the given tensors: those that are wanted, by name."""
    names = [name for name in _NAMES if name in wanted]
    made = _native.mlp(
        tuple(_rows(given.get(name)) for name in _NAMES), activation, sum(1 << _NAMES.index(name) for name in names)
    )
    return dict(zip(names, made))


def _mlp(x, up, down, gate, up_bias, gate_bias, down_bias, residual, activation, save):
    kept = ("before", "hidden" if gate is None else "before_gate") if save else ()
    made = _run(
        activation,
        ("out", *kept),
        **{"x": x, "up": up, "down": down, "gate": gate, "up_bias": up_bias, "gate_bias": gate_bias},
        **{"down_bias": down_bias, "residual": residual},
    )
    return tuple(made.get(name, x.new_empty(0)) for name in ("out", "hidden", "before", "before_gate"))


def _mlp_backward(
    dout, x, up, down, gate, up_bias, gate_bias, hidden, before, before_gate, activation, needs_x, needs_weights
):
    wanted = ["dbefore"] if gate is None else ["dbefore", "dbefore_gate"]
    if needs_x:
        wanted.append("dx")
    if needs_weights:
        wanted += ["dup", "ddown"] if gate is None else ["dup", "ddown", "dgate"]
    kept = {}
    if before.numel() > 0 or hidden.numel() > 0:
        kept = {"before": before, "hidden": hidden} if gate is None else {"before": before, "before_gate": before_gate}
    made = _run(
        activation,
        wanted,
        **{"x": x, "up": up, "down": down, "dout": dout, "gate": gate, "up_bias": up_bias, "gate_bias": gate_bias},
        **kept,
    )
    return tuple(
        made.get(name, x.new_empty(0)) for name in ("dx", "dup", "ddown", "dgate", "dbefore", "dbefore_gate")
    )


for _name, _function in {"mlp": _mlp, "mlp_backward": _mlp_backward}.items():
    for _device in ("CPU", "CUDA"):
        lib.impl(_name, _function, _device)
    lib.impl(_name, refuse_vmap, "FuncTorchBatched")


def _fake_hidden(x, width):
    return x.new_empty_strided((x.shape[0], width), ((width + 7) // 8 * 8, 1))


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


torch.library.register_fake("tessera::mlp", _fake_mlp, lib=lib)
torch.library.register_fake("tessera::mlp_backward", _fake_mlp_backward, lib=lib)


def _setup_context(ctx, inputs, output):
    x, up, down, gate, up_bias, gate_bias, down_bias, residual, activation, _ = inputs
    ctx.save_for_backward(x, up, down, gate, up_bias, gate_bias, *output[1:])
    ctx.activation = activation
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, *_):
    if dout is None:
        return (None,) * 10
    x, up, down, gate, up_bias, gate_bias, hidden, before, before_gate = ctx.saved_tensors
    needed = ctx.needs_input_grad
    weights = any(needed[i] for i in (1, 2, 3))
    dx = dup = ddown = dgate = dup_bias = dgate_bias = None
    if any(needed[:6]):
        dx, dup, ddown, dgate, dbefore, dbefore_gate = torch.ops.tessera.mlp_backward(
            dout, x, up, down, gate, up_bias, gate_bias, hidden, before, before_gate, ctx.activation, needed[0], weights
        )
        dup_bias = dbefore.sum(0) if needed[4] else None
        dgate_bias = dbefore_gate.sum(0) if needed[5] else None
    return (
        dx if needed[0] else None,
        dup if needed[1] else None,
        ddown if needed[2] else None,
        dgate if needed[3] else None,
        dup_bias,
        dgate_bias,
        dout.sum(0) if needed[6] else None,
        dout if needed[7] else None,
        None,
        None,
    )


def _refuse_gradient(ctx, *_):
    raise Error("tessera.mlp has no second gradient", "unsupported")


torch.library.register_autograd("tessera::mlp", _gradients, setup_context=_setup_context, lib=lib)
torch.library.register_autograd("tessera::mlp_backward", _refuse_gradient, lib=lib)


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
    if (gate_bias is not None) != (gate is not None and up_bias is not None):
        raise Error("with a gate, up_bias and gate_bias are given both or neither; without, gate_bias is not accepted")
    tensors = (x, up, down, gate, up_bias, gate_bias, down_bias, residual)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    rows = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(-1, residual.shape[-1])
    out = torch.ops.tessera.mlp(
        rows, up, down, gate, up_bias, gate_bias, down_bias, added, _activation(activation), trains and not recompute
    )[0]
    return out.reshape(*x.shape[:-1], down.shape[0])
