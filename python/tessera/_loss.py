"""The likelihood of Gaussian mixtures: the operator as torch.library knows it, and the function on top."""

import torch

from tessera import _native
from tessera._error import Error
from tessera._norm import _rows
from tessera._ops import lib, refuse_vmap, _TAGS

# Constants of tessera/loss.h.
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

lib.define(
    "gmm_nll(Tensor params, Tensor target, int reduction, bool with_gradient) -> (Tensor out, Tensor dparams)",
    tags=_TAGS,
)


def _gmm_nll(params, target, reduction, with_gradient):
    out, dparams = _native.gmm_nll(_rows(params), _rows(target), reduction, with_gradient)
    return out, params.new_empty(0) if dparams is None else dparams


def _fake_gmm_nll(params, target, reduction, with_gradient):
    out = params.new_empty((params.shape[0] if reduction == 0 else 1,), dtype=torch.float32)
    return out, params.new_empty(params.shape if with_gradient else (0,))


for _device in ("CPU", "CUDA"):
    lib.impl("gmm_nll", _gmm_nll, _device)
lib.impl("gmm_nll", refuse_vmap, "FuncTorchBatched")
torch.library.register_fake("tessera::gmm_nll", _fake_gmm_nll, lib=lib)


def _setup_context(ctx, inputs, output):
    _, _, ctx.reduction, ctx.with_gradient = inputs
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, _):
    if dout is None:
        return None, None, None, None
    if ctx.needs_input_grad[1]:
        raise Error("tessera.gmm_nll has no gradient for target", "unsupported")
    if not ctx.with_gradient:
        raise Error("tessera::gmm_nll was called with with_gradient=False; its gradient is made in the forward pass")
    (dparams,) = ctx.saved_tensors
    scale = dout / dparams.shape[0] if ctx.reduction == REDUCTIONS["mean"] else dout
    return (dparams * scale[:, None, None]).to(dparams.dtype), None, None, None


torch.library.register_autograd("tessera::gmm_nll", _gradients, setup_context=_setup_context, lib=lib)


def gmm_nll(params, target, reduction="mean"):
    """The negative log-likelihood of target under Gaussian mixtures, with its gradient made in the same pass.

    params: [..., K, 3] of (logit, mu, log sigma), fp16, bf16 or fp32; target: [...], of the same type or fp32. reduction:
    "mean", "sum" (a scalar) or "none" ([...]), in fp32. Sums are in a fixed order. docs/contract.md says what happens if
    z^2 is beyond fp32's range. There is no gradient for target.
    """
    if reduction not in REDUCTIONS:
        raise Error(f"reduction is {reduction!r}; {', '.join(REDUCTIONS)} are accepted")
    if params.dim() < 3 or target.shape != params.shape[:-2]:
        raise Error(f"params has shape {list(params.shape)} and target {list(target.shape)}; [..., K, 3] and [...] are accepted")
    with_gradient = params.requires_grad and torch.is_grad_enabled()
    rows = params.reshape(-1, *params.shape[-2:])
    out, _ = torch.ops.tessera.gmm_nll(rows, target.reshape(-1), REDUCTIONS[reduction], with_gradient)
    return out.reshape(target.shape if reduction == "none" else ())
