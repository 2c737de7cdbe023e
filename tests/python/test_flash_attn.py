"""tessera.flash_attn has flash_attn's names, signatures and semantics."""

import inspect

import pytest
import torch
from reference import attention as reference

import tessera
from tessera import flash_attn


def close(got, want, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    return (got.double() - want.double()).abs().max() < tolerance


def random(*shape, device, dtype, grad=False):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def test_signatures_are_flash_attns():
    tail = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
    heads = {
        "flash_attn_func": "q k v",
        "flash_attn_qkvpacked_func": "qkv",
        "flash_attn_kvpacked_func": "q kv",
        "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
        "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen",
        "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    }
    for name, head in heads.items():
        names = f"{head} {tail}".split() + (["block_table"] if name == "flash_attn_varlen_func" else [])
        assert list(inspect.signature(getattr(flash_attn, name)).parameters) == names
    assert list(inspect.signature(flash_attn.flash_attn_with_kvcache).parameters) == (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
        "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    ).split()


@pytest.mark.parametrize(
    "options, masks",
    [
        (dict(), dict()),
        (dict(causal=True), dict(causal=True)),
        (dict(window_size=(4, 2), softmax_scale=0.3), dict(window=(4, 2), scale=0.3)),
        (dict(causal=True, softcap=9.0), dict(causal=True, softcap=9.0)),
    ],
)
def test_masks_count_from_the_bottom_right(device, dtype, options, masks):
    q = random(2, 12, 4, 64, device=device, dtype=dtype)
    k, v = (random(2, 30, 2, 64, device=device, dtype=dtype) for _ in range(2))
    want, want_lse = reference(q.double(), k.double(), v.double(), alignment="bottom_right", **masks)
    assert close(flash_attn.flash_attn_func(q, k, v, **options), want, dtype)
    out, lse, probs = flash_attn.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    assert close(out, want, dtype) and close(lse, want_lse, dtype) and probs is None


def test_alibi_slopes(device, dtype):
    q, k, v = (random(2, n, 4, 64, device=device, dtype=dtype) for n in (12, 30, 30))
    slopes = torch.rand(4, device=device)
    want, _ = reference(q.double(), k.double(), v.double(), alignment="bottom_right", alibi=slopes)
    assert close(flash_attn.flash_attn_func(q, k, v, alibi_slopes=slopes), want, dtype)


def test_packed_forms_agree_and_have_gradients(device, dtype):
    qkv = random(2, 20, 3, 4, 64, device=device, dtype=dtype, grad=True)
    q, k, v = qkv.unbind(2)
    want = flash_attn.flash_attn_func(q, k, v, causal=True, deterministic=True)
    (want_grad,) = torch.autograd.grad(want.sum(), qkv, retain_graph=True)
    lengths = torch.tensor([0, 20, 40], dtype=torch.int32, device=device)
    flat = qkv.flatten(0, 1)
    rest = dict(causal=True, deterministic=True)
    forms = [
        lambda: flash_attn.flash_attn_qkvpacked_func(qkv, **rest),
        lambda: flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **rest),
        lambda: flash_attn.flash_attn_varlen_qkvpacked_func(flat, lengths, 20, **rest).view_as(want),
        lambda: flash_attn.flash_attn_varlen_kvpacked_func(
            flat[:, 0], flat[:, 1:], lengths, lengths, 20, 20, **rest
        ).view_as(want),
        lambda: flash_attn.flash_attn_varlen_func(*flat.unbind(1), lengths, lengths, 20, 20, **rest).view_as(want),
    ]
    for form in forms:
        got = form()
        (grad,) = torch.autograd.grad(got.sum(), qkv, retain_graph=True)
        assert close(got, want, dtype) and close(grad, want_grad, dtype)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_kv_cache_is_read_and_extended(paged, new):
    lengths = torch.tensor([5, 17, 0 if new else 1], dtype=torch.int32)
    caches = [torch.randn(3, 24, 2, 32) for _ in range(2)]
    table, given = None, caches
    if paged:
        table = torch.randperm(9, dtype=torch.int32).view(3, 3)
        given = [torch.empty(9, 8, 2, 32) for _ in range(2)]
        for pages, cache in zip(given, caches):
            pages[table.flatten().long()] = cache.view(9, 8, 2, 32)
    fresh = [torch.randn(3, new, 2, 32) for _ in range(2)] if new else [None, None]
    q = torch.randn(3, max(new, 1), 4, 32)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *given, *fresh, cache_seqlens=lengths, block_table=table, causal=True, return_softmax_lse=True
    )
    for b, length in enumerate(lengths.tolist()):
        whole = [cache[b, :length] for cache in caches]
        if new:
            whole = [torch.cat((old, piece[b])) for old, piece in zip(whole, fresh)]
            held = [pages[table[b].long()].flatten(0, 1) if paged else pages[b] for pages in given]
            assert all(torch.equal(a[: length + new], w) for a, w in zip(held, whole))
        want, want_lse = reference(
            q[b : b + 1].double(), *(t[None].double() for t in whole), causal=True, alignment="bottom_right"
        )
        assert close(out[b], want[0], torch.float32) and close(lse[b], want_lse[0], torch.float32)


def test_kv_cache_with_one_length_for_all(device, dtype):
    q = random(2, 1, 4, 64, device=device, dtype=dtype)
    k_cache, v_cache = (random(2, 40, 2, 64, device=device, dtype=dtype) for _ in range(2))
    k, v = (random(2, 1, 2, 64, device=device, dtype=dtype) for _ in range(2))
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=20, causal=True)
    want, _ = reference(q.double(), k_cache[:, :21].double(), v_cache[:, :21].double())
    assert torch.equal(k_cache[:, 20:21], k) and close(out, want, dtype)
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache)
    want, _ = reference(q.double(), k_cache.double(), v_cache.double())
    assert close(out, want, dtype)


def test_unsupported_arguments_are_named():
    q, k, v = (torch.randn(1, 4, 2, 32) for _ in range(3))
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(tessera.Error, match="dropout_p is 0.1"):
        flash_attn.flash_attn_func(q, k, v, dropout_p=0.1)
    with pytest.raises(tessera.Error, match="block_table"):
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], lengths, lengths, 4, 4, block_table=lengths)
    for name in ("rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad"):
        with pytest.raises(tessera.Error, match=name):
            flash_attn.flash_attn_with_kvcache(q, k, v, **{name: torch.zeros(1)})
    with pytest.raises(tessera.Error, match="cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k, v)
    with pytest.raises(tessera.Error, match="room for 4"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k, v, cache_seqlens=1)
    with pytest.raises(tessera.Error, match="qkv is"):
        flash_attn.flash_attn_qkvpacked_func(q)
