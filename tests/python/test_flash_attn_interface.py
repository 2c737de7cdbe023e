"""tessera.flash_attn_interface has FlashAttention-3's names, signatures and results."""

import inspect

import pytest
import torch
from reference import attention as reference

import tessera
from tessera import flash_attn_interface as fa3


def close(got, want, dtype):
    return (got.double() - want.double()).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


def random(*shape, device, dtype, grad=False):
    return torch.randn(shape, device=device).to(dtype).requires_grad_(grad)


def cumulative(lengths, device):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)


def test_signatures_are_flash_attention_3s():
    descales = "q_descale k_descale v_descale window_size attention_chunk softcap"
    tail = f"softmax_scale causal qv {descales} num_splits pack_gqa deterministic sm_margin return_attn_probs"
    lengths = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k"
    names = {
        "flash_attn_func": f"q k v {tail}",
        "flash_attn_varlen_func": f"q k v {lengths} {tail}",
        "flash_attn_qkvpacked_func": (
            f"qkv softmax_scale causal {descales} deterministic num_heads_q sm_margin return_attn_probs"
        ),
        "flash_attn_with_kvcache": (
            "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
            "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale "
            "causal window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa "
            "sm_margin return_softmax_lse"
        ),
        "flash_attn_combine": "out_partial lse_partial out out_dtype",
    }
    for name, wanted in names.items():
        assert list(inspect.signature(getattr(fa3, name)).parameters) == wanted.split()


def test_func_and_packed_forms(device, dtype):
    q = random(2, 12, 4, 64, device=device, dtype=dtype)
    k, v = (random(2, 30, 2, 64, device=device, dtype=dtype) for _ in range(2))
    want, want_lse = reference(q.double(), k.double(), v.double(), causal=True, alignment="bottom_right", window=(9, -1))
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, window_size=(9, -1), num_splits=2, return_attn_probs=True)
    assert close(out, want, dtype) and close(lse, want_lse, dtype)
    assert torch.equal(fa3.flash_attn_func(q, k, v, causal=True, window_size=(9, -1), pack_gqa=True, sm_margin=4), out)
    q, k, v = (random(2, 12, h, 64, device=device, dtype=dtype) for h in (4, 2, 2))
    want = fa3.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), 2), causal=True, num_heads_q=4), want)
    qkv = random(2, 12, 3, 4, 64, device=device, dtype=dtype)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv), fa3.flash_attn_func(*qkv.unbind(2)))


@pytest.mark.parametrize("used_q", [None, [7, 0, 5]])
@pytest.mark.parametrize("used_k", [None, [20, 3, 0]])
def test_varlen_counts_the_rows_in_use(device, dtype, used_q, used_k):
    rows, keys = [9, 4, 5], [25, 8, 11]
    cu_q, cu_k = cumulative(rows, device), cumulative(keys, device)
    q = random(sum(rows), 4, 32, device=device, dtype=dtype, grad=True)
    k, v = (random(sum(keys), 2, 32, device=device, dtype=dtype, grad=True) for _ in range(2))
    used = [None if n is None else torch.tensor(n, dtype=torch.int32, device=device) for n in (used_q, used_k)]
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(rows), max(keys), *used, causal=True, return_attn_probs=True
    )
    without = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max(rows), max(keys), *used, causal=True)
    assert torch.equal(out, without) and out.shape == q.shape and lse.shape == (4, sum(rows))
    total = 0.0
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    for b in range(3):
        n, m = (used_q or rows)[b], (used_k or keys)[b]
        start, end = int(cu_q[b]), int(cu_q[b]) + n
        held = [t[None, int(cu_k[b]) : int(cu_k[b]) + m] for t in leaves[1:]]
        want, want_lse = reference(leaves[0][None, start:end], *held, causal=True, alignment="bottom_right")
        total = total + want.sum()
        if n:
            assert close(out[start:end], want[0], dtype)
            if m >= n:
                assert close(lse[:, start:end], want_lse[0], dtype)
        assert (out[end : cu_q[b + 1]] == 0).all() and (lse[:, end : cu_q[b + 1]] == -torch.inf).all()
    for got, want in zip(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(total, leaves)):
        assert (got.double() - want).abs().max() < (1e-5 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("rows", [[2, 2, 2], [1, 4, 2]])
@pytest.mark.parametrize("paged", [False, True])
def test_kv_cache_with_packed_queries(device, dtype, rows, paged):
    keys = [24, 9, 20]
    q = random(sum(rows), 4, 32, device=device, dtype=dtype)
    caches = [random(3, 24, 2, 32, device=device, dtype=dtype) for _ in range(2)]
    table, given = None, caches
    if paged:
        table = torch.randperm(9, dtype=torch.int32).view(3, 3).to(device)
        given = [torch.empty(9, 8, 2, 32, device=device, dtype=dtype) for _ in range(2)]
        for pages, cache in zip(given, caches):
            pages[table.flatten().long()] = cache.view(9, 8, 2, 32)
    cu_q = cumulative(rows, device)
    lengths = torch.tensor(keys, dtype=torch.int32, device=device)
    out, lse, *partial = fa3.flash_attn_with_kvcache(
        q, *given, cache_seqlens=lengths, page_table=table, cu_seqlens_q=cu_q, max_seqlen_q=max(rows), causal=True,
        return_softmax_lse=True, scheduler_metadata=fa3.get_scheduler_metadata(3, 4, 24, 4, 2, 32, lengths),
    )  # fmt: skip
    assert partial == [None, None] and out.shape == q.shape and lse.shape == (4, sum(rows))
    for b, n in enumerate(keys):
        part = slice(int(cu_q[b]), int(cu_q[b + 1]))
        want, want_lse = reference(
            q[None, part].double(), *(t[b : b + 1, :n].double() for t in caches), causal=True, alignment="bottom_right"
        )
        assert close(out[part], want[0], dtype) and close(lse[:, part], want_lse[0], dtype)


def test_kv_cache_options_reach_decode(device, dtype):
    """tests/python/test_decode.py compares decode with the definition."""
    q = random(2, 1, 4, 64, device=device, dtype=dtype)
    k_cache, v_cache, k, v = (random(2, n, 2, 64, device=device, dtype=dtype) for n in (40, 40, 1, 1))
    lengths = torch.tensor([20, 7], dtype=torch.int32, device=device)
    angles = torch.rand(50, 16)
    cos, sin = (t.to(device, dtype) for t in (angles.cos(), angles.sin()))
    shared = dict(cache_seqlens=lengths, rotary_cos=cos, rotary_sin=sin, rotary_seqlens=lengths // 2)
    ours, theirs = (k_cache.clone(), v_cache.clone()), (k_cache.clone(), v_cache.clone())
    out, lse, _, _ = fa3.flash_attn_with_kvcache(
        q, *theirs, k, v, **shared, cache_leftpad=lengths // 4, causal=True, return_softmax_lse=True
    )
    want, want_lse = tessera.decode(
        q, *ours, k_new=k, v_new=v, **shared, leftpad_k=lengths // 4, rotary_interleaved=True, return_lse=True
    )
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    one = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9)
    want, _ = reference(q.double(), k_cache[:, :9].double(), v_cache[:, :9].double())
    assert close(one, want, dtype)


def test_combine_gives_the_attention_over_all_keys(device, dtype):
    q, k, v = (random(2, 8, 4, 64, device=device, dtype=dtype) for _ in range(3))
    parts = [tessera.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 3), (3, 8))]
    parts.append((torch.full_like(parts[0][0], float("nan")), torch.full_like(parts[0][1], -torch.inf)))  # no keys
    out_partial = torch.stack([out.float() for out, _ in parts])
    lse_partial = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    want, want_lse = tessera.attention(q, k, v, return_lse=True)
    out, lse = fa3.flash_attn_combine(out_partial, lse_partial, out_dtype=dtype)
    assert out.dtype == dtype and close(out, want, dtype) and close(lse, want_lse.transpose(1, 2), dtype)
    given = torch.empty_like(out)
    assert fa3.flash_attn_combine(out_partial, lse_partial, given, dtype)[0] is given and torch.equal(given, out)
    out, lse = fa3.flash_attn_combine(out_partial[2:], lse_partial[2:])
    assert (out == 0).all() and (lse == -torch.inf).all()


def in_chunks(q, k, v, chunk):
    """Bottom-right causal attention within chunks, [S, H, D], from the definition."""
    position = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q)
    key = torch.arange(len(k), device=q.device)
    hidden = (key > position) | (key // chunk != torch.div(position, chunk, rounding_mode="floor"))
    k, v = (t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1).nan_to_num()
    return torch.einsum("hqk,khd->qhd", weights, v)


def test_chunks(device, dtype):
    q = random(2, 40, 4, 64, device=device, dtype=dtype)
    k, v = (random(2, 50, 2, 64, device=device, dtype=dtype) for _ in range(2))
    want = torch.stack([in_chunks(q[b], k[b], v[b], 16) for b in range(2)])
    assert close(fa3.flash_attn_func(q, k, v, causal=True, attention_chunk=16), want, dtype)
    packed = fa3.flash_attn_varlen_func(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cumulative([40, 40], device), cumulative([50, 50], device),
        40, 50, causal=True, attention_chunk=16,
    )  # fmt: skip
    assert close(packed.unflatten(0, (2, 40)), want, dtype)
    lengths = torch.tensor([50, 33], dtype=torch.int32, device=device)
    want = torch.stack([in_chunks(q[b], k[b, :n], v[b, :n], 16) for b, n in enumerate((50, 33))])
    got = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, attention_chunk=16)
    assert close(got, want, dtype)
    with pytest.raises(tessera.Error, match="attention_chunk is 16, which attention_backward does not take"):
        fa3.flash_attn_func(q.requires_grad_(), k, v, causal=True, attention_chunk=16).sum().backward()


@pytest.mark.parametrize("rows", [[40, 0, 17], [3, 1, 0]])
def test_packed_queries_of_a_paged_cache(device, dtype, rows):
    keys, size = [61, 5, 40], 16
    table = torch.randperm(13, device=device)[:12].int().unflatten(0, (3, 4))
    k, v = (random(13, size, 2, 64, device=device, dtype=dtype) for _ in range(2))
    q = random(sum(rows), 4, 64, device=device, dtype=dtype)
    cu = cumulative(rows, device)
    lengths = torch.tensor(keys, dtype=torch.int32, device=device)
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, page_table=table, cu_seqlens_q=cu, max_seqlen_q=max(rows), causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert lse.shape == (4, sum(rows))
    for b, n in enumerate(keys):
        at = slice(cu[b], cu[b + 1])
        cached = (t[table[b].long()].flatten(0, 1)[:n] for t in (k, v))
        assert rows[b] == 0 or close(out[at], in_chunks(q[at], *cached, 1000), dtype)


@pytest.mark.parametrize("new", [0, 3])
def test_rows_that_belong_to_no_sequence_change_nothing(new):
    """Two sequences of 1 and 3 queries in a buffer of 6 rows, which could be two of 3."""
    q, k = torch.randn(6, 4, 16), torch.randn(2, 32, 2, 16)
    appended = [torch.randn(2, new, 2, 16) for _ in range(2)] if new else [None, None]
    int32 = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    rest = dict(cache_seqlens=int32(9, 12), cu_seqlens_q=int32(0, 1, 4), max_seqlen_q=3, causal=True)
    want, got = (fa3.flash_attn_with_kvcache(rows, k.clone(), k.clone(), *appended, **rest) for rows in (q[:4], q))
    torch.testing.assert_close(got[:4], want)


def test_unsupported_arguments_are_named():
    q, k, v = (torch.randn(1, 4, 2, 32) for _ in range(3))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    calls = {
        "func": lambda **rest: fa3.flash_attn_func(q, k, v, **rest),
        "varlen": lambda **rest: fa3.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 4, 4, **rest),
        "cache": lambda **rest: fa3.flash_attn_with_kvcache(q, k, v, **rest),
    }
    for call in calls.values():
        for name in ("qv", "q_descale", "k_descale", "v_descale"):
            with pytest.raises(tessera.Error, match=f"{name} is given"):
                call(**{name: torch.ones(1)})
        with pytest.raises(tessera.Error, match="attention_chunk is -8"):
            call(attention_chunk=-8)
    with pytest.raises(tessera.Error, match="cu_seqlens_k_new"):
        calls["cache"](cu_seqlens_k_new=cu)
    with pytest.raises(tessera.Error, match="max_seqlen_q is None"):
        fa3.flash_attn_with_kvcache(q[0], k, v, cu_seqlens_q=cu)
    ragged = torch.tensor([0, 1, 4], dtype=torch.int32)
    with pytest.raises(tessera.Error, match="different lengths in cu_seqlens_q"):
        angles = dict(rotary_cos=torch.ones(4, 8), rotary_sin=torch.ones(4, 8))
        fa3.flash_attn_with_kvcache(q[0], k, v, k, v, cu_seqlens_q=ragged, max_seqlen_q=3, **angles)
    with pytest.raises(tessera.Error, match="cu_seqlens_q is None"):
        fa3.flash_attn_varlen_func(q[0], k[0], v[0], None, cu, 4, 4)
    with pytest.raises(tessera.Error, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(q)
    for heads in (1, 2):  # one head is left, or none
        with pytest.raises(tessera.Error, match=f"num_heads_q is {heads}"):
            fa3.flash_attn_qkvpacked_func(q, num_heads_q=heads)
    with pytest.raises(tessera.Error, match="k_cache is a NoneType"):
        fa3.flash_attn_with_kvcache(q, None, v)
    for used in (torch.tensor([2, 2], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32), torch.ones(1), [1, 3]):
        with pytest.raises(tessera.Error, match="seqused_k is"):
            fa3.flash_attn_varlen_func(q[0], k[0], v[0], ragged, ragged, 3, 3, seqused_k=used)
