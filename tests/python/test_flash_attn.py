"""tessera.flash_attn has flash_attn's names, signatures and semantics."""

import inspect

import numpy
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
def test_kv_cache_is_read_and_extended(device, dtype, paged, new):
    lengths = torch.tensor([5, 17, 0 if new else 1], dtype=torch.int32, device=device)
    caches = [random(3, 24, 2, 32, device=device, dtype=dtype) for _ in range(2)]
    table, given = None, caches
    if paged:
        table = torch.randperm(9, dtype=torch.int32).view(3, 3).to(device)
        given = [torch.empty(9, 8, 2, 32, device=device, dtype=dtype) for _ in range(2)]
        for pages, cache in zip(given, caches):
            pages[table.flatten().long()] = cache.view(9, 8, 2, 32)
    fresh = [random(3, new, 2, 32, device=device, dtype=dtype) for _ in range(2)] if new else [None, None]
    q = random(3, max(new, 1), 4, 32, device=device, dtype=dtype)
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
        assert close(out[b], want[0], dtype) and close(lse[b], want_lse[0], dtype)


def cached(device, dtype, rows=1, keys=40, dim=64):
    q = random(2, rows, 4, dim, device=device, dtype=dtype)
    return q, *(random(2, n, 2, dim, device=device, dtype=dtype) for n in (keys, keys, rows, rows))


@pytest.mark.parametrize("rows", [1, 24])
def test_kv_cache_with_one_length_for_all(device, dtype, rows):
    q, k_cache, v_cache, k, v = cached(device, dtype, rows, 60)
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=20, causal=True)
    used = 20 + rows
    want, _ = reference(
        q.double(), k_cache[:, :used].double(), v_cache[:, :used].double(), causal=True, alignment="bottom_right"
    )
    assert torch.equal(k_cache[:, 20:used], k) and torch.equal(v_cache[:, 20:used], v) and close(out, want, dtype)
    out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache)
    want, _ = reference(q.double(), k_cache.double(), v_cache.double())
    assert close(out, want, dtype)
    with pytest.raises(tessera.Error, match="room for 60"):
        flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=60)


@pytest.mark.parametrize("interleaved", [False, True])
def test_kv_cache_options_reach_decode(device, dtype, interleaved):
    """tests/python/test_decode.py compares decode with the definition."""
    q, k_cache, v_cache, k, v = cached(device, dtype)
    lengths = torch.tensor([20, 7], dtype=torch.int32, device=device)
    index = torch.tensor([1, 0], dtype=torch.int32, device=device)
    angles = torch.rand(50, 16)
    cos, sin = (t.to(device, dtype) for t in (angles.cos(), angles.sin()))
    slopes = torch.rand(4, device=device)
    results = []
    for run in (flash_attn.flash_attn_with_kvcache, tessera.decode):
        theirs = run is not tessera.decode
        caches = k_cache.clone(), v_cache.clone()
        shared = dict(cache_seqlens=lengths, cache_batch_idx=index, softcap=4.0, rotary_cos=cos, rotary_sin=sin)
        shared |= dict(rotary_interleaved=interleaved, causal=True)
        if theirs:
            options = dict(k=k, v=v, cache_leftpad=lengths // 2, window_size=(30, 5), softmax_scale=0.2)
            options |= dict(alibi_slopes=slopes, num_splits=3, return_softmax_lse=True)
        else:
            options = dict(k_new=k, v_new=v, leftpad_k=lengths // 2, window=(30, 5), scale=0.2, alibi=slopes)
            options |= dict(return_lse=True)
        results.append((*run(q, *caches, **shared, **options), *caches))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_an_append_past_the_block_table_loses_nothing_else(device, dtype):
    """flash_attn itself ends in a device-side assert, after which no CUDA call of the process works."""
    q, _, _, k, v = cached(device, dtype)
    pages = [random(6, 8, 2, 64, device=device, dtype=dtype) for _ in range(2)]
    before = [t.clone() for t in pages]
    table = torch.tensor([[3, 1, 0], [5, 4, 2]], dtype=torch.int32, device=device)
    lengths = torch.tensor([9, 24], dtype=torch.int32, device=device)
    call = lambda: flash_attn.flash_attn_with_kvcache(  # noqa: E731
        q, *pages, k, v, cache_seqlens=lengths, block_table=table, causal=True
    )
    if device == "cpu":
        with pytest.raises(tessera.Error, match=r"cache_seqlens\[1\] is 24"):
            call()
        return
    out = call()
    torch.cuda.synchronize()
    assert (out[1] == 0).all() and (out[0] != 0).any()
    for new, old in zip(pages, before):
        assert torch.equal(new[[5, 4, 2]], old[[5, 4, 2]]) and not torch.equal(new[1], old[1])


@pytest.mark.parametrize("rows", [[3, 3, 3], [1, 5, 20]])
def test_varlen_with_a_block_table(device, dtype, rows):
    """Few queries of one number read the pages in place; others need them gathered."""
    keys = [24, 9, 20]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device) for n in (rows, keys)
    )
    q = random(sum(rows), 4, 32, device=device, dtype=dtype)
    k, v = (random(9, 8, 2, 32, device=device, dtype=dtype) for _ in range(2))
    table = torch.randperm(9, dtype=torch.int32).view(3, 3).to(device)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max(rows), max(keys), causal=True, block_table=table, return_attn_probs=True
    )
    for b, n in enumerate(keys):
        held = [t[table[b].long()].flatten(0, 1)[None, :n].double() for t in (k, v)]
        part = slice(cu_q[b], cu_q[b + 1])
        want, want_lse = reference(q[None, part].double(), *held, causal=True, alignment="bottom_right")
        assert close(out[part], want[0], dtype) and close(lse[:, part], want_lse[0], dtype)


def test_varlen_with_a_block_table_has_gradients():
    lengths = torch.tensor([0, 3, 6], dtype=torch.int32)
    cu_k = torch.tensor([0, 5, 13], dtype=torch.int32)
    q, k, v = (torch.randn(s, requires_grad=True) for s in ((6, 2, 16), (4, 4, 2, 16), (4, 4, 2, 16)))
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_func(q, k, v, lengths, cu_k, 3, 8, block_table=table)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    packed = [torch.cat((t[[2, 0]].flatten(0, 1)[:5], t[[1, 3]].flatten(0, 1))) for t in (k, v)]
    want = flash_attn.flash_attn_varlen_func(q, *packed, lengths, cu_k, 3, 8)
    for a, b in zip(grads, torch.autograd.grad(want.square().sum(), (q, k, v))):
        assert close(a, b, torch.float32)


@pytest.mark.parametrize("dim", [36, 50])
def test_head_dims_that_are_no_multiple_of_8(device, dtype, dim):
    q = random(2, 12, 4, dim, device=device, dtype=dtype, grad=True)
    k, v = (random(2, 30, 2, dim, device=device, dtype=dtype, grad=True) for _ in range(2))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want, _ = reference(*exact, causal=True, alignment="bottom_right")
    out = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert out.shape == q.shape and close(out, want, dtype)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for got, wanted in zip(grads, torch.autograd.grad(want.sum(), exact)):
        assert close(got, wanted, dtype) or (got.double() - wanted).abs().max() < 0.1
    q, k_cache, v_cache, k, v = cached(device, dtype, dim=dim)
    lengths = torch.tensor([20, 7], dtype=torch.int32, device=device)
    with torch.no_grad():
        out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    for b, n in enumerate((20, 7)):
        assert torch.equal(k_cache[b, n], k[b, 0]) and torch.equal(v_cache[b, n], v[b, 0])
        want, _ = reference(
            q[b : b + 1].double(), k_cache[b : b + 1, : n + 1].double(), v_cache[b : b + 1, : n + 1].double()
        )
        assert close(out[b], want[0], dtype)


def test_lenient_arguments(device, dtype):
    """What flash_attn accepts: tensors in window_size, any softcap <= 0, a last dim that is not contiguous."""
    q = random(2, 12, 4, 64, device=device, dtype=dtype)
    k, v = (random(2, 30, 2, 64, device=device, dtype=dtype) for _ in range(2))
    want = flash_attn.flash_attn_func(q, k, v, window_size=(4, 2))
    for window in ([4, 2], (torch.tensor(4), torch.tensor(2)), torch.tensor([4, 2])):
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window, softcap=-1.0), want)
    strided = [t.transpose(1, 3).contiguous().transpose(1, 3) for t in (q, k, v)]
    assert all(t.stride(-1) != 1 for t in strided)
    assert torch.equal(flash_attn.flash_attn_func(*strided, window_size=(4, 2)), want)
    want = flash_attn.flash_attn_func(q, k, v)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=(-5, None), softcap=0), want)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, softcap=None), want)
    want = flash_attn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=7)
    assert torch.equal(flash_attn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=numpy.int64(7)), want)
    q, k_cache, v_cache, k, v = cached(device, dtype)
    lengths = torch.tensor([20, 7], dtype=torch.int32, device=device)
    want = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    strided = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in (q, k, v)]
    got = flash_attn.flash_attn_with_kvcache(
        strided[0], k_cache, v_cache, *strided[1:], cache_seqlens=lengths, softcap=-2.0,
        window_size=torch.tensor([-1, -1]),
    )  # fmt: skip
    assert torch.equal(got, want)


def test_the_longest_sequence_may_be_computed_in_the_graph():
    q, lengths = torch.randn(10, 2, 16), torch.tensor([0, 4, 10], dtype=torch.int32)

    def layer(q, lengths, longest=None):
        longest = lengths.diff().max() if longest is None else longest
        return flash_attn.flash_attn_varlen_func(q, q, q, lengths, lengths, longest, longest, causal=True)

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, lengths)
    assert torch.equal(got, layer(q, lengths, 6))


def test_the_functions_compile_into_one_graph(device, dtype):
    torch.compiler.reset()
    q, k_cache, v_cache, k, v = cached(device, dtype)
    lengths = torch.tensor([20, 7], dtype=torch.int32, device=device)

    def step(q, k_cache, v_cache, k, v, lengths):
        out = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        return out + flash_attn.flash_attn_func(q, k_cache, v_cache, softcap=2.0)

    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        caches = k_cache.clone(), v_cache.clone()
        results.append((run(q, *caches, k, v, lengths), *caches))
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_packed_and_padded_again(side):
    x, mask = random(3, 7, 2, 16, device="cpu", dtype=torch.float32, grad=True), torch.ones(3, 7, dtype=torch.long)
    empty = slice(0, 3) if side == "left" else slice(4, 7)
    mask[1, empty], mask[2] = 0, 0
    rows, indices, cu_seqlens, longest, used = flash_attn.unpad_input(x, mask)
    assert cu_seqlens.tolist() == [0, 7, 11, 11] and longest == 7 and used.tolist() == [7, 4, 0]
    assert cu_seqlens.dtype == used.dtype == torch.int32
    out = flash_attn.flash_attn_varlen_func(rows, rows, rows, cu_seqlens, cu_seqlens, longest, longest, causal=True)
    whole = flash_attn.pad_input(out, indices, 3, 7)
    real = x[1][mask[1].bool()]
    want = torch.stack((reference(x[:1], x[:1], x[:1], causal=True)[0][0], torch.zeros(7, 2, 16)))
    want[1][mask[1].bool()] = reference(real[None], real[None], real[None], causal=True)[0][0]
    torch.testing.assert_close(whole[:2], want)
    assert not whole[2].any()
    (got_grad,), (want_grad,) = (torch.autograd.grad(t.square().sum(), x) for t in (whole, want))
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-4, atol=1e-4)
    rows, indices, cu_seqlens, longest, used = flash_attn.unpad_input(x, mask, 1 - mask)
    assert len(rows) == 21 and longest == 7 and used.tolist() == [7, 4, 0]
    with pytest.raises(tessera.Error, match="attention_mask is"):
        flash_attn.unpad_input(x, mask.t())


def test_unsupported_arguments_are_named():
    q, k, v = (torch.randn(1, 4, 2, 32) for _ in range(3))
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(tessera.Error, match="dropout_p is 0.1"):
        flash_attn.flash_attn_func(q, k, v, dropout_p=0.1)
    with pytest.raises(tessera.Error, match="dropout_p is 0.1"):
        flash_attn.flash_attn_varlen_func(q[0], k, v, lengths, lengths, 4, 4, dropout_p=0.1, block_table=lengths[None])
    with pytest.raises(tessera.Error, match="rotary_cos"):
        flash_attn.flash_attn_with_kvcache(q, k, v, rotary_cos=torch.zeros(4, 8), rotary_sin=torch.zeros(4, 8))
    with pytest.raises(tessera.Error, match="one of k and v"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k)
    with pytest.raises(tessera.Error, match="cache_seqlens"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k, v)
    with pytest.raises(tessera.Error, match="room for 4"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k, v, cache_seqlens=1)
    with pytest.raises(tessera.Error, match="window_size is"):
        flash_attn.flash_attn_func(q, k, v, window_size=3)
    with pytest.raises(tessera.Error, match="qkv is"):
        flash_attn.flash_attn_qkvpacked_func(q)
