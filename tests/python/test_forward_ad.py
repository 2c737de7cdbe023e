"""Forward-mode AD: no kernel computes tangents, so every way to give one must raise."""

import pytest
import torch
from reference import qkv
from torch.autograd import forward_ad

import tessera
from tessera import flash_attn

PLAIN_OPTIONS = (0.0, 0.0, 0, 0, -1, -1, 0, 0, 0)
FORWARD_MODE_CALLS = {
    "attention": tessera.attention,
    "return_lse": lambda q, k, v: tessera.attention(q, k, v, return_lse=True)[1],
    "sdpa": tessera.sdpa,
    "decode": tessera.decode,
    "operator": lambda q, k, v: torch.ops.tessera.attention(q, k, v, None, None, None, *PLAIN_OPTIONS)[0],
    "decode operator": lambda q, k, v: torch.ops.tessera.decode(q, k, v, *(None,) * 8, *PLAIN_OPTIONS)[0],
    "flash_attn": lambda q, k, v: flash_attn.flash_attn_func(q, k, v),
}


def refuses_tangents():
    return pytest.raises(RuntimeError, match="forward-mode AD")


@pytest.mark.parametrize("name", FORWARD_MODE_CALLS)
@pytest.mark.parametrize("which", range(3))
def test_jvp_is_refused(name, which):
    inputs = list(qkv(hkv=4, device="cpu", dtype=torch.float32))

    def call(tensor):
        inputs[which] = tensor
        return FORWARD_MODE_CALLS[name](*inputs)

    with refuses_tangents():
        torch.func.jvp(call, (inputs[which],), (torch.randn_like(inputs[which]),))


@pytest.mark.parametrize("name", FORWARD_MODE_CALLS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
def test_dual_tensors_are_refused(name, grad, recorded):
    q, k, v = qkv(hkv=4, device="cpu", dtype=torch.float32, grad=grad)
    with forward_ad.dual_level(), torch.set_grad_enabled(recorded), refuses_tangents():
        FORWARD_MODE_CALLS[name](q, forward_ad.make_dual(k, torch.randn_like(k)), v)


@pytest.mark.parametrize("name", ["attention", "sdpa", "decode", "operator"])
def test_jacfwd_and_hessian_are_refused(name):
    q, k, v = qkv(b=1, sq=3, hq=1, hkv=1, d=8, device="cpu", dtype=torch.float32)
    call = lambda t: FORWARD_MODE_CALLS[name](t, k, v)  # noqa: E731
    with pytest.raises(RuntimeError, match="forward-mode AD|no vmap rule"):
        torch.func.jacfwd(call)(q)
    if name in ("attention", "sdpa"):
        with pytest.raises(RuntimeError, match="forward-mode AD|no vmap rule"):
            torch.func.hessian(lambda t: call(t).sum())(q)
        with refuses_tangents():  # forward over reverse
            torch.func.jvp(torch.func.grad(lambda t: call(t).square().sum()), (q,), (torch.ones_like(q),))


def test_tangents_of_slopes_are_refused():
    q, k, v = qkv(device="cpu", dtype=torch.float32)
    slopes = torch.rand(q.shape[2])
    call = lambda alibi: tessera.attention(q, k, v, alibi=alibi)  # noqa: E731
    with forward_ad.dual_level(), refuses_tangents():
        call(forward_ad.make_dual(slopes, torch.ones_like(slopes)))
    with refuses_tangents():
        torch.func.jvp(call, (slopes,), (torch.ones_like(slopes),))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("call", [tessera.attention, FORWARD_MODE_CALLS["operator"]])
def test_a_dual_gradient_is_refused(create_graph, call):
    q, k, v = qkv(device="cpu", dtype=torch.float32, grad=True)
    out = call(q, k, v)
    with forward_ad.dual_level(), refuses_tangents():
        dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        torch.autograd.grad(out, q, dout, create_graph=create_graph)


def test_a_dual_level_without_tangents_changes_nothing(device, dtype):
    inputs = qkv(device=device, dtype=dtype, grad=True)
    dout = torch.randn_like(inputs[0])
    call = lambda: tessera.attention(*inputs, causal=True, deterministic=True)  # noqa: E731
    want = (call(), *torch.autograd.grad(call(), inputs, dout))
    with forward_ad.dual_level():
        got = (call(), *torch.autograd.grad(call(), inputs, dout))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_forward_mode_is_refused_in_a_graph(backend):
    q, k, v = qkv(device="cpu", dtype=torch.float32)
    tangent = torch.randn_like(q)
    call = lambda t: tessera.attention(t, k, v)  # noqa: E731
    torch.compiler.reset()
    with refuses_tangents():
        torch.compile(lambda t, d: torch.func.jvp(call, (t,), (d,))[1], backend=backend)(q, tangent)
    torch.compiler.reset()
    with forward_ad.dual_level(), refuses_tangents():
        torch.compile(call, backend=backend)(forward_ad.make_dual(q, tangent))
