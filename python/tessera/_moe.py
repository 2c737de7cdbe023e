"""Mixtures of experts: the operators, and tessera.moe on top."""

from numbers import Integral

import torch

from tessera import _native
from tessera._error import Error
from tessera._gemm import _activation, check_leading_dims
from tessera._ops import _TAGS, expect_tensors, lib, refuse_vmap, register_autograd, register_fake, under_autocast
from tessera._ops import _flat, _rows, want_gradients

SCORINGS = {"softmax": 0, "sigmoid": 1}
NORMALIZE = 1

lib.define(
    "moe(Tensor x, Tensor? logits, Tensor up, Tensor down, Tensor? gate, Tensor? experts, Tensor? weights, int top_k, "
    "int activation, int scoring, int flags, bool balance, bool save) -> (Tensor out, Tensor balance_loss, "
    "Tensor experts, Tensor weights, Tensor positions, Tensor offsets, "
    "Tensor before, Tensor before_gate, Tensor x_rows)",
    tags=_TAGS,
)
lib.define(
    "moe_backward(Tensor dout, Tensor? dbalance_loss, Tensor x, Tensor? logits, Tensor up, Tensor down, Tensor? gate, "
    "Tensor experts, Tensor weights, Tensor positions, Tensor offsets, "
    "Tensor before, Tensor before_gate, Tensor x_rows, "
    "int activation, int scoring, int flags, bool needs_x, bool needs_router, bool needs_weights) "
    "-> (Tensor dx, Tensor drouter, Tensor dup, Tensor ddown, Tensor dgate)",
    tags=_TAGS,
)

# The tensors of tessera_moe, in its order.
_NAMES = (
    *("x", "logits", "up", "down", "gate", "out", "dout", "experts", "weights", "positions", "offsets"),
    *("balance_loss", "dbalance_loss", "before", "before_gate", "x_rows"),
    *("dx", "dlogits", "dweights", "dup", "ddown", "dgate"),
)


def _run(wanted, top_k, activation, scoring, flags, **given):
    """What the library makes of the given tensors: those that are wanted, by name."""
    names = [name for name in _NAMES if name in wanted]
    made = _native.moe(
        tuple(_rows(given.get(name)) for name in _NAMES),
        sum(1 << _NAMES.index(name) for name in names),
        *(top_k, activation, scoring, flags),
    )
    return dict(zip(names, made))


def _moe(x, logits, up, down, gate, experts, weights, top_k, activation, scoring, flags, balance, save):
    wanted = ["out", "positions", "offsets"]
    given = {"x": x, "logits": logits, "up": up, "down": down, "gate": gate}
    if logits is None:
        given |= {"experts": experts.contiguous(), "weights": weights.contiguous()}
    else:
        wanted += ["experts", "weights"]
    if balance:
        wanted.append("balance_loss")
    if save:
        wanted += ["before", "x_rows"] if gate is None else ["before", "before_gate", "x_rows"]
    made = _run(wanted, top_k, activation, scoring, flags, **given)
    names = ("out", "balance_loss", "experts", "weights", "positions", "offsets", "before", "before_gate", "x_rows")
    return tuple(made.get(name, x.new_empty(0)) for name in names)


def _moe_backward(
    dout,
    dbalance_loss,
    x,
    logits,
    up,
    down,
    gate,
    experts,
    weights,
    positions,
    offsets,
    before,
    before_gate,
    x_rows,
    activation,
    scoring,
    flags,
    needs_x,
    needs_router,
    needs_weights,
):
    wanted = []
    if needs_x:
        wanted.append("dx")
    if needs_router:
        wanted.append("dweights" if logits is None else "dlogits")
    if needs_weights:
        wanted += ["dup", "ddown"] if gate is None else ["dup", "ddown", "dgate"]
    given = {"x": x, "logits": logits, "up": up, "down": down, "gate": gate, "dout": dout}
    given |= {"experts": experts.contiguous(), "weights": weights.contiguous()}
    given |= {"positions": positions, "offsets": offsets}
    if before.numel() > 0:
        given |= {"before": before, "x_rows": x_rows}
        given["before_gate"] = before_gate if gate is not None else None
    if dbalance_loss is not None and "dlogits" in wanted:
        given["dbalance_loss"] = dbalance_loss
    made = _run(wanted, experts.shape[-1], activation, scoring, flags, **given) if wanted else {}
    nothing = {name: x.new_empty(0) for name in ("dx", "dup", "ddown", "dgate")}
    made = nothing | made
    drouter = made.get("dweights", made.get("dlogits"))
    return (
        made["dx"],
        x.new_empty(0) if drouter is None else drouter,
        made["dup"],
        made["ddown"],
        made["dgate"],
    )


for _name, _function in {"moe": _moe, "moe_backward": _moe_backward}.items():
    for _device in ("CPU", "CUDA"):
        lib.impl(_name, _function, _device)
    lib.impl(_name, refuse_vmap, "FuncTorchBatched")


def _fake_moe(x, logits, up, down, gate, experts, weights, top_k, activation, scoring, flags, balance, save):
    def nothing():
        return x.new_empty(0)

    def rows(width):
        return x.new_empty_strided((x.shape[0] * top_k, width), ((width + 7) // 8 * 8, 1))

    pairs = (x.shape[0], top_k)
    routes = logits is not None
    return (
        x.new_empty(x.shape),
        x.new_empty(1, dtype=torch.float32) if balance else nothing(),
        x.new_empty(pairs, dtype=torch.int32) if routes else nothing(),
        x.new_empty(pairs, dtype=torch.float32) if routes else nothing(),
        x.new_empty(pairs, dtype=torch.int32),
        x.new_empty(up.shape[0] + 1, dtype=torch.int32),
        rows(up.shape[1]) if save else nothing(),
        rows(up.shape[1]) if save and gate is not None else nothing(),
        rows(up.shape[2]) if save else nothing(),
    )


def _fake_moe_backward(
    dout,
    dbalance_loss,
    x,
    logits,
    up,
    down,
    gate,
    experts,
    weights,
    positions,
    offsets,
    before,
    before_gate,
    x_rows,
    activation,
    scoring,
    flags,
    needs_x,
    needs_router,
    needs_weights,
):
    def like(tensor, needed):
        return tensor.new_empty(tensor.shape) if needed and tensor is not None else x.new_empty(0)

    return (
        like(x, needs_x),
        like(weights if logits is None else logits, needs_router),
        like(up, needs_weights),
        like(down, needs_weights),
        like(gate, needs_weights),
    )


register_fake("moe", _fake_moe)
register_fake("moe_backward", _fake_moe_backward)


def _setup_context(ctx, inputs, output):
    x, logits, up, down, gate, experts, weights, _, activation, scoring, flags, _, _ = inputs
    routed = (experts, weights) if logits is None else output[2:4]
    ctx.save_for_backward(x, logits, up, down, gate, *routed, *output[4:])
    ctx.options = activation, scoring, flags
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dbalance_loss, *_):
    x, logits, up, down, gate, *rest = ctx.saved_tensors
    needed = ctx.needs_input_grad
    if dout is None and dbalance_loss is None:
        return (None,) * 13
    if dout is None:
        dout = torch.zeros_like(x)
    of_router = needed[6] if logits is None else needed[1]
    of_weights = any(needed[i] for i in (2, 3, 4))
    dx, drouter, dup, ddown, dgate = _moe_backward_op(
        dout, dbalance_loss, x, logits, up, down, gate, *rest, *ctx.options, needed[0], of_router, of_weights
    )
    return (
        dx if needed[0] else None,
        drouter if logits is not None and of_router else None,
        dup if needed[2] else None,
        ddown if needed[3] else None,
        dgate if needed[4] else None,
        None,
        drouter if logits is None and of_router else None,
        *(None,) * 6,
    )


def _refuse_gradient(ctx, *_):
    raise Error("tessera.moe has no second gradient", "unsupported")


_moe_op = register_autograd("moe", _gradients, _setup_context)
_moe_backward_op = register_autograd("moe_backward", _refuse_gradient)


def moe(
    x,
    logits,
    up,
    down,
    gate=None,
    *,
    top_k=None,
    experts=None,
    weights=None,
    scoring="softmax",
    normalize=True,
    activation="silu",
    balance_loss=False,
    recompute=False,
):
    """A mixture of experts, with gradients: each token goes to the top_k experts with its largest logits.

    x: [..., K]; logits: [..., E], the result of the router's linear layer; up and gate: [E, H, K]; down: [E, K, H].
    The result is the sum of the experts' results, times softmax(logits) or sigmoid(logits), which normalize divides by
    their sum over the top_k. Among equal logits, the lowest expert comes first. balance_loss: returns (out, loss), too.
    experts and weights: [..., top_k], instead of logits, if they were chosen elsewhere; experts beyond E are skipped.
    recompute: the backward makes the rows between the steps again instead of keeping them from the forward.
    """
    expect_tensors(x=x, logits=logits, up=up, down=down, gate=gate, experts=experts, weights=weights)
    if scoring not in SCORINGS:
        raise Error(f"scoring is {scoring!r}; {', '.join(SCORINGS)} are known")
    if (logits is None) == (experts is None) or (experts is None) != (weights is None):
        raise Error("either logits are given, or experts and weights")
    if logits is None and balance_loss:
        raise Error("the balance loss needs logits")
    if experts is not None and (experts.is_floating_point() or experts.dtype == torch.bool):
        raise Error(f"experts is {experts.dtype}; integers are accepted")
    check_leading_dims(x, logits=logits, experts=experts, weights=weights)
    x, up, down, gate = under_autocast(x, up, down, gate)
    if logits is None:
        if top_k not in (None, experts.shape[-1]) or weights.shape != experts.shape:
            given = f"top_k is {top_k}, experts is {list(experts.shape)} and weights is {list(weights.shape)}"
            raise Error(f"{given}; experts and weights are [..., top_k]")
        top_k = experts.shape[-1]
    elif not isinstance(top_k, (int, Integral)):
        raise Error(f"top_k is {top_k!r}; an integer is accepted")
    if up.dim() == 3 and not 1 <= top_k <= up.shape[0]:
        raise Error(f"top_k is {top_k}; 1 to the number of experts is accepted, which is {up.shape[0]}")
    if logits is None:
        experts = experts.reshape(-1, top_k)
        if experts.dtype != torch.int32:  # clamped, since a cast alone could make an expert of what is none
            experts = experts.long().clamp(-1, up.shape[0]).to(torch.int32)
        weights = weights.reshape(-1, top_k).float()
    else:
        logits = _flat(logits)
    tensors = (x, logits, weights, up, down, gate)
    save = want_gradients(*tensors) and not recompute
    out, loss, *_ = _moe_op(
        *(_flat(x), logits, up, down, gate, experts, weights, top_k, _activation(activation), SCORINGS[scoring]),
        *(NORMALIZE if normalize and logits is not None else 0, balance_loss, save),
    )
    out = out.reshape(x.shape)
    return (out, loss.squeeze(0)) if balance_loss else out
