"""Cross-entropy of a linear layer's logits: the operators as torch.library knows them, and the function on top."""

import torch

from tessera import _native
from tessera._error import Error
from tessera._loss import REDUCTIONS
from tessera._ops import GRADIENTS, PLAIN, _TAGS, _flat, _private, _rows
from tessera._ops import final, lib, prepared, refuse_forward_mode, refuse_tangents, refuse_vmap, register_autograd
from tessera._ops import register_fake, want_gradients

# Targets are int32; what is outside of 0 to V - 1 is ignored. dhidden and dweight are the gradients of out, or empty.
lib.define(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, int reduction, bool needs_hidden, "
    "bool needs_weight) -> (Tensor out, Tensor dhidden, Tensor dweight)",
    tags=_TAGS,
)
# Of the losses of all rows, with the gradient of each.
lib.define(
    "linear_cross_entropy_backward(Tensor dout, Tensor hidden, Tensor weight, Tensor target, bool needs_hidden, "
    "bool needs_weight) -> (Tensor dhidden, Tensor dweight)",
    tags=_TAGS,
)


_foreach_mul_ = _private("_foreach_mul_")
_unscale_ = _private("_amp_foreach_non_finite_check_and_unscale_")  # multiplies by a 0-dim fp32 tensor, in fp32


def _scaled(gradient, scale):
    """gradient * scale, of gradient's type; scale: a 0-dim fp32 tensor. fp16 could not hold the scale."""
    if gradient.dtype == torch.float16:
        return (gradient * scale.reshape(1, 1)).to(gradient.dtype)
    return gradient * scale


def _scale_in_place(gradient, scale):
    """The same in place: a copy of the weight's gradient would double its memory."""
    if _unscale_ is not None and not (gradient.dtype == torch.bfloat16 and gradient.is_cuda):  # which PyTorch's lacks
        _unscale_([gradient], torch.zeros_like(scale), scale)
    elif _foreach_mul_ is not None and gradient.dtype != torch.float16:
        _foreach_mul_([gradient], scale.to(gradient.dtype))  # mul_ takes four times as long with a scale on the device
    else:
        gradient.copy_(_scaled(gradient, scale))
    return gradient


def _run(hidden, weight, target, reduction, needs_hidden, needs_weight):
    """out, dhidden or None, dweight or None."""
    needed = (needs_hidden, needs_weight)
    dout = rest = None
    if reduction == REDUCTIONS["mean"] and any(needed):
        counted = ((target >= 0) & (target < weight.shape[0])).sum().clamp(min=1).float()
        dout = 1.0 / counted
        if hidden.dtype == torch.float16:
            # Divided by counted, the gradients of single logits could be too small for fp16; undivided, their sums over
            # the rows could be too large. So the kernel divides by a power of two near the square root of counted.
            root = torch.exp2(torch.floor(torch.log2(counted) / 2))
            dout, rest = 1.0 / root, root / counted
        dout = dout.expand(hidden.shape[0]).contiguous()
    out, *gradients = _native.linear_cross_entropy(_rows(hidden), _rows(weight), target, dout, reduction, *needed)
    if rest is not None:
        gradients = [None if gradient is None else _scale_in_place(gradient, rest) for gradient in gradients]
    return out, *gradients


def _run_backward(dout, hidden, weight, target, needs_hidden, needs_weight):
    return _native.linear_cross_entropy(
        _rows(hidden), _rows(weight), target, dout.contiguous(), REDUCTIONS["none"], needs_hidden, needs_weight
    )[1:]


def _or_empty(hidden, gradients):
    return tuple(hidden.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _linear_cross_entropy(hidden, weight, target, reduction, needs_hidden, needs_weight):
    out, *gradients = _run(hidden, weight, target, reduction, needs_hidden, needs_weight)
    return out, *_or_empty(hidden, gradients)


def _linear_cross_entropy_backward(dout, hidden, weight, target, needs_hidden, needs_weight):
    return _or_empty(hidden, _run_backward(dout, hidden, weight, target, needs_hidden, needs_weight))


def _fake_gradients(hidden, weight, needs_hidden, needs_weight):
    return (
        hidden.new_empty(hidden.shape if needs_hidden else (0,)),
        weight.new_empty(weight.shape if needs_weight else (0,)),
    )


def _fake(hidden, weight, target, reduction, needs_hidden, needs_weight):
    rows = hidden.shape[0] if reduction == REDUCTIONS["none"] else 1
    out = hidden.new_empty((rows,), dtype=torch.float32)
    return out, *_fake_gradients(hidden, weight, needs_hidden, needs_weight)


def _fake_backward(dout, hidden, weight, target, needs_hidden, needs_weight):
    return _fake_gradients(hidden, weight, needs_hidden, needs_weight)


for _name, _function, _shapes in (
    ("linear_cross_entropy", _linear_cross_entropy, _fake),
    ("linear_cross_entropy_backward", _linear_cross_entropy_backward, _fake_backward),
):
    for _device in ("CPU", "CUDA"):
        lib.impl(_name, _function, _device)
    lib.impl(_name, refuse_vmap, "FuncTorchBatched")
    register_fake(_name, _shapes)


def _setup_context(ctx, inputs, output):
    hidden, weight, target, ctx.reduction, *ctx.made = inputs
    ctx.save_for_backward(hidden, weight, target, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, *_):
    nothing = (None,) * 4
    if dout is None:
        return None, None, *nothing
    hidden, weight, target, *made = ctx.saved_tensors
    needed = ctx.needs_input_grad[:2]
    if ctx.reduction == REDUCTIONS["none"]:
        made = _backward_op(dout, hidden, weight, target, *needed)
        return *(one if wanted else None for one, wanted in zip(made, needed)), *nothing
    if any(wanted and not was for wanted, was in zip(needed, ctx.made)):
        raise Error("tessera::linear_cross_entropy was called without the gradients that are needed now")
    scaled = (final(_scaled(one, dout.reshape(())), hidden, weight) if wanted else None for one, wanted in zip(made, needed))
    return *scaled, *nothing


def _refuse_gradient(ctx, *_):
    raise Error("tessera.linear_cross_entropy has no second gradient", "unsupported")


_forward_op = register_autograd("linear_cross_entropy", _gradients, _setup_context)
_backward_op = register_autograd("linear_cross_entropy_backward", _refuse_gradient)


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient of an eager call on plain tensors; all other calls use that of the operator.

    The gradients, which the forward makes, are scaled in place. So a second backward through the same call raises.
    """

    @staticmethod
    def forward(ctx, hidden, weight, target, reduction):
        ctx.reduction, ctx.scaled = reduction, False
        needed = (False, False) if reduction == REDUCTIONS["none"] else ctx.needs_input_grad[:2]
        out, *made = _run(hidden, weight, target, reduction, *needed)
        if reduction == REDUCTIONS["none"]:
            made = (hidden, weight)
        ctx.save_for_backward(target, *made)
        return out

    @staticmethod
    def backward(ctx, dout):
        refuse_tangents((dout,))
        if ctx.scaled:
            raise Error("tessera.linear_cross_entropy has scaled its gradients in place; call it again", "unsupported")
        target, *made = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            raise Error("tessera.linear_cross_entropy has no second gradient", "unsupported")
        if ctx.reduction == REDUCTIONS["none"]:
            return *_run_backward(dout, *made, target, *needed), None, None
        ctx.scaled = True
        return *(None if one is None else _scale_in_place(one, dout.reshape(())) for one in made), None, None

    jvp = staticmethod(refuse_forward_mode)


def _labels(target, classes, ignore_index):
    """int32, with -1 for what is ignored."""
    target = target.long()  # narrower types may not hold ignore_index or classes
    ignored = (target == ignore_index) | (target < 0) | (target >= classes)
    return target.masked_fill(ignored, -1).to(torch.int32)


def linear_cross_entropy(hidden, weight, target, *, ignore_index=-100, reduction="mean"):
    """F.cross_entropy(F.linear(hidden, weight), target), with gradients, one chunk of logits at a time.

    hidden: [..., C], weight: [V, C], target: [...] of integers; those that are ignore_index, or no class, have loss 0, and
    the mean is over the others (0 if there are none). reduction: "mean" or "sum" (a scalar), whose gradients are made by the
    forward, or "none" ([...]), whose backward computes the logits again. The loss is fp32.
    """
    if reduction not in REDUCTIONS:
        raise Error(f"reduction is {reduction!r}; {', '.join(REDUCTIONS)} are accepted")
    mode, (hidden, weight, _) = prepared(hidden=hidden, weight=weight, target=target)
    if weight is None or target is None:
        raise Error("weight or target is None; tensors are expected")
    if hidden.dim() < 1 or target.shape != hidden.shape[:-1]:
        raise Error(f"hidden has shape {list(hidden.shape)} and target {list(target.shape)}; [..., C] and [...] are accepted")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise Error(f"target is {target.dtype}; integers are accepted")
    rows = _flat(hidden)
    labels = _labels(target.reshape(-1), weight.shape[0], ignore_index)
    number = REDUCTIONS[reduction]
    if mode == GRADIENTS:
        out = _LinearCrossEntropy.apply(rows, weight, labels, number)
    elif mode == PLAIN:
        out = _run(rows, weight, labels, number, False, False)[0]
    else:
        reduced = reduction != "none"
        out, *_ = _forward_op(
            rows, weight, labels, number, reduced and want_gradients(hidden), reduced and want_gradients(weight)
        )
    return out.reshape(target.shape if reduction == "none" else ())
