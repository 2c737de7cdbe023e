"""Attention by its definition, in any precision, and the accuracy rule (docs/measuring.md)."""

import math

import torch


def attention(q, k, v, *, causal=False, alignment="top_left", window=(-1, -1), softcap=0.0, alibi=None, scale=None):
    """q: [B, Sq, Hq, D], k: [B, Sk, Hkv, D], v: [B, Sk, Hkv, Dv] -> out, lse [B, Hq, Sq], in q's type."""
    batch, rows, heads, dim = q.shape
    keys, shared = k.shape[1], heads // k.shape[2]
    k, v = (t.repeat_interleave(shared, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or 1 / math.sqrt(dim))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    shift = keys - rows if alignment == "bottom_right" else 0
    position = torch.arange(rows, device=q.device)[:, None] + shift
    key = torch.arange(keys, device=q.device)[None, :]
    if alibi is not None:
        slopes = alibi.to(scores.dtype).expand(batch, heads)[:, :, None, None]
        scores = scores - slopes * (position - key).abs()
    visible = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    if causal:
        visible &= key <= position
    if window[0] >= 0:
        visible &= key >= position - window[0]
    if window[1] >= 0:
        visible &= key <= position + window[1]
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    # Rows with no visible key give zero, and no NaN in the backward.
    some = visible.any(-1)
    weights = torch.softmax(scores.masked_fill(~some[:, None], 0.0), dim=-1) * some[:, None]
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(v.dtype), v), lse


def error(got, exact):
    got, exact = got.double(), exact.double()
    same = torch.where(got == exact, 0.0, got - exact)  # equal infinities
    assert not same.isnan().any(), "NaN"
    return same.abs().max().item() if same.numel() else 0.0


def assert_accurate(got, exact, plain, what):
    """At most twice the error of the plain computation in the same precision, plus a floor of a few fp32 epsilons."""
    ours, theirs = error(got, exact), error(plain, exact)
    finite = exact[exact.isfinite()]
    size = finite.abs().max().item() if finite.numel() else 0.0
    floor = 8 * torch.finfo(torch.float32).eps * max(size, 1.0)
    assert ours <= 2 * theirs + floor, f"{what}: error {ours:.3g}, plain {theirs:.3g}, floor {floor:.3g}"


def tensors(*shapes, device, dtype, grad=False):
    return [torch.randn(shape, device=device).to(dtype).requires_grad_(grad) for shape in shapes]


def qkv(b=2, sq=37, sk=None, hq=4, hkv=2, d=64, dv=None, **rest):
    sk, dv = sk or sq, dv or d
    return tensors((b, sq, hq, d), (b, sk, hkv, d), (b, sk, hkv, dv), **rest)
