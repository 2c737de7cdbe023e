"""precision="fp8" and quantize_fp8."""

import warnings

import pytest
import torch

import tessera
from tessera import _fp8, _ops
from tessera._attention import _PRECISIONS


def tensors(*shapes, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


@pytest.mark.parametrize("block", [64, 128, "head", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_quantized_values_are_what_torch_rounds_to(block, dtype):
    (x,) = tensors((2, 150, 3, 16), dtype=dtype)
    out, scale = tessera.quantize_fp8(x, block=block)
    assert out.dtype == torch.float8_e4m3fn and torch.equal(scale, torch.exp2(torch.round(torch.log2(scale))))
    rows = scale.repeat_interleave(block, 2)[:, :, :150] if isinstance(block, int) else scale
    quotient = x.float() / rows.transpose(1, 2).unsqueeze(-1)
    assert quotient.abs().max() <= 448
    assert torch.equal(out.view(torch.uint8), quotient.to(torch.float8_e4m3fn).view(torch.uint8))


def test_fp8_matches_attention_of_the_rounded_values_and_so_do_its_gradients():
    q, k, v = (t.requires_grad_() for t in tensors((2, 150, 4, 32), (2, 200, 2, 32), (2, 200, 2, 16)))
    options = dict(causal="bottom_right", return_lse=True)
    out, lse = tessera.attention(q, k, v, precision="fp8", **options)
    rounded = [_fp8.dequantize_fp8(*tessera.quantize_fp8(t, block="head"), t.dtype).requires_grad_() for t in (q, k, v)]
    want, want_lse = tessera.attention(*rounded, **options)
    torch.testing.assert_close(out, want, atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse, want_lse, atol=1e-2, rtol=1e-3)
    dout = torch.randn_like(out)
    torch.autograd.backward((out, lse), (dout, lse.detach()))
    torch.autograd.backward((want, want_lse), (dout, want_lse.detach()))
    for t, r in zip((q, k, v), rounded):
        torch.testing.assert_close(t.grad, r.grad, atol=0.05, rtol=0.05)


def test_packed_sequences_have_blocks_of_their_own():
    q, k, v = tensors((180, 2, 32), (180, 2, 32), (180, 2, 32))
    cu = torch.tensor([0, 130, 130, 180], dtype=torch.int32)
    packed = dict(cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=130, max_seqlen_k=130)
    out = tessera.attention(q, k, v, precision="fp8", **packed)
    for begin, end in ((0, 130), (130, 180)):
        alone = tessera.attention(*(t[None, begin:end] for t in (q, k, v)), precision="fp8")
        torch.testing.assert_close(out[begin:end], alone[0])
    for t, scale in (tessera.quantize_fp8(x, cu_seqlens=cu, max_seqlen=130) for x in (q, k)):
        values = _fp8.dequantize_fp8(t, scale, torch.float32, cu)
        assert values.shape == t.shape and values.isfinite().all()


def test_truncated_sums_are_only_the_tensor_cores():
    q, k, v = (t.requires_grad_() for t in tensors((1, 8, 2, 16), (1, 1100, 1, 16), (1, 1100, 1, 16)))
    results = []
    for precision in ("fp8", "fp8_fast"):
        out = tessera.attention(q, k, v, precision=precision)
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_refusals_name_the_argument():
    q, k, v = tensors((1, 8, 1, 16), (1, 8, 1, 16), (1, 8, 1, 16))
    with pytest.raises(tessera.Error, match="precision is 'fp4'"):
        tessera.attention(q, k, v, precision="fp4")
    with pytest.raises(tessera.Error, match="fp8_residual has no gradient"):
        tessera.attention(q.requires_grad_(), k, v, precision="fp8_residual")
    q = q.detach()
    with pytest.raises(tessera.Error, match="block is 32"):
        tessera.quantize_fp8(q, block=32)
    with pytest.raises(tessera.Error, match="max_seqlen is None"):
        tessera.quantize_fp8(q[0], cu_seqlens=torch.tensor([0, 8], dtype=torch.int32))
    with pytest.raises(tessera.Error, match="attention_chunk is 4"):
        tessera.attention(q, k, v, precision="fp8", attention_chunk=4)


def test_rows_behind_the_last_sequence_have_factor_1():
    (x,) = tensors((300, 2, 16), dtype=torch.float32)
    cu = torch.tensor([0, 0, 140, 140, 200], dtype=torch.int32)
    out, scale = tessera.quantize_fp8(x * 1e3, cu_seqlens=cu, max_seqlen=140)
    assert (scale[3] > 1).any()
    out[200:] = x[200:].to(out.dtype)
    values = _fp8.dequantize_fp8(out, scale, torch.float32, cu)
    assert torch.equal(values[200:], out[200:].float())
    for s, (begin, end) in enumerate(((0, 0), (0, 140), (140, 140), (140, 200))):
        rows = scale[s].repeat_interleave(128, 1)[:, : end - begin].T.unsqueeze(-1)
        assert torch.equal(values[begin:end], out[begin:end].float() * rows)


def test_fp8_has_the_guards_of_attention():
    q, k, v = (t.requires_grad_() for t in tensors((1, 8, 1, 16), (1, 8, 1, 16), (1, 8, 1, 16)))
    fp8 = dict(precision="fp8")
    with pytest.raises(tessera.Error, match="alibi requires a gradient"):
        tessera.attention(q, k, v, alibi=torch.ones(1, requires_grad=True), **fp8)
    with pytest.raises(tessera.Error, match="q is a list"):
        tessera.attention([], k, v, **fp8)
    (dq,) = torch.autograd.grad(tessera.attention(q, k, v, **fp8).sum(), q, create_graph=True)
    with pytest.raises(tessera.Error, match="second derivative"):
        torch.autograd.grad(dq.sum() + q.sum(), q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q.detach(), torch.ones_like(q))
        with pytest.raises(tessera.Error, match="forward-mode"):
            tessera.attention(dual, k, v, **fp8)


def test_fp8_follows_autocast_and_deterministic_algorithms(monkeypatch):
    q, k, v = (t.requires_grad_() for t in tensors(*((1, 8, 1, 16),) * 3, dtype=torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out = tessera.attention(q, k, v, precision="fp8")
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32
    flags = []
    right = _ops.backward
    monkeypatch.setattr(_ops, "backward", lambda *args: flags.append(args[6][2]) or right(*args))
    for on in (False, True):
        torch.use_deterministic_algorithms(on)
        try:
            tessera.attention(q, k, v, precision="fp8").sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert [bool(f & _ops.DETERMINISTIC) for f in flags] == [False, True]


def test_fp8_takes_lengths_that_are_tensors():
    q, k, v = tensors(*((8, 1, 16),) * 3)
    cu = torch.tensor([0, 5, 8], dtype=torch.int32)
    run = lambda n: tessera.attention(  # noqa: E731
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n, max_seqlen_k=n, precision="fp8"
    )
    assert torch.equal(run(5), run(torch.tensor(5)))
    q.requires_grad_()
    run(2048).sum().backward()  # a bound above the number of rows, as the 16-bit forward takes it
    assert q.grad.isfinite().all()


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def test_precisions_keep_what_they_promise_of_an_outlier_channel():
    q, k, v = tensors((1, 300, 4, 64), (1, 400, 2, 64), (1, 400, 2, 64))
    k[..., 5] *= 30
    want = tessera.attention(q.double().float(), k.float(), v.float()).double()
    errors = {p: relative_error(tessera.attention(q, k, v, precision=p), want) for p in _PRECISIONS}
    assert errors["fp8_residual"] < errors["fp8"] / 2 and errors["fp8_residual"] < 0.07
    q[..., 5] *= 10  # the same channel of q: a rotation spreads both
    want = tessera.attention(q.float(), k.float(), v.float()).double()
    errors = {p: relative_error(tessera.attention(q, k, v, precision=p), want) for p in _PRECISIONS}
    assert errors["fp8_rotated"] < errors["fp8"] and errors["fp8_residual"] < errors["fp8"] / 2


def test_rotated_gradients_are_those_of_the_rounded_values():
    q, k, v = (t.requires_grad_() for t in tensors((2, 50, 4, 48), (2, 60, 2, 48), (2, 60, 2, 16)))
    out = tessera.attention(q, k, v, precision="fp8_rotated")
    values = [_fp8._rounded(t.detach(), None, 0, f).requires_grad_() for t, f in zip((q, k, v), (32, 32, 0))]
    want = tessera.attention(*values)
    torch.testing.assert_close(out, want, atol=0.03, rtol=0.03)
    dout = torch.randn_like(out)
    out.backward(dout)
    want.backward(dout)
    for t, r in zip((q, k, v), values):
        torch.testing.assert_close(t.grad, r.grad, atol=0.05, rtol=0.05)


def test_a_tuple_of_precisions_says_if_the_first_is_not_served(monkeypatch):
    q, k, v = tensors(*((1, 8, 1, 16),) * 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first = tessera.attention(q, k, v, precision=("fp8", None))
    assert torch.equal(first, tessera.attention(q, k, v, precision="fp8"))
    right = tessera._native.forward_if_plain

    def refuses_fp8(*args):
        if args[-1] == "fp8":  # precision
            raise tessera.Error("no kernel", "unsupported")
        return right(*args)

    monkeypatch.setattr(tessera._native, "forward_if_plain", refuses_fp8)
    with pytest.warns(RuntimeWarning, match="precision='fp8' is not served, None is used: no kernel"):
        out = tessera.attention(q, k, v, precision=("fp8", None))
    assert torch.equal(out, tessera.attention(q, k, v))
    with pytest.raises(tessera.Error, match="no kernel"):
        tessera.attention(q, k, v, precision=("fp8",))


def test_a_tuple_of_precisions_passes_over_one_without_a_gradient():
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="precision='fp8_residual' is not served, 'fp8' is used"):
        out = tessera.attention(q, q, q, precision=("fp8_residual", "fp8"))
    assert torch.equal(out, tessera.attention(q, q, q, precision="fp8"))


def test_explain_takes_a_precision():
    q = torch.empty(1, 256, 2, 128, dtype=torch.bfloat16, device="meta")
    answer = tessera.explain(q, q, q, precision="fp8", arch="sm_90a", format="json")
    assert answer["chosen"]["kernel"] == "attention_forward_fp8_sm90" and answer["fields"]["rounds_to_fp8"]
    with pytest.raises(tessera.Error, match="precision is 'fp8', which tessera.decode does not take"):
        tessera.explain(q, q, q, precision="fp8", op="decode", arch="sm_90a")
