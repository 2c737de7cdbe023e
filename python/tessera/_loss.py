"""The likelihood of Gaussian mixtures: the operator as torch.library knows it, and the functions on top."""

import torch

from tessera import _native
from tessera._error import Error
from tessera._gemm import _activation, grouped_mlp
from tessera._mlp import block_diagonal
from tessera._ops import (
    PLAIN,
    _TAGS,
    _flat,
    _rows,
    eager_mode,
    expect_tensors,
    final,
    lib,
    prepared,
    refuse_vmap,
    register_autograd,
    register_fake,
    want_gradients,
)

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
register_fake("gmm_nll", _fake_gmm_nll)


def _setup_context(ctx, inputs, output):
    params, _, ctx.reduction, ctx.with_gradient = inputs
    ctx.save_for_backward(params, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, _):
    if dout is None:
        return None, None, None, None
    if ctx.needs_input_grad[1]:
        raise Error("tessera.gmm_nll has no gradient for target", "unsupported")
    if not ctx.with_gradient:
        raise Error("tessera::gmm_nll was called with with_gradient=False; its gradient is made in the forward pass")
    params, dparams = ctx.saved_tensors
    scale = dout / dparams.shape[0] if ctx.reduction == REDUCTIONS["mean"] else dout
    return final((dparams * scale[:, None, None]).to(dparams.dtype), params), None, None, None


_gmm_nll_op = register_autograd("gmm_nll", _gradients, _setup_context)


def gmm_nll(params, target, reduction="mean"):
    """The negative log-likelihood of target under Gaussian mixtures, with its gradient made in the same pass.

    params: [..., K, 3] of (logit, mu, log sigma), fp16, bf16 or fp32; target: [...], of the same type or fp32. reduction:
    "mean", "sum" (a scalar) or "none" ([...]), in fp32. Sums are in a fixed order. docs/contract.md says what happens if
    z^2 is beyond fp32's range. There is no gradient for target.
    """
    if reduction not in REDUCTIONS:
        raise Error(f"reduction is {reduction!r}; {', '.join(REDUCTIONS)} are accepted")
    expect_tensors(params=params)
    expect_tensors(target=target)
    if params.dim() < 2 or target.shape != params.shape[:-2]:
        raise Error(f"params has shape {list(params.shape)} and target {list(target.shape)}; [..., K, 3] and [...] are accepted")
    rows = params.flatten(0, -3) if params.dim() > 2 else params[None]
    out, _ = _gmm_nll_op(rows, target.reshape(-1), REDUCTIONS[reduction], want_gradients(params))
    return out.reshape(target.shape if reduction == "none" else ())


def mlp_gmm_nll(x, up, down, target, reduction="mean", *, activation="silu"):
    """gmm_nll of the mixtures whose components K MLPs with the same input give: gmm_nll(grouped_mlp(x[..., None, :], up, down), target).

    x: [..., C]; up: [K, H, C]; down: [K, 3, H], for logit, mu and log sigma; target: [...], of x's type or fp32. An eager call without
    a gradient is one op for up to 21 components, and on Hopper, for up to ten and 512 columns of x, one kernel: neither
    hidden rows nor parameters reach memory. Others are the two calls.
    """
    if reduction not in REDUCTIONS:
        raise Error(f"reduction is {reduction!r}; {', '.join(REDUCTIONS)} are accepted")
    expect_tensors(x=x)
    expect_tensors(up=up)
    expect_tensors(down=down)
    expect_tensors(target=target)
    mode, (x, up, down) = prepared(x=x, up=up, down=down)
    if x.dim() == 0 or up.dim() != 3 or down.shape != (up.shape[0], 3, up.shape[1]):
        raise Error(f"x has shape {list(x.shape)}, up {list(up.shape)} and down {list(down.shape)}; [..., C], [K, H, C] and [K, 3, H] are accepted")
    if target.shape != x.shape[:-1]:
        raise Error(f"x has shape {list(x.shape)} and target {list(target.shape)}; [..., C] and [...] are accepted")
    few = 3 * up.shape[0] <= 64  # else a block-diagonal matrix is mostly zeros
    if not few or mode != PLAIN or eager_mode(target) != PLAIN:
        return gmm_nll(grouped_mlp(x[..., None, :], up, down, activation=activation), target, reduction)
    tensors = _flat(x), up.flatten(0, 1), block_diagonal(down, 0, True), target.reshape(-1)
    out = _native.mlp_gmm_nll(*map(_rows, tensors), _activation(activation), REDUCTIONS[reduction])
    return out.reshape(target.shape if reduction == "none" else ())
