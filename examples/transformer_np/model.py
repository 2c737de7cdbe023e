"""A transformer neural process, in which every fused piece is a switch beside plain PyTorch.

Tokens are M points with a value (the context) and N points without (the targets). All M + N of them are queries, but only
the first M are keys, so a target sees the context and no other target. For each target, ten small MLPs give the components
of a Gaussian mixture. No bias, dropout or positions.
"""

import contextlib
import dataclasses
import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tessera

PIECES = ("pytorch", "tessera")
ATTENTION = ("sdpa-fa2", "sdpa-cudnn", "tessera-deterministic", "tessera-fp8", "tessera")
_SDPA = {"sdpa-fa2": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclasses.dataclass(frozen=True)
class Size:
    layers: int = 12
    heads: int = 8
    width: int = 512
    hidden: int = 1365
    components: int = 10


@dataclasses.dataclass(frozen=True)
class Switches:
    """Which implementation each piece has. None changes the model: the results agree to rounding."""

    attention: str = "tessera"
    mlp: str = "tessera"
    mixture: str = "tessera"  # its MLPs and its likelihood
    norms: str = "tessera"
    checkpointing: bool = False  # keep only the blocks' inputs, and run each block again in the backward pass
    compile: bool = False  # torch.compile each block and the heads
    recomputed: int = 1  # blocks whose MLP, if Tessera's, computes its hidden rows again instead of keeping them

    def __post_init__(self):
        for name, accepted in (("attention", ATTENTION), *((piece, PIECES) for piece in ("mlp", "mixture", "norms"))):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} is {getattr(self, name)!r}; {', '.join(accepted)} are accepted")


class Project(torch.autograd.Function):
    """The projections to q, k and v with one weight, [3 W, W]: q of all rows, k and v of the first `context`.

    Attention reads k and v where the product left them, side by side. Its three gradients need not be put together again:
    each is multiplied by its part of the weight, and the sum for the context's rows is made by the products. Only the
    gradient of the weight needs a copy of the context's rows.
    """

    @staticmethod
    def forward(ctx, x, weight, context):
        ctx.save_for_backward(x, weight)
        ctx.context = context
        batch, _, width = x.shape
        k, v = torch.bmm(x[:, :context], weight[width:].T.expand(batch, -1, -1)).split(width, -1)
        return F.linear(x, weight[:width]), k, v

    @staticmethod
    def backward(ctx, dq, dk, dv):
        x, weight = ctx.saved_tensors
        batch, _, width = x.shape
        parts = [part.expand(batch, width, width) for part in weight.split(width)]
        dx = F.linear(dq, weight[:width].T)
        known = dx[:, : ctx.context]
        known.baddbmm_(dk, parts[1]).baddbmm_(dv, parts[2])
        rows = torch.cat(x[:, : ctx.context].unbind()) if batch > 1 else x[0, : ctx.context]
        dweight = torch.empty_like(weight)
        for grad, of, part in zip((dq, dk, dv), (x.flatten(0, 1), rows, rows), dweight.split(width)):
            torch.mm(grad.flatten(0, 1).T, of, out=part)
        return dx, dweight, None


def attend(kind, q, k, v):
    """q: [B, M + N, H, D]; k and v: [B, M, H, D]."""
    if kind not in _SDPA:
        precision = "fp8" if kind == "tessera-fp8" else None
        return tessera.attention(q, k, v, deterministic=kind == "tessera-deterministic", precision=precision)
    with sdpa_kernel(_SDPA[kind]) if q.is_cuda else contextlib.nullcontext():
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)


class Norm(torch.autograd.Function):
    """(RMSNorm of x, x): the backward adds the gradients of both in its one kernel."""

    @staticmethod
    def forward(ctx, x, weight):
        rows = x.reshape(-1, x.shape[-1])
        out, _, rstd, mean = torch.ops.tessera.norm(rows, weight, None, None, 1e-6, False)
        ctx.save_for_backward(rows, weight, rstd, mean)
        ctx.set_materialize_grads(False)
        return out.view(x.shape), x

    @staticmethod
    def backward(ctx, dout, dx):
        if dout is None:
            return dx, None
        x, weight, rstd, mean = ctx.saved_tensors
        more = None if dx is None else dx.reshape(x.shape)
        made, dweight, _ = torch.ops.tessera.norm_backward(
            dout.reshape(x.shape), x, weight, rstd, mean, more, False, True, False)
        return made.view(dout.shape), dweight


def norm(kind, x, weight):
    """(RMSNorm of x, x)"""
    if kind == "tessera":
        return Norm.apply(x, weight)
    return F.rms_norm(x, weight.shape, weight, 1e-6), x


def add_norm(kind, x, residual, weight):
    """(RMSNorm of x + residual, x + residual)"""
    if kind == "tessera":
        return tessera.rms_norm(x, weight, residual, eps=1e-6)
    return norm(kind, x + residual, weight)


def mlp(kind, x, up, down, residual, recompute=False):
    if kind == "tessera":
        return tessera.mlp(x, up, down, activation="silu", residual=residual, recompute=recompute)
    return F.linear(F.silu(F.linear(x, up)), down) + residual


def mixture(kind, x, up, down):
    """The parameters of the mixture, [..., K, 3]: K MLPs with the same input. up: [K, H, W]; down: [K, 3, H]."""
    if kind == "tessera":
        return tessera.grouped_mlp(x[..., None, :], up, down, activation="silu")
    rows = F.silu(F.linear(x, up.flatten(0, 1))).unflatten(-1, up.shape[:2])
    return torch.einsum("...kh,koh->...ko", rows, down)


def mixture_nll(kind, params, target):
    """The mean of -log p(target); params: (logit, mu, log sigma) of each component."""
    if kind == "tessera":
        return tessera.gmm_nll(params, target)
    logit, mu, log_sigma = widened(params).unbind(-1)
    z = (target[..., None] - mu) * torch.exp(-log_sigma)
    log_normal = -0.5 * z * z - log_sigma - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(torch.log_softmax(logit, -1) + log_normal, -1).mean()


class MixtureLoss(torch.autograd.Function):
    """mixture_nll of mixture, with the gradient made in the forward pass, a few rows at a time.

    The hidden columns of all MLPs together are many times the model's width, and this way only those of a quarter of the
    rows, and of HEAD_ROWS at most, are ever in memory; nothing is computed twice. Sums over the parts are fp32.
    """

    @staticmethod
    def forward(ctx, x, up, down, target):
        rows, wanted = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        scale = torch.full((), KEPT_SCALE / len(rows), device=x.device)
        total, dx, sums = 0.0, [], []
        few = min(HEAD_ROWS, -(-len(rows) // 4))
        for part, of in zip(rows.split(few), wanted.split(few)):
            leaves = [t.detach().requires_grad_() for t in (part, up, down)]
            with torch.enable_grad():
                loss = tessera.gmm_nll(mixture("tessera", *leaves), of, "sum")
            total = total + loss.detach()
            grads = torch.autograd.grad(loss, leaves, scale)
            dx.append(grads[0])
            sums = [s.add_(g) for s, g in zip(sums, grads[1:])] or [widened(g) for g in grads[1:]]
        ctx.save_for_backward(torch.cat(dx).view(x.shape), *sums)
        ctx.dtype = x.dtype
        return total / len(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout):
        return *((grad * (dout / KEPT_SCALE)).to(ctx.dtype) for grad in ctx.saved_tensors), None


HEAD_ROWS = 8192
KEPT_SCALE = 2.0**12  # of gradients between the passes, so that fp16 holds them; backward() takes it back


mixture_loss_by_parts = torch.compiler.disable(MixtureLoss.apply)  # torch.compile knows no gradients within a forward


def mixture_loss(kind, x, up, down, target):
    if kind == "tessera":
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (x, up, down))
        return (mixture_loss_by_parts if trains else tessera.mlp_gmm_nll)(x, up, down, target)
    return mixture_nll(kind, mixture(kind, x, up, down), target)


class Block(torch.nn.Module):
    def __init__(self, size, switches, recompute):
        super().__init__()
        self.heads, self.switches, self.recompute = size.heads, switches, recompute
        narrow = 1 / math.sqrt(2 * size.layers)  # the residual stream is the sum of 2 L branches
        self.norm_1 = torch.nn.Parameter(torch.ones(size.width))
        self.qkv = weight(3 * size.width, size.width)
        self.out = weight(size.width, size.width, gain=narrow)
        self.norm_2 = torch.nn.Parameter(torch.ones(size.width))
        self.up = weight(size.hidden, size.width)
        self.down = weight(size.width, size.hidden, gain=narrow)

    def forward(self, x, context):
        """x is the residual stream, to which the norm behind attention and the MLP's last product add on the way."""
        y, x = norm(self.switches.norms, x, self.norm_1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in Project.apply(y, self.qkv, context))
        branch = F.linear(attend(self.switches.attention, q, k, v).flatten(2), self.out)
        y, x = add_norm(self.switches.norms, branch, x, self.norm_2)
        return mlp(self.switches.mlp, y, self.up, self.down, x, self.recompute)


class Heads(torch.nn.Module):
    def __init__(self, size, switches):
        super().__init__()
        self.switches = switches
        self.norm = torch.nn.Parameter(torch.ones(size.width))
        self.up = weight(size.components, size.hidden, size.width)
        self.down = weight(size.components, 3, size.hidden)

    def forward(self, x, target):
        y, _ = norm(self.switches.norms, x[:, -target.shape[1] :], self.norm)
        return mixture_loss(self.switches.mixture, y, self.up, self.down, target)


class TransformerNP(torch.nn.Module):
    def __init__(self, size=Size(), switches=Switches()):
        super().__init__()
        self.switches = switches
        self.embedding = weight(size.width, FEATURES)
        recomputed = 0 if switches.checkpointing else switches.recomputed
        self.blocks = torch.nn.ModuleList(Block(size, switches, i < recomputed) for i in range(size.layers))
        self.heads = Heads(size, switches)
        if switches.compile:
            for module in (*self.blocks, self.heads):
                module.compile(dynamic=False)

    def forward(self, x, y, context):
        """The mean negative log-likelihood of y[:, context:] given the first `context` points. x, y: fp32 [B, M + N]."""
        h = F.linear(features(x, y, context), widened(self.embedding)).to(self.embedding.dtype)
        for block in self.blocks:
            if self.switches.checkpointing and torch.is_grad_enabled():
                h = checkpoint(block, h, context, use_reentrant=False, preserve_rng_state=False)
            else:
                h = block(h, context)
        return self.heads(h, y[:, context:])


FREQUENCIES = 8
FEATURES = 2 * FREQUENCIES + 3


def features(x, y, context):
    """What a token's embedding is linear in: sines and cosines of x, x itself, y of a context point, and which it is."""
    known = torch.zeros_like(x)
    known[:, :context] = 1.0
    angles = x[..., None] * torch.arange(1, FREQUENCIES + 1, device=x.device) * (math.pi / 4)
    return torch.cat((angles.sin(), angles.cos(), torch.stack((x, torch.where(known > 0, y, 0.0), known), -1)), -1)


def widened(tensor):
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def weight(*shape, gain=1.0):
    return torch.nn.Parameter(torch.randn(shape) * (gain / math.sqrt(shape[-1])))
