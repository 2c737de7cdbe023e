"""tessera.decode: attention against a KV cache, with keys appended and rotary embedding."""

import contextlib
import dataclasses
import itertools

import pytest
import torch
from reference import assert_accurate, attention as reference, tensors
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import tessera

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def rotated(x, cos, sin, positions, interleaved):
    """x: [S, H, D], its first columns rotated by the angles of these positions."""
    half = cos.shape[1]
    c, s = (t[positions][:, None].to(x.dtype) for t in (cos, sin))
    x, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    new_a, new_b = a * c - b * s, a * s + b * c
    turned = torch.stack((new_a, new_b), -1).flatten(-2) if interleaved else torch.cat((new_a, new_b), -1)
    return torch.cat((turned, rest), -1)


@dataclasses.dataclass
class Case:
    """A problem with all its tensors; lengths are those before the append."""

    lengths: list
    device: str
    dtype: torch.dtype
    capacity: int = 48
    rows: int = 2
    new: int = 0
    heads: tuple = (4, 2)
    dims: tuple = (64, 64)
    page: int = 0
    rotary: int = 0
    interleaved: bool = False
    rotary_lengths: list = None
    batch_idx: list = None
    leftpad: list = None
    causal: bool = True
    window: tuple = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False

    def __post_init__(self):
        batch, (hq, hkv), (d, dv) = len(self.lengths), self.heads, self.dims
        made = dict(device=self.device, dtype=self.dtype)
        cache_rows = batch if self.batch_idx is None else max(self.batch_idx) + 2
        self.q, self.k, self.v = tensors(
            (batch, self.rows, hq, d), (cache_rows, self.capacity, hkv, d), (cache_rows, self.capacity, hkv, dv), **made
        )
        self.table = None
        if self.page:
            per = self.capacity // self.page
            self.table = torch.randperm(batch * per + 3)[: batch * per].view(batch, per).int().to(self.device)
            self.k, self.v = tensors(
                (batch * per + 3, self.page, hkv, d), (batch * per + 3, self.page, hkv, dv), **made
            )
        self.k_new = self.v_new = self.cos = self.sin = None
        if self.new:
            self.k_new, self.v_new = tensors((batch, self.new, hkv, d), (batch, self.new, hkv, dv), **made)
        if self.rotary:
            angles = torch.rand(self.capacity + 20, self.rotary // 2) * 6.28
            self.cos, self.sin = (t.to(self.device, self.dtype) for t in (angles.cos(), angles.sin()))
        self.slopes = torch.rand(hq, device=self.device) if self.alibi else None

    def options(self):
        return dict(
            cache_seqlens=int32(self.lengths, self.device), page_table=self.table, k_new=self.k_new, v_new=self.v_new,
            rotary_cos=self.cos, rotary_sin=self.sin, rotary_interleaved=self.interleaved,
            rotary_seqlens=None if self.rotary_lengths is None else int32(self.rotary_lengths, self.device),
            cache_batch_idx=None if self.batch_idx is None else int32(self.batch_idx, self.device),
            leftpad_k=None if self.leftpad is None else int32(self.leftpad, self.device),
            causal=self.causal, window=self.window, softcap=self.softcap, alibi=self.slopes,
        )  # fmt: skip

    def run(self, **more):
        return tessera.decode(self.q, self.k, self.v, **self.options(), **more, return_lse=True)

    def held(self, caches, b):
        """A sequence's part of the caches, [capacity, Hkv, D] each."""
        if self.table is not None:
            return [cache[self.table[b].long()].flatten(0, 1) for cache in caches]
        return [cache[b if self.batch_idx is None else self.batch_idx[b]] for cache in caches]

    def expected(self, b, dtype, caches):
        """out, lse, and the keys and values in use after the append."""
        n = self.lengths[b]
        q, (k, v) = self.q[b].to(dtype), (t[:n].to(dtype) for t in self.held(caches, b))
        if self.new:
            k_new, v_new = self.k_new[b].to(dtype), self.v_new[b].to(dtype)
            if self.rotary:
                first = n if self.rotary_lengths is None else self.rotary_lengths[b]
                at = first + torch.arange(self.new, device=self.device)
                k_new = rotated(k_new, self.cos, self.sin, at, self.interleaved)
                moves = self.causal or self.window != (-1, -1)
                at = first + torch.arange(self.rows, device=self.device) * moves
                q = rotated(q, self.cos, self.sin, at, self.interleaved)
            k, v = torch.cat((k, k_new)), torch.cat((v, v_new))
        skip = 0 if self.leftpad is None else min(self.leftpad[b], k.shape[0])
        out, lse = reference(
            q[None], k[None, skip:], v[None, skip:], causal=self.causal, alignment="bottom_right", window=self.window,
            softcap=self.softcap, alibi=self.slopes,
        )  # fmt: skip
        return out[0], lse[0], k, v


def check(case):
    before = case.k.clone(), case.v.clone()
    out, lse = case.run()
    exact = [case.expected(b, torch.float64, before) for b in range(len(case.lengths))]
    plain = [case.expected(b, case.dtype, before) for b in range(len(case.lengths))]
    # Of all sequences together: of two keys alone, the plain computation may have hardly any error by luck.
    for n, name, got in ((0, "out", out), (1, "lse", lse)):
        assert_accurate(got, torch.stack([e[n] for e in exact]), torch.stack([p[n] for p in plain]), name)
    for b, length in enumerate(case.lengths):
        exact_kv, plain_kv = exact[b][2:], plain[b][2:]
        end = length + case.new
        for name, new, old, want, rough in zip(
            ("k", "v"), case.held((case.k, case.v), b), case.held(before, b), exact_kv, plain_kv
        ):
            assert torch.equal(new[:length], old[:length]) and torch.equal(new[end:], old[end:]), f"{name}[{b}]"
            if case.rotary and name == "k":
                assert_accurate(new[length:end], want[length:], rough[length:], f"new {name}[{b}]")
            else:
                assert torch.equal(new[length:end], rough[length:]), f"new {name}[{b}]"


MASKS = {
    "causal": {},
    "all": dict(causal=False),
    "window": dict(window=(9, 0)),
    "band": dict(causal=False, window=(9, 1)),
    "softcap": dict(softcap=3.0),
    "alibi": dict(alibi=True),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page", [0, 1, 16])
@pytest.mark.parametrize("new", [0, 1, 3])
def test_matches_the_definition(device, dtype, mask, page, new):
    lengths = [45 if new else 48, 16, 1, 0 if new else 2]
    check(Case(lengths, device, dtype, page=page, new=new, **MASKS[mask]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [64, 32])
@pytest.mark.parametrize("mask", ["causal", "all", "window"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_rotary_embedding(device, dtype, interleaved, rotary, mask, elsewhere):
    check(
        Case(
            [15, 0, 40] * 4, device, dtype, new=2, rotary=rotary, interleaved=interleaved, page=16 if elsewhere else 0,
            rotary_lengths=[3, 50, 0] * 4 if elsewhere else None, **MASKS[mask],
        )
    )  # fmt: skip


@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("page", [0, 8])
def test_left_padding(device, dtype, new, page):
    check(Case([20, 40, 7, 5], device, dtype, new=new, page=page, leftpad=[0, 33, 6, 30]))


@pytest.mark.parametrize("new", [0, 2])
def test_rows_of_the_cache(device, dtype, new):
    check(Case([20, 40, 7], device, dtype, new=new, batch_idx=[4, 0, 2], leftpad=[0, 3, 0]))


@pytest.mark.parametrize("dims", [(80, 80), (128, 64), (24, 40), (256, 256)])
def test_head_dims(device, dtype, dims):
    check(Case([33, 5], device, dtype, new=1, rows=1, heads=(6, 2), dims=dims))


@pytest.mark.parametrize("rows", [1, 5, 16, 40])
@pytest.mark.parametrize("heads", [(8, 1), (3, 3), (12, 4)])
def test_queries_and_heads(device, dtype, rows, heads):
    check(Case([33, 5, 48], device, dtype, rows=rows, heads=heads))


def test_half_types(device):
    for dtype, page in itertools.product((torch.float16, torch.bfloat16), (0, 16)):
        check(Case([700, 5, 1023], device, dtype, capacity=1024, new=1, rows=1, page=page, rotary=64))


def test_a_strided_cache(device, dtype):
    """[B, H, S, D], as Hugging Face has it."""
    case = Case([33, 5], device, dtype, new=1)
    case.k, case.v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (case.k, case.v))
    check(case)


def test_no_lengths_mean_the_whole_cache(device, dtype):
    case = Case([48, 48], device, dtype)
    out = tessera.decode(case.q, case.k, case.v)
    for b in range(2):
        exact, *_ = case.expected(b, torch.float64, (case.k, case.v))
        plain, *_ = case.expected(b, dtype, (case.k, case.v))
        assert_accurate(out[b], exact, plain, f"out[{b}]")


def test_unused_keys_do_not_matter(device, dtype):
    case = Case([33, 0, 17], device, dtype, page=8)
    want, _ = case.run()
    used = torch.cat([case.table[b, : -(-n // 8)] for b, n in enumerate(case.lengths)])
    for cache in (case.k, case.v):
        kept = cache[used.long()].clone()
        cache.fill_(float("nan"))
        cache[used.long()] = kept
        for b, n in enumerate(case.lengths):
            if n % 8:
                cache[case.table[b, n // 8].long(), n % 8 :] = float("nan")
    got, _ = case.run()
    assert torch.equal(got, want)


def test_tokens_one_by_one_equal_a_prefill(device, dtype):
    length, heads = 40, (4, 2)
    q, k, v = tensors((2, length, 4, 64), (2, length, 2, 64), (2, length, 2, 64), device=device, dtype=dtype)
    table = torch.randperm(10).view(2, 5).int().to(device)
    k_cache, v_cache = tensors((10, 8, heads[1], 64), (10, 8, heads[1], 64), device=device, dtype=dtype)
    out = [
        tessera.decode(
            q[:, i : i + 1], k_cache, v_cache, cache_seqlens=int32([i, i], device), page_table=table,
            k_new=k[:, i : i + 1], v_new=v[:, i : i + 1],
        )
        for i in range(length)
    ]  # fmt: skip
    exact, _ = reference(q.double(), k.double(), v.double(), causal=True)
    plain, _ = reference(q, k, v, causal=True)
    assert_accurate(torch.cat(out, 1), exact, plain, "out")


@pytest.mark.parametrize("page", [0, 16])
def test_batch_invariant_results_do_not_depend_on_the_batch(device, dtype, page):
    case = Case([2000, 5, 1033, 1500], device, dtype, capacity=2048, rows=1, page=page)
    out, lse = case.run(batch_invariant=True)
    for b, n in enumerate(case.lengths):
        rows = slice(b, b + 1)
        caches = (case.k, case.v) if page else (case.k[rows], case.v[rows])
        alone, alone_lse = tessera.decode(
            case.q[rows], *caches, cache_seqlens=int32([n], device), batch_invariant=True, return_lse=True,
            page_table=case.table[rows] if page else None,
        )  # fmt: skip
        assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


# ---- Refusals ----


REFUSED = {
    "a full cache": dict(lengths=[5, 48], new=1),
    "too long": dict(lengths=[5, 49]),
    "negative": dict(lengths=[5, -1]),
    "no such row": dict(lengths=[5, 7], batch_idx=[0, 1]),
    "no such position": dict(lengths=[5, 7], new=1, rotary=16, rotary_lengths=[0, 1000]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(device, dtype, what):
    """On the CPU by an error; on a GPU on the device, for that sequence alone, and later calls are not affected."""
    case = Case(device=device, dtype=dtype, **REFUSED[what])
    if what == "no such row":
        case.batch_idx = [0, 9]
    before = case.k.clone(), case.v.clone()
    status = int32([7, 7], device)
    if device == "cpu":
        with pytest.raises(tessera.Error, match=r"\[1\] is"):
            case.run(status=status)
        assert torch.equal(case.k, before[0]) and torch.equal(case.v, before[1])
        return
    out, lse = case.run(status=status)
    assert status.tolist() == [0, 1]
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    exact, _, _, _ = case.expected(0, torch.float64, before)
    plain, _, _, _ = case.expected(0, case.dtype, before)
    assert_accurate(out[0], exact, plain, "out")
    for new, old in zip((case.k, case.v), before):
        assert torch.equal(new[1:], old[1:])
    torch.cuda.synchronize()
    check(Case([5, 7], device, dtype, new=1))


def test_status_of_what_fits_is_zero(device, dtype):
    for new in (0, 1):
        status = int32([7, 7], device)
        Case([5, 7], device, dtype, new=new).run(status=status)
        assert status.tolist() == [0, 0]


def test_invalid_arguments_are_named():
    case = Case([5, 7], "cpu", torch.float32, new=1, rotary=16)
    for change, message in (
        (dict(v_new=None), "v_new is null"),
        (dict(rotary_sin=None), "rotary_sin is null"),
        (dict(cache_seqlens=None), "cache_seqlens is null"),
        (dict(k_new=None, v_new=None), "k_new is null"),
        (dict(k_new=case.k_new[:, :0], v_new=case.v_new[:, :0]), "k_new has length 0"),
        (dict(cache_batch_idx=int32([0], "cpu")), "cache_batch_idx has entries = 1"),
        (dict(rotary_cos=torch.ones(50, 40), rotary_sin=torch.ones(50, 40)), "rotary_cos has 40"),
        (dict(batch_invariant=torch.tensor(True)), "batch_invariant is a torch.Tensor"),
        (dict(window=3), "window is 3"),
        (dict(causal="top_left"), "causal is 'top_left'; True, False and 'bottom_right'"),
        (dict(k_scale=torch.ones(1)), r"k_scale has 1 dims; 2 are accepted, \[B or 1, Hkv or 1\]"),
        (dict(rotary_cos=case.cos.clone().requires_grad_()), "no gradient"),
    ):
        with pytest.raises(tessera.Error, match=message):
            tessera.decode(case.q, case.k, case.v, **case.options() | change)


def test_gradients_are_refused(device, dtype):
    case = Case([5, 7], device, dtype, new=1)
    for name in ("q", "k", "v", "k_new"):
        before = case.k.detach().clone()
        tensor = getattr(case, name).requires_grad_()
        with pytest.raises(tessera.Error, match="no gradient"):
            case.run()
        with torch.no_grad():
            case.run()
        tensor.requires_grad_(False)
        case.k.copy_(before)
        setattr(case, name, tensor.detach())


@pytest.mark.parametrize("dispatched", [False, True])
def test_autograd_notices_an_append(device, dtype, dispatched):
    cache = torch.randn(1, 8, 1, 16, device=device, dtype=dtype)
    x = torch.randn_like(cache[:, :1]).requires_grad_()
    saved = x * cache  # keeps the cache for x's gradient
    new = torch.randn(1, 1, 1, 16, device=device, dtype=dtype)
    length = torch.tensor([3], dtype=torch.int32, device=device)
    with FlopCounterMode(display=False) if dispatched else contextlib.nullcontext():
        tessera.decode(new, cache, cache.clone(), cache_seqlens=length, k_new=new, v_new=new)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize("appends", [False, True])
def test_a_status_that_is_written_has_a_new_version(device, dtype, dispatched, appends):
    case = Case([5, 7], device, dtype, new=1 if appends else 0)
    status = torch.full((2,), 9, dtype=torch.int32, device=device)
    before = status._version
    with FlopCounterMode(display=False) if dispatched else contextlib.nullcontext():
        case.run(status=status)
    assert status.tolist() == [0, 0] and status._version > before


def test_nothing_is_appended_to_a_lazily_negated_cache(device, dtype):
    if dtype == torch.bfloat16:  # lazy negation comes from complex tensors, and there is no complex bf16
        dtype = torch.float16
    cache, new = (torch.ones(1, n, 1, 16, device=device, dtype=dtype) for n in (8, 1))
    cache = torch._neg_view(cache)
    length = torch.tensor([3], dtype=torch.int32, device=device)
    with pytest.raises(tessera.Error, match="lazily negated"):
        tessera.decode(new, cache, cache, cache_seqlens=length, k_new=new, v_new=new)
    assert torch.equal(cache.resolve_neg(), torch.full_like(cache, -1))
    own = tessera.decode(new, cache, cache, cache_seqlens=length)
    assert torch.equal(own, torch.full_like(own, -1))


def test_explain_says_what_is_appended():
    case = Case([5, 7], "cpu", torch.bfloat16, new=2, rotary=16, interleaved=True)
    answer = tessera.explain(case.q, case.k, case.v, op="decode", **case.options(), batch_invariant=True)
    assert "appends 2" in answer and "rotary 16 interleaved" in answer and "batch_invariant" in answer
    answer = tessera.explain(case.q, case.k, case.v, op="decode", **case.options(), format="json")
    assert answer["fields"]["seq_new"] == 2 and answer["chosen"] is not None


# ---- The operators ----


def arguments(case):
    options = case.options()
    tensors = (case.q, case.k, case.v, case.slopes, options["cache_seqlens"], case.table)
    return tensors + (options["cache_batch_idx"], options["leftpad_k"], None, None, None)


PLAIN = (0.0, 0.0, 1, 2, -1, -1, 0, 0, 0)


def test_the_operators_pass_opcheck(device, dtype):
    case = Case([24, 9], device, dtype, leftpad=[0, 2])
    opcheck(torch.ops.tessera.decode.default, (*arguments(case), *PLAIN))
    case = Case([24, 9], device, dtype, new=2, rotary=32, leftpad=[0, 2])
    status = int32([0, 0], device)
    appended = (case.k_new, case.v_new, case.cos, case.sin, None, status)
    opcheck(torch.ops.tessera.decode_append.default, (*arguments(case), *appended, None, None, *PLAIN))
    opcheck(torch.ops.tessera.decode_append.default, (*arguments(case), *(None,) * 5, status, None, None, *PLAIN))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_appends_compile_into_one_graph(device, dtype, backend):
    torch.compiler.reset()

    def step(q, k, v, k_new, v_new, cos, sin, lengths, status):
        out = tessera.decode(
            q * 2, k, v, k_new=k_new.sin(), v_new=v_new, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths,
            status=status,
        )  # fmt: skip
        lengths += 1
        return out.relu(), k.sum()

    case = Case([24, 9], device, dtype, new=1, rotary=32)
    results = []
    for compiled in (False, True):
        run = torch.compile(step, fullgraph=True, backend=backend) if compiled else step
        caches = case.k.clone(), case.v.clone()
        lengths, status = int32([24, 9], device), int32([7, 7], device)
        made = []
        for _ in range(3):
            made += run(case.q, *caches, case.k_new, case.v_new, case.cos, case.sin, lengths, status)
        results.append((*made, *caches, lengths, status))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    assert results[1][-1].tolist() == [0, 0] and results[1][-2].tolist() == [27, 12]


def test_appends_refuse_vmap_and_tangents(device, dtype):
    case = Case([5, 7], device, dtype, new=1)
    call = lambda q: tessera.decode(q, case.k, case.v, **case.options())  # noqa: E731
    with pytest.raises(tessera.Error, match="no vmap rule"):
        torch.vmap(call)(torch.stack((case.q, case.q)))
    with pytest.raises(tessera.Error, match="forward-mode AD"):
        torch.func.jvp(call, (case.q,), (torch.ones_like(case.q),))


@cuda
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("page", [0, 16])
def test_a_graph_captured_at_length_1_replays_with_appends(page, e4m3):
    length, dtype = 1200, torch.bfloat16
    q, k, v = tensors((2, length, 8, 64), (2, length, 2, 64), (2, length, 2, 64), device="cuda", dtype=dtype)
    shape = (2, 1216, 2, 64) if not page else (2 * 1216 // page, page, 2, 64)
    table = torch.randperm(shape[0]).view(2, -1).int().cuda() if page else None
    caches = tensors(shape, shape, device="cuda", dtype=dtype)
    lengths = int32([0, 0], "cuda")
    scales = {}
    if e4m3:  # each append writes the scales of its tokens
        k, v = (rounded_by_token(t).to(dtype) for t in (k, v))
        caches = [c.to(torch.float8_e4m3fn) for c in caches]
        scales = {name: torch.full((shape[0], 2, shape[1]), float("nan"), device="cuda") for name in ("k_scale", "v_scale")}
    rows = [t[:, :1].clone() for t in (q, k, v)]

    def step():
        out = tessera.decode(
            rows[0], *caches, k_new=rows[1], v_new=rows[2], cache_seqlens=lengths, page_table=table, **scales
        )
        lengths.add_(1)
        return out

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    lengths.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    results = []
    for i in range(length):
        for row, whole in zip(rows, (q, k, v)):
            row.copy_(whole[:, i : i + 1])
        graph.replay()
        results.append(out.clone())
    exact, _ = reference(q.double(), k.double(), v.double(), causal=True)
    plain, _ = reference(q, k, v, causal=True)
    assert_accurate(torch.cat(results, 1), exact, plain, "out")


def e4m3_cache(device, dtype, batch=3, capacity=40, heads=2, dim=64, page=0):
    """Values of a cache, the cache of float8_e4m3fn that holds them, and its scales, float32 [1, heads]."""
    caches, scales = [], []
    for _ in range(2):
        x = torch.randn(batch, capacity, heads, dim, device=device)
        scale = x.abs().amax((0, 1, 3)) / torch.linspace(300, 440, heads, device=device)
        caches.append((x / scale[:, None]).to(torch.float8_e4m3fn))
        scales.append(scale[None])
    values = [c.float() * s[0, :, None] for c, s in zip(caches, scales)]
    if page:
        caches = [c.reshape(-1, page, heads, dim) for c in caches]
    return values, caches, scales


@pytest.mark.parametrize("page", [0, 8])
def test_a_cache_of_e4m3_gives_the_attention_of_its_values(device, page):
    torch.manual_seed(3)
    dtype = torch.bfloat16
    (k, v), caches, (k_scale, v_scale) = e4m3_cache(device, dtype, page=page)
    q = torch.randn(3, 2, 4, 64, device=device, dtype=dtype)
    lengths = [40, 1, 17]
    table = int32(range(15), device).view(3, 5) if page else None
    out = tessera.decode(
        q, *caches, cache_seqlens=int32(lengths, device), page_table=table, k_scale=k_scale, v_scale=v_scale
    )
    for b, length in enumerate(lengths):
        expected = tessera.attention(
            q[b : b + 1].float().cpu(), k[b : b + 1, :length].cpu(), v[b : b + 1, :length].cpu(), causal="bottom_right"
        )
        torch.testing.assert_close(out[b : b + 1].float().cpu(), expected, atol=2e-2, rtol=2e-2)


def test_keys_are_rounded_as_they_are_appended_to_a_cache_of_e4m3(device):
    torch.manual_seed(4)
    dtype = torch.bfloat16
    _, caches, scales = e4m3_cache(device, dtype)
    before = [c.clone() for c in caches]
    q, *new = (torch.randn(3, 1, heads, 64, device=device, dtype=dtype) for heads in (4, 2, 2))
    lengths = int32([39, 0, 17], device)
    given = dict(k_scale=scales[0], v_scale=scales[1])
    out, lse = tessera.decode(
        q, *caches, cache_seqlens=lengths, k_new=new[0], v_new=new[1], return_lse=True, **given
    )
    for cache, old, x, scale in zip(caches, before, new, scales):
        rounded = (x.float() / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        for b, length in enumerate(lengths.tolist()):
            old[b, length] = rounded[b, 0]
        assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))
    again, lse_again = tessera.decode(q, *caches, cache_seqlens=lengths + 1, return_lse=True, **given)
    torch.testing.assert_close(again, out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse_again, lse, atol=1e-3, rtol=1e-3)


def test_a_cache_of_e4m3_needs_its_scales_and_its_type(device):
    _, caches, scales = e4m3_cache(device, torch.bfloat16)
    q = torch.randn(3, 1, 4, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(tessera.Error, match="k_scale is null; e4m3 needs it"):
        tessera.decode(q, *caches)
    with pytest.raises(tessera.Error, match="k_cache is uint8; float8_e4m3fn is accepted"):
        tessera.decode(q, *(c.view(torch.uint8) for c in caches), k_scale=scales[0], v_scale=scales[1])
    with pytest.raises(tessera.Error, match="k_scale has heads = 3; 1 or 2 is accepted"):
        tessera.decode(q, *caches, k_scale=torch.ones(1, 3, device=device), v_scale=scales[1])
    with pytest.raises(tessera.Error, match="k_scale is given, but k is bf16"):
        tessera.decode(q, *(c.to(q.dtype) for c in caches), k_scale=scales[0], v_scale=scales[1])


def test_decode_of_an_e4m3_cache_compiles(device):
    _, caches, scales = e4m3_cache(device, torch.bfloat16)
    q, k_new, v_new = (torch.randn(3, 1, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    compiled = torch.compile(tessera.decode, fullgraph=True, backend="aot_eager")
    given = dict(cache_seqlens=int32([5, 0, 17], device), k_new=k_new, v_new=v_new, k_scale=scales[0], v_scale=scales[1])
    expected = tessera.decode(q, *(c.clone() for c in caches), **given)
    assert torch.equal(compiled(q, *caches, **given), expected)


def token_scaled_cache(device, batch=3, capacity=40, heads=2, dim=64, page=0):
    """e4m3_cache with scales beside the keys, powers of two: [batch, heads, capacity], or [pages, heads, page]."""
    values, caches, scales = [], [], []
    for _ in range(2):
        x = torch.randn(batch, capacity, heads, dim, device=device) * torch.logspace(-3, 3, capacity, device=device)[:, None, None]
        scale = token_scales(x)
        caches.append((x / scale[..., None]).to(torch.float8_e4m3fn))
        values.append(caches[-1].float() * scale[..., None])
        if page:
            caches[-1] = caches[-1].reshape(-1, page, heads, dim)
            scale = scale.reshape(-1, page, heads)
        scales.append(scale.transpose(1, 2).contiguous())
    return values, caches, scales


def token_scales(x):
    """The least powers of two that bring rows into float8_e4m3fn's range."""
    return torch.exp2(torch.ceil(torch.log2(x.double().abs().amax(-1) / 448))).float()


def rounded_by_token(x):
    scale = token_scales(x)[..., None]
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("page", [0, 8])
def test_a_cache_with_scales_per_token_gives_the_attention_of_its_values(device, page):
    torch.manual_seed(5)
    (k, v), caches, (k_scale, v_scale) = token_scaled_cache(device, page=page)
    q = torch.randn(3, 2, 4, 64, device=device, dtype=torch.bfloat16) / 8
    lengths = [40, 1, 17]
    table = int32(range(15), device).view(3, 5) if page else None
    given = dict(cache_seqlens=int32(lengths, device), page_table=table, k_scale=k_scale, v_scale=v_scale)
    out = tessera.decode(q, *caches, **given)
    for b, length in enumerate(lengths):
        expected = tessera.attention(
            q[b : b + 1].float().cpu(), k[b : b + 1, :length].cpu(), v[b : b + 1, :length].cpu(), causal="bottom_right"
        )
        largest = expected.abs().max()
        torch.testing.assert_close(out[b : b + 1].float().cpu() / largest, expected / largest, atol=1e-2, rtol=1e-2)
    assert "scales per token" in tessera.explain(q, *caches, op="decode", causal=True, **given)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_append_writes_the_scales_of_its_tokens(device, compiled):
    torch.manual_seed(6)
    torch.compiler.reset()
    _, caches, scales = token_scaled_cache(device)
    before = [(c.clone(), s.clone()) for c, s in zip(caches, scales)]
    q, *new = (torch.randn(3, 1, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    lengths = int32([39, 0, 17], device)
    run = torch.compile(tessera.decode, fullgraph=True, backend="aot_eager") if compiled else tessera.decode
    given = dict(k_scale=scales[0], v_scale=scales[1])
    out = run(q, *caches, cache_seqlens=lengths, k_new=new[0], v_new=new[1], **given)
    for cache, scale, (old, old_scale), x in zip(caches, scales, before, new):
        by = token_scales(x)[:, 0]
        for b, length in enumerate(lengths.tolist()):
            old[b, length] = (x[b, 0].float() / by[b, :, None]).to(torch.float8_e4m3fn)
            old_scale[b, :, length] = by[b]
        assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))
        assert torch.equal(scale, old_scale)
    torch.testing.assert_close(tessera.decode(q, *caches, cache_seqlens=lengths + 1, **given), out, atol=1e-2, rtol=1e-2)


def test_scales_per_page_are_read_by_an_append(device):
    torch.manual_seed(7)
    _, caches, _ = e4m3_cache(device, torch.bfloat16, page=8)
    scales = [torch.exp2(torch.randint(-8, -4, (15, 2, 1), device=device).float()) for _ in range(2)]
    before = [s.clone() for s in scales]
    q, *new = (torch.randn(3, 1, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    table, lengths = int32(range(15), device).view(3, 5), int32([39, 0, 17], device)
    given = dict(page_table=table, k_scale=scales[0], v_scale=scales[1])
    out = tessera.decode(q, *caches, cache_seqlens=lengths, k_new=new[0], v_new=new[1], **given)
    assert all(torch.equal(a, b) for a, b in zip(scales, before))
    for cache, scale, x in zip(caches, scales, new):
        for b, length in enumerate(lengths.tolist()):
            page = table[b, length // 8]
            rounded = (x[b, 0].float() / scale[page]).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(cache[page, length % 8].view(torch.uint8), rounded.view(torch.uint8))
    # The same values with scales per token.
    wide = [s.expand(15, 2, 8).contiguous() for s in scales]
    again = tessera.decode(q, *caches, cache_seqlens=lengths + 1, page_table=table, k_scale=wide[0], v_scale=wide[1])
    torch.testing.assert_close(again, out, atol=1e-2, rtol=1e-2)


def test_scales_beside_the_keys_have_their_shape(device):
    _, caches, scales = token_scaled_cache(device)
    q = torch.randn(3, 1, 4, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(tessera.Error, match=r"v_scale is \[1, 1\]; both have scales of heads, of pages or of tokens"):
        tessera.decode(q, *caches, k_scale=scales[0], v_scale=torch.ones(1, 1, device=device))
    with pytest.raises(tessera.Error, match="v_scale is null; e4m3 needs it"):
        tessera.decode(q, *caches, k_scale=scales[0])
    with pytest.raises(tessera.Error, match=r"k_scale is \[3, 2, 1\]; 40 scales for the keys are accepted"):
        tessera.decode(q, *caches, k_scale=scales[0][..., :1], v_scale=scales[1][..., :1])
    with pytest.raises(tessera.Error, match="k_scale has heads = 1, but k gives 2"):
        tessera.decode(q, *caches, k_scale=scales[0][:, :1], v_scale=scales[1])
    with pytest.raises(tessera.Error, match="k_scale has 1 dims"):
        tessera.decode(q, *caches, k_scale=scales[0][0, 0], v_scale=scales[1][0, 0])


def test_flash_attn_interface_reads_a_cache_of_e4m3(device):
    from tessera.flash_attn_interface import flash_attn_with_kvcache

    _, caches, scales = e4m3_cache(device, torch.bfloat16)
    q = torch.randn(3, 1, 4, 64, device=device, dtype=torch.bfloat16)
    lengths = int32([40, 1, 17], device)
    out = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths, k_descale=scales[0].expand(3, 2), v_descale=scales[1].expand(3, 2)
    )
    expected = tessera.decode(q, *caches, cache_seqlens=lengths, causal=False, k_scale=scales[0], v_scale=scales[1])
    assert torch.equal(out, expected)
    _, token_caches, token_scale = token_scaled_cache(device)
    given = dict(k_descale=token_scale[0], v_descale=token_scale[1])
    expected = tessera.decode(
        q, *token_caches, cache_seqlens=lengths, causal=False, k_scale=token_scale[0], v_scale=token_scale[1]
    )
    assert torch.equal(flash_attn_with_kvcache(q, *token_caches, cache_seqlens=lengths, **given), expected)
    plain = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, causal=True)
    ones = torch.ones(1, 1, device=device)
    assert torch.equal(plain, tessera.decode(q, *caches, cache_seqlens=lengths, k_scale=ones, v_scale=ones))
