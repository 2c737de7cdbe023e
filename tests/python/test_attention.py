"""tessera.attention in eager mode: values, gradients, layouts, refusals."""

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from reference import assert_accurate, attention as reference, qkv, tensors
from torch.utils.checkpoint import checkpoint

import tessera

TYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16, torch.float16)}


def reference_of(inputs, dout, dlse, precision, **masks):
    """(out, lse, dq, dk, dv) by autograd through the definition."""
    leaves = [t.detach().to(precision).requires_grad_() for t in inputs]
    out, lse = reference(*leaves, **masks)
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        seen = lse.isfinite()
        loss = loss + (lse[seen].float() * dlse[seen]).sum().to(loss.dtype)
    grads = torch.autograd.grad(loss, leaves)
    return out.detach(), lse.detach(), *grads


def check(inputs, with_dlse=False, options=None, **masks):
    options = dict(masks) if options is None else options
    out, lse = tessera.attention(*inputs, return_lse=True, **options)
    dout = torch.randn_like(out)
    dlse = torch.randn_like(lse) if with_dlse else None
    outputs, grads = ((out, lse), (dout, dlse)) if with_dlse else ((out,), (dout,))
    got = (out, lse, *torch.autograd.grad(outputs, inputs, grads))
    exact = reference_of(inputs, dout, dlse, torch.float64, **masks)
    plain = reference_of(inputs, dout, dlse, inputs[0].dtype, **masks)
    for name, *three in zip(("out", "lse", "dq", "dk", "dv"), got, exact, plain):
        assert_accurate(*three, name)
    return got


@pytest.mark.parametrize("index", range(3))
def test_values_and_gradients_match_the_definition_in_every_type(device, index):
    if index >= len(TYPES[device]):
        pytest.skip("no third type on a GPU")
    check(qkv(device=device, dtype=TYPES[device][index], grad=True))


@pytest.mark.parametrize(
    "shape",
    [
        dict(d=8),
        dict(d=80),
        dict(d=128, sq=65),
        dict(d=256, sq=9),
        dict(d=64, dv=32),
        dict(hq=8, hkv=1),
        dict(sq=1, sk=50),
        dict(sq=100, sk=3),
        dict(b=3, sq=130, hq=2, hkv=2),
    ],
    ids=str,
)
def test_any_shape(device, dtype, shape):
    check(qkv(**shape, device=device, dtype=dtype, grad=True))


MASKS = {
    "causal": dict(causal=True),
    "causal_softcap": dict(causal=True, softcap=20.0),
    "window": dict(window=(7, 3)),
    "causal_window": dict(causal=True, window=(5, -1)),
    "scale": dict(scale=0.3),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(device, dtype, name):
    check(qkv(device=device, dtype=dtype, grad=True), **MASKS[name])


@pytest.mark.parametrize("slopes", [(4,), (2, 4)])
def test_alibi(device, dtype, slopes):
    check(qkv(device=device, dtype=dtype, grad=True), alibi=torch.rand(slopes, device=device), causal=True)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("sq, sk", [(20, 50), (50, 20)])
def test_alignment_is_explicit_for_rectangles(device, dtype, alignment, sq, sk):
    inputs = qkv(sq=sq, sk=sk, device=device, dtype=dtype, grad=True)
    check(inputs, options=dict(causal=alignment), causal=True, alignment=alignment)
    check(inputs, options=dict(window=(4, 4), alignment=alignment), window=(4, 4), alignment=alignment)
    with pytest.raises(tessera.Error, match="alignment is unspecified"):
        tessera.attention(*inputs, causal=True)


def test_rows_with_no_visible_key_give_zero_and_minus_infinity(device, dtype):
    inputs = qkv(sq=20, sk=4, device=device, dtype=dtype, grad=True)
    out, lse, dq, _, _ = check(inputs, options=dict(causal="bottom_right"), causal=True, alignment="bottom_right")
    assert (out[:, :16] == 0).all() and (lse[:, :, :16] == -torch.inf).all() and (dq[:, :16] == 0).all()
    assert (out[:, 16:] != 0).any()


def test_log_sum_exp_is_differentiable(device, dtype):
    check(qkv(device=device, dtype=dtype, grad=True), with_dlse=True, causal=True)
    inputs = qkv(device=device, dtype=dtype, grad=True)
    _, lse = tessera.attention(*inputs, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), inputs)  # out gets no gradient
    assert dq.abs().sum() > 0 and dk.abs().sum() > 0 and (dv == 0).all()


def test_any_strides_are_accepted_without_a_copy(device, dtype):
    packed = torch.randn(2, 30, 3, 4, 64, device=device, dtype=dtype)
    views = [packed[:, :, i] for i in range(3)]
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in views]
    broadcast = views[1][:, :, :1].expand(2, 30, 4, 64)
    want = tessera.attention(*(t.contiguous() for t in views), causal=True)
    for given in (views, heads_first):
        got = tessera.attention(*given, causal=True)
        assert torch.equal(got, want) and got.is_contiguous()
    want = tessera.attention(views[0].contiguous(), broadcast.contiguous(), views[2].contiguous())
    assert torch.equal(tessera.attention(views[0], broadcast, views[2]), want)


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_may_start_anywhere(device, dtype, batch):
    """On a GPU, aligned and unaligned rows use different kernels; a plan for one must not be used for the other."""
    shape = (batch, 24, 2, 64)
    for offset in (0, 1, 0, 4, 3):
        room = [torch.zeros(batch * 24 * 2 * 64 + 8, device=device, dtype=dtype) for _ in range(3)]
        torch.manual_seed(0)
        views = []
        for buffer in room:
            view = buffer[offset : offset + batch * 24 * 2 * 64].view(shape)
            views.append(view.copy_(torch.randn(shape)))
        check([view.detach().requires_grad_() for view in views], causal=True)


def test_inputs_are_not_copied(device, dtype):
    q, k, v = (t.transpose(1, 2) for t in tensors(*[(1, 8, 64, 64)] * 3, device=device, dtype=dtype))
    with torch.profiler.profile() as profile, torch.no_grad():
        tessera.attention(q, k, v)
    names = {event.name for event in profile.events()}
    assert any("empty" in name for name in names), names  # the profiler would have recorded a copy
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous"}, names


def test_packed_sequences(device, dtype):
    lengths_q, lengths_k = [5, 0, 17, 1], [9, 3, 17, 0]
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device) for n in (lengths_q, lengths_k)
    )
    inputs = tensors((23, 4, 64), (29, 2, 64), (29, 2, 64), device=device, dtype=dtype, grad=True)
    packed = dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=17, max_seqlen_k=17)
    out, lse = tessera.attention(*inputs, causal="bottom_right", return_lse=True, **packed)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout)
    assert out.shape == (23, 4, 64) and lse.shape == (4, 23)
    start_q = start_k = 0
    for rows, keys in zip(lengths_q, lengths_k):
        at_q, at_k = slice(start_q, start_q + rows), slice(start_k, start_k + keys)
        start_q, start_k = at_q.stop, at_k.stop
        parts = [inputs[0][None, at_q], inputs[1][None, at_k], inputs[2][None, at_k]]
        if rows == 0:
            assert all((g[at_k] == 0).all() for g in grads[1:])
            continue
        masks = dict(causal=True, alignment="bottom_right")
        exact = reference_of(parts, dout[None, at_q], None, torch.float64, **masks)
        plain = reference_of(parts, dout[None, at_q], None, dtype, **masks)
        got = (out[None, at_q], lse[None, :, at_q], grads[0][None, at_q], grads[1][None, at_k], grads[2][None, at_k])
        for name, *three in zip(("out", "lse", "dq", "dk", "dv"), got, exact, plain):
            assert_accurate(*three, name)


def test_max_seqlen_may_be_a_tensor_that_changes(device, dtype):
    longest = torch.tensor(3)
    for lengths in ([3, 3], [1, 5]):
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
        longest.fill_(max(lengths))
        inputs = tensors(*[(6, 2, 32)] * 3, device=device, dtype=dtype)
        packed = dict(cu_seqlens_q=cu, cu_seqlens_k=cu)
        got = tessera.attention(*inputs, **packed, max_seqlen_q=longest, max_seqlen_k=longest)
        want = tessera.attention(*inputs, **packed, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths))
        assert torch.equal(got, want)


def test_rows_past_the_last_packed_sequence_are_zero(device, dtype):
    """The kernels do not write them, so they would be uninitialized memory."""
    cu = torch.tensor([0, 5, 9], dtype=torch.int32, device=device)
    for _ in range(3):
        junk = [torch.full((40, 4, 64), torch.inf, device=device, dtype=dtype) for _ in range(8)]
        inputs = tensors(*[(40, 4, 64)] * 3, device=device, dtype=dtype, grad=True)
        dout = torch.randn_like(inputs[0])
        del junk
        out, lse = tessera.attention(*inputs, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True)
        grads = torch.autograd.grad(out, inputs, dout)
        assert all((t[9:] == 0).all() for t in (out, *grads)) and (lse[:, 9:] == -torch.inf).all()


@pytest.mark.parametrize("given", [False, True])
def test_packed_sequences_of_different_lengths_one_after_another(device, dtype, given):
    """A plan made for one batch's lengths must not be used for longer ones."""
    for lengths in ([20, 24, 20], [2, 2, 60], [60, 2, 2], [1, 1, 62], [64, 0, 0]):
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
        longest = dict(max_seqlen_q=max(lengths), max_seqlen_k=max(lengths)) if given else {}
        q, k, v = tensors(*[(64, 2, 32)] * 3, device=device, dtype=dtype)
        out = tessera.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, **longest)
        for a, b in zip(cu, cu[1:]):
            if a < b:
                exact, _ = reference(q[None, a:b].double(), k[None, a:b].double(), v[None, a:b].double(), causal=True)
                plain, _ = reference(q[None, a:b], k[None, a:b], v[None, a:b], causal=True)
                assert_accurate(out[None, a:b], exact, plain, "out")


def test_decode_refuses_gradients():
    q, k, v = qkv(sq=1, sk=10, device="cpu", dtype=torch.float32, grad=True)
    with pytest.raises(tessera.Error, match="no gradient"):
        tessera.decode(q, k, v).sum().backward()


def test_empty_tensors(device, dtype):
    for shape in (dict(b=0), dict(sq=0, sk=5)):
        inputs = tensors(
            *((shape.get("b", 2), s, 4, 64) for s in (shape.get("sq", 7), shape.get("sk", 7), shape.get("sk", 7))),
            device=device, dtype=dtype, grad=True,
        )  # fmt: skip
        out = tessera.attention(*inputs)
        grads = torch.autograd.grad(out.sum(), inputs)
        assert out.numel() == 0 and all((g == 0).all() for g in grads)


@pytest.mark.parametrize("exchange", [True, False])
def test_tensors_are_read_through_dlpack_or_their_attributes(device, dtype, exchange):
    from tessera import _ops

    had = _ops._set_up()
    try:
        assert _ops._set_up(exchange) == (exchange and had)
        check([t for t in qkv(device=device, dtype=dtype, grad=True)], causal=True)
        with pytest.raises(tessera.Error, match="q is .*64"):
            tessera.attention(*qkv(device=device, dtype=torch.float64))
    finally:
        _ops._set_up()


def test_meta_tensors_give_shapes():
    q, k, v = qkv(dv=32, device="meta", dtype=torch.bfloat16)
    out, lse = tessera.attention(q, k, v, return_lse=True)
    assert out.is_meta and out.shape == (2, 37, 4, 32) and lse.shape == (2, 4, 37) and lse.dtype == torch.float32


def test_parameters_and_modules(device, dtype):
    q, k, v = (torch.nn.Parameter(t) for t in qkv(device=device, dtype=dtype))
    tessera.attention(q, k, v).sum().backward()  # the gradient of sum() is expanded: no row is contiguous
    assert all(t.grad is not None and t.grad.isfinite().all() for t in (q, k, v))


def test_only_some_inputs_need_gradients(device, dtype):
    q, k, v = qkv(device=device, dtype=dtype)
    v.requires_grad_()
    tessera.attention(q, k, v).sum().backward()
    assert q.grad is None and k.grad is None and v.grad is not None


def test_checkpointing(device, dtype):
    inputs = qkv(device=device, dtype=dtype, grad=True)
    dout = torch.randn_like(inputs[0])
    call = lambda *t: tessera.attention(*t, causal=True, deterministic=True)  # noqa: E731
    want = torch.autograd.grad(call(*inputs), inputs, dout)
    for reentrant in (False, True):
        for tensor in inputs:
            tensor.grad = None
        checkpoint(call, *inputs, use_reentrant=reentrant).backward(dout)
        assert all(torch.equal(tensor.grad, grad) for tensor, grad in zip(inputs, want))


def test_deterministic_is_honoured(device, dtype):
    inputs = qkv(sq=300, device=device, dtype=dtype, grad=True)
    dout = torch.randn_like(inputs[0])
    runs = [torch.autograd.grad(tessera.attention(*inputs, deterministic=True), inputs, dout) for _ in range(4)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))
    seen = []
    torch.use_deterministic_algorithms(True)
    try:
        for given in (None, False):
            out = tessera.attention(*inputs, deterministic=given)
            seen.append(bool(out.grad_fn.options[2] & 2))
    finally:
        torch.use_deterministic_algorithms(False)
    seen.append(bool(tessera.attention(*inputs).grad_fn.options[2] & 2))
    assert seen == [True, False, False]


def test_double_backward_is_refused(device, dtype):
    q, k, v = qkv(device=device, dtype=dtype, grad=True)
    (dq,) = torch.autograd.grad(tessera.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(tessera.Error, match="no second derivative"):
        dq.sum().backward()


def test_autocast_casts_to_its_type(device):
    q, k, v = qkv(device=device, dtype=torch.float32, grad=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = tessera.attention(q, k, v, causal=True)
        with torch.no_grad():
            again = tessera.attention(q, k, v, causal=True)
    assert out.dtype == again.dtype == torch.bfloat16 and torch.equal(out, again)
    assert torch.equal(out, tessera.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal=True))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_vmap_is_refused(device, dtype):
    q, k, v = tensors(*[(3, 2, 8, 4, 64)] * 3, device=device, dtype=dtype)
    with pytest.raises(tessera.Error, match="no vmap rule"):
        torch.vmap(tessera.attention)(q, k, v)


def test_functional_grad(device, dtype):
    inputs = qkv(device=device, dtype=dtype)
    loss = lambda *t: tessera.attention(*t, causal=True, deterministic=True).float().sum()  # noqa: E731
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [t.clone().requires_grad_() for t in inputs]
    want = torch.autograd.grad(loss(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_tensors_that_escaped_a_transform_are_accepted(device, dtype):
    q, k, v = qkv(device=device, dtype=dtype)
    left = []

    def loss(tensor):
        left.append(tensor)
        return tensor.sum()

    torch.func.grad(loss)(k)
    want = tessera.attention(q, k, v)
    assert torch.equal(tessera.attention(q, left[0], v), want)
    with torch.no_grad():
        assert torch.equal(tessera.attention(q, left[0], v), want)
    assert torch.equal(tessera.attention(q.requires_grad_(), left[0], v), want)


def test_a_trace_records_the_operator(device, dtype):
    q, k, v = qkv(device=device, dtype=dtype)
    with warnings.catch_warnings():  # torch.jit.trace is deprecated
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda a, b, c: tessera.attention(a, b, c), (q, k, v), check_trace=False)
    assert "tessera::attention" in str(traced.graph)
    assert torch.equal(traced(q, k, v), tessera.attention(q, k, v))


def test_a_gradient_with_strides_of_zero_after_a_dense_one(device, dtype):
    inputs = [t.requires_grad_() for t in qkv(device=device, dtype=dtype)]
    out = tessera.attention(*inputs, deterministic=True)
    row = torch.randn_like(out[:, :1])
    want = torch.autograd.grad(out, inputs, row.repeat(1, out.shape[1], 1, 1), retain_graph=True)
    got = torch.autograd.grad(out, inputs, row.expand_as(out))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_slopes_that_require_a_gradient_are_refused(device, dtype):
    q, k, v = qkv(device=device, dtype=dtype)
    slopes = torch.rand(q.shape[2], device=device, requires_grad=True)
    for wanted in (False, True):
        with pytest.raises(tessera.Error, match="alibi requires a gradient"):
            tessera.attention(q.requires_grad_(wanted), k, v, alibi=slopes, alignment="top_left")


def test_the_backward_refuses_too_many_dims():
    deep = [torch.randn(1, 1, 1, 1, 1, 8, 64) for _ in range(3)]
    rows = [torch.randn(1, 8, 1, 64) for _ in range(3)]
    with pytest.raises(tessera.Error, match="q has 7 dims"):
        torch.ops.tessera.attention_backward(*deep, None, None, None, 0.0, 0.0, 0, 0, -1, -1, 0, 0, 0, *rows, None)


BAD = [
    (dict(q="no tensor"), "q is a str; a torch.Tensor is expected"),
    (dict(q=torch.randn(2, 8, 64)), "q has|q is"),
    (dict(k=torch.randn(2, 8, 3, 64)), "heads"),
    (dict(k=torch.randn(2, 8, 4, 32)), "k has"),
    (dict(v=torch.randn(2, 9, 4, 64)), "v has"),
    (dict(v=torch.randn(2, 8, 4, 64).bfloat16()), "v is bf16|v is bfloat16"),
    (dict(q=torch.randn(2, 8, 64, 4).transpose(2, 3)), "q.*stride"),
    (dict(q=torch.randn(2, 8, 4, 64).long()), "q is"),
    (dict(causal="left"), "causal is 'left'; True, 'top_left', 'bottom_right'"),
    (dict(causal=torch.tensor(True)), "causal is a torch.Tensor; a bool is expected"),
    (dict(window=(torch.tensor(3), 0)), "window has a torch.Tensor in it"),
    (dict(window=torch.tensor([3, 0])), "window is a torch.Tensor"),
    (dict(alignment="left"), "alignment is 'left'"),
    (dict(causal="top_left", alignment="bottom_right"), "give one of them"),
    (dict(window=3), "window is 3"),
    (dict(window=(1, 2, 3)), "window is"),
    (dict(window=(-5, 0)), "window_left is -5"),
    (dict(scale=0.0), "scale is 0"),
    (dict(scale=float("nan")), "scale is nan"),
    (dict(scale=torch.tensor(0.5)), "scale is a torch.Tensor; a number is expected"),
    (dict(softcap=torch.tensor(0.5)), "softcap is a torch.Tensor; a number is expected"),
    (dict(softcap=-1.0), "softcap is -1"),
    (dict(scale=1e-300), "scale is 1e-300, which is 0 in fp32"),  # 0 would be 1 / sqrt(D)
    (dict(softcap=1e-300), "softcap is 1e-300, which is 0 in fp32"),  # 0 would be none
    (dict(scale="half"), "scale is 'half'; a number is accepted"),
    (dict(window=(1.5, 2)), "left side of window is 1.5; an integer is accepted"),
    (dict(window=(0, 2**70)), "right side of window is 1180591620717411303424; an integer is accepted"),
    (dict(attention_chunk=2.5), "attention_chunk is 2.5; an integer is accepted"),
    (dict(q=torch.randn(2, 8, 4, 64).to(torch.float8_e4m3fn)), "q is float8_e4m3fn; .*precision"),
    (dict(k=torch.randn(2, 8, 4, 64).to(torch.complex64)), "k is complex64"),
    (dict(k=torch.randn(2, 8, 4, 64) > 0), "k is bool"),
    (dict(alibi=torch.rand(5)), "alibi"),
    (dict(alibi=torch.rand(4).double()), "alibi"),
    (dict(cu_seqlens_q=torch.tensor([0, 8])), "cu_seqlens"),
    (dict(max_seqlen_q=8), "max_seqlen"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[str(i) for i in range(len(BAD))])
@pytest.mark.parametrize("grad", [False, True])
def test_invalid_arguments_raise_one_exception_type_with_a_message(change, message, grad):
    q, k, v = (torch.randn(2, 8, 4, 64, requires_grad=grad) for _ in range(3))
    call = dict(q=q, k=k, v=v) | change
    with pytest.raises(tessera.Error, match=message) as caught:
        tessera.attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    assert caught.value.status in ("invalid_argument", "unsupported")
    assert caught.value.__context__ is None or caught.value.__suppress_context__  # one traceback, not two


def test_a_call_that_was_refused_does_not_change_a_later_one():
    q = torch.randn(1, 21, 1, 8)
    for wrong, right in ((dict(window=(19.0, 0)), dict(window=(19, 0))), (dict(attention_chunk=19.0), dict(attention_chunk=19))):
        for call in (tessera.attention, tessera.decode):
            with pytest.raises(tessera.Error, match="an integer is accepted"):
                call(q, q, q, causal=True, **wrong)
            call(q, q, q, causal=True, **right)


def test_an_alignment_that_is_missing_is_named_as_it_is_given():
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 8, 1, 8)
    with pytest.raises(tessera.Error, match="top_left or bottom_right"):
        tessera.attention(q, k, k, causal=True)


def test_what_no_kernel_serves_says_why(device):
    if device == "cpu":
        pytest.skip("the CPU serves the whole contract")
    with pytest.raises(tessera.Error) as caught:
        tessera.attention(*qkv(device=device, dtype=torch.float32))
    assert "fp32" in str(caught.value) and caught.value.status in ("unsupported", "invalid_argument")


def test_explain_names_the_kernel():
    q = torch.empty(2, 128, 8, 80, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 128, 2, 80, dtype=torch.bfloat16, device="meta")
    assert "sm_90a" in tessera.explain(q, k, k, causal=True, arch="sm_90a")
    assert "cpu" in tessera.explain(q, k, k, causal=True, arch="cpu", op="backward")
    assert "cpu" in tessera.explain(q[:, :1], k, k, arch="cpu", op="decode")
    assert tessera.explain(*qkv(device="cpu", dtype=torch.float32))
    with pytest.raises(tessera.Error, match="give arch"):
        tessera.explain(q, k, k)
    with pytest.raises(tessera.Error, match="sm_12"):
        tessera.explain(q, k, k, arch="sm_12")


def test_explain_says_what_flash_attn_would_pad():
    q = torch.empty(2, 128, 8, 36, dtype=torch.bfloat16, device="meta")
    v = torch.empty(2, 128, 8, 50, dtype=torch.bfloat16, device="meta")
    assert "copies with Dqk=40 Dv=56" in tessera.explain(q, q, v, arch="sm_90a")
    assert tessera.explain(q, q, v, arch="sm_90a", format="json")["padded"] == {"dim_qk": 40, "dim_v": 56}
    assert "padded" not in tessera.explain(q, q, v, arch="cpu", format="json")


def test_explain_as_data():
    q = torch.empty(2, 128, 8, 80, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 256, 2, 80, dtype=torch.bfloat16, device="meta")
    call = dict(causal="bottom_right", arch="sm_90a")
    answer = tessera.explain(q, k, k, **call, format="json")
    assert answer["family"] == "attention" and answer["op"] == "attention_forward"
    shape = dict(batch=2, seq_q=128, seq_k=256, heads_q=8, heads_kv=2, dim_qk=80, dim_v=80)
    assert {name: answer["fields"][name] for name in shape} == shape
    chosen = answer["chosen"]
    assert chosen["kernel"] in tessera.explain(q, k, k, **call)
    for option in (chosen, *answer["offered"]):
        assert all(isinstance(step, dict) for step in option["config"].values())
        assert option["workspace"] >= 0 and ("measured_us" if option["tuned"] else "predicted_us") in option
    assert answer["refused"] and all(each["kernel"] and each["reason"] for each in answer["refused"])
    single = tessera.explain(q.float(), k.float(), k.float(), **call, format="json")
    assert single["chosen"] is None and single["refused"]
    with pytest.raises(tessera.Error, match="format is 'yaml'; 'text', 'json' are accepted"):
        tessera.explain(q, k, k, **call, format="yaml")


def test_threads_follow_torch():
    before = torch.get_num_threads()
    q, k, v = qkv(sq=200, device="cpu", dtype=torch.float32)
    try:
        results = []
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            results.append(tessera.attention(q, k, v))
            assert f"{threads} thread" in tessera.explain(q, k, v)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(results[0], results[1]) and torch.equal(results[0], results[2])


THREADS = """
import os, torch, tessera
torch.set_num_threads(4)
torch.ones(1 << 20).add_(1)  # starts PyTorch's threads
before = len(os.listdir("/proc/self/task"))
tessera.attention(*(torch.randn(2, 64, 4, 64) for _ in range(3)))
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="PyTorch's loop is no C function before 2.10")
def test_it_has_no_threads_beside_pytorchs():
    said = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["0"]


def test_many_threads_may_call_at_once(device, dtype):
    inputs = [qkv(sq=10 + i, device=device, dtype=dtype, grad=True) for i in range(8)]
    want = [tessera.attention(*each, causal=True) for each in inputs]
    wrong = []

    def work(i):
        for _ in range(20):
            out = tessera.attention(*inputs[i], causal=True)
            out.sum().backward()
            if not torch.equal(out, want[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _child(queue):
    q, k, v = (torch.ones(1, 64, 2, 32) for _ in range(3))
    queue.put(tessera.attention(q, k, v).sum().item())


def test_a_forked_worker_can_call():
    tessera.attention(*qkv(sq=200, device="cpu", dtype=torch.float32))  # the parent's thread pool is running
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == 64 * 2 * 32
    process.join(timeout=60)
    assert process.exitcode == 0


IMPORTED_LATER = """
import multiprocessing, sys, torch
def child():
    import tessera
    tessera.attention(*(torch.ones(1, 200, 2, 32) for _ in range(3)))
if __name__ == "__main__":
    torch.set_num_threads(2)
    torch.ones(1 << 20).add_(1)  # starts PyTorch's threads, which a forked child does not have
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child)
    process.start()
    process.join(timeout=60)
    print(process.exitcode)
    process.kill()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_worker_may_import_it(method, tmp_path):
    (tmp_path / "parent.py").write_text(IMPORTED_LATER)
    said = subprocess.run([sys.executable, str(tmp_path / "parent.py"), method], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["0"], said.stderr


def test_sdpa_is_a_drop_in(device, dtype):
    q, k, v = tensors((2, 8, 33, 64), (2, 2, 33, 64), (2, 2, 33, 64), device=device, dtype=dtype, grad=True)
    for options in (dict(), dict(is_causal=True), dict(scale=0.2)):
        out = tessera.sdpa(q, k, v, enable_gqa=True, **options)
        exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), enable_gqa=True, **options)
        plain = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        assert_accurate(out, exact, plain, "out")
        with torch.no_grad():
            plainly = tessera.sdpa(q, k, v, enable_gqa=True, **options)
        assert torch.equal(plainly, out) and plainly.stride() == out.stride()
    three = [t[0] for t in (q, q, q)]
    assert torch.equal(tessera.sdpa(*three), tessera.sdpa(q, q, q)[0])
    # If Sq != Sk, the causal mask is top-left, as in PyTorch.
    rows = q[:, :, :5]
    exact = F.scaled_dot_product_attention(rows.double(), q.double(), q.double(), is_causal=True)
    assert (tessera.sdpa(rows, q, q, is_causal=True) - exact).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("memory", ["heads first", "rows first"])
def test_sdpa_has_the_gradients_of_attention(device, dtype, memory):
    leaves = qkv(sq=33, dv=32, device=device, dtype=dtype, grad=True)
    heads_first = [t.detach().transpose(1, 2) for t in leaves]
    if memory == "heads first":
        heads_first = [t.contiguous() for t in heads_first]
    for tensor in heads_first:
        tensor.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        want = tessera.attention(*leaves, causal=True)
        got = tessera.sdpa(*heads_first, is_causal=True, enable_gqa=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(got.transpose(1, 2), want) and got.transpose(1, 2).is_contiguous()
    # Only the attention itself is recorded: transposing each input would take longer than everything else.
    assert {node.name() for node, _ in got.grad_fn.next_functions if node} == {"torch::autograd::AccumulateGrad"}
    dout = torch.randn_like(want)
    for same in (dout.transpose(1, 2), dout.transpose(1, 2).contiguous()):
        grads = torch.autograd.grad(got, heads_first, same, retain_graph=True)
        for a, b in zip(grads, torch.autograd.grad(want, leaves, dout, retain_graph=True)):
            assert torch.equal(a.transpose(1, 2), b)
    (dq,) = torch.autograd.grad(got.sum(), heads_first[0], create_graph=True)
    with pytest.raises(tessera.Error, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize(
    "change, argument",
    [
        (dict(attn_mask=torch.ones(8, 8, dtype=torch.bool)), "attn_mask"),
        (dict(dropout_p=0.1), "dropout_p"),
        (dict(key=torch.randn(1, 2, 8, 64), value=torch.randn(1, 2, 8, 64)), "enable_gqa"),
        (dict(query=3), "query"),
    ],
)
def test_sdpa_names_what_it_does_not_serve(change, argument):
    call = dict(query=torch.randn(1, 4, 8, 64), key=torch.randn(1, 4, 8, 64), value=torch.randn(1, 4, 8, 64)) | change
    with pytest.raises(tessera.Error, match=argument):
        tessera.sdpa(**call)


def test_import_is_light():
    code = (
        "import time, torch; t = time.process_time(); import tessera; t = time.process_time() - t; import sys; "
        "assert 'transformers' not in sys.modules and 'torch._inductor' not in sys.modules; print(t)"
    )
    import subprocess
    import sys

    best = min(float(subprocess.check_output([sys.executable, "-c", code], env=os.environ)) for _ in range(2))
    assert best < 0.3
