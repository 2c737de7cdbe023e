"""tessera.moe beside a composition of PyTorch's own functions, and as an operator."""

import pytest
import torch
import torch.nn.functional as F

import tessera

E, K, H, TOP_K = 6, 10, 12, 2


def moe_tensors(gated=True, m=24, dtype=torch.float32):
    torch.manual_seed(0)
    given = {
        "x": torch.randn(m, K),
        "logits": torch.randn(m, E),
        "up": torch.randn(E, H, K) / K**0.5,
        "down": torch.randn(E, K, H) / H**0.5,
    }
    if gated:
        given["gate"] = torch.randn(E, H, K) / K**0.5
    return {name: t.to(dtype) for name, t in given.items()}


def plain_experts(x, experts, weights, up, down, gate=None):
    out = torch.zeros_like(x)
    for e in range(up.shape[0]):
        token, j = torch.where(experts == e)
        rows = x[token]
        hidden = F.silu(rows @ up[e].T) if gate is None else (rows @ up[e].T) * F.silu(rows @ gate[e].T)
        out = out.index_add(0, token, (hidden @ down[e].T) * weights[token, j, None])
    return out


def plain_moe(x, logits, up, down, gate=None, scoring="softmax", normalize=True):
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    weights, experts = scores.topk(TOP_K, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    shares = scores / scores.sum(-1, keepdim=True)
    counts = F.one_hot(experts, E).sum((0, 1)).to(x.dtype)
    loss = E * (counts / len(x) * shares.mean(0)).sum()
    return plain_experts(x, experts, weights, up, down, gate), loss


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_moe_and_its_gradients_are_those_of_pytorch(scoring, normalize, gated, recompute):
    given = {name: t.requires_grad_() for name, t in moe_tensors(gated).items()}
    options = {"scoring": scoring, "normalize": normalize}
    out, loss = tessera.moe(**given, **options, top_k=TOP_K, balance_loss=True, recompute=recompute)
    want, want_loss = plain_moe(**given, **options)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-6)
    direction = torch.randn_like(out)
    got = torch.autograd.grad((out * direction).sum() + 0.3 * loss, list(given.values()))
    expected = torch.autograd.grad((want * direction).sum() + 0.3 * want_loss, list(given.values()))
    for name, a, b in zip(given, got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5, msg=lambda text: f"{name}: {text}")


def test_moe_takes_experts_that_were_chosen_elsewhere_and_skips_those_that_there_are_not():
    given = moe_tensors()
    del given["logits"]
    experts = torch.randint(0, E, (24, 3))
    weights = torch.rand(24, 3, requires_grad=True)
    out = tessera.moe(given.pop("x"), None, **given, experts=experts, weights=weights)
    x = moe_tensors()["x"]
    want = plain_experts(x, experts, weights, **given)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(out.sum(), weights)[0], torch.autograd.grad(want.sum(), weights)[0], rtol=1e-4, atol=1e-5
    )
    kept = weights.detach() * (experts != 2)
    for none in (E, -1, 1 << 32, -(1 << 32)):
        torch.testing.assert_close(
            tessera.moe(x, None, **given, experts=torch.where(experts == 2, none, experts), weights=weights.detach()),
            plain_experts(x, experts, kept, **given),
            rtol=1e-4,
            atol=1e-5,
        )
    torch.testing.assert_close(
        tessera.moe(x, None, **given, experts=experts.to(torch.uint8), weights=weights), want, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bool))
def test_chosen_experts_must_be_integers(dtype):
    given = moe_tensors() | {"logits": None}
    with pytest.raises(tessera.Error, match=f"experts is {dtype}; integers are accepted"):
        tessera.moe(**given, experts=torch.zeros(24, 3, dtype=dtype), weights=torch.rand(24, 3))


def test_ties_go_to_the_lowest_expert():
    given = moe_tensors()
    given["logits"] = torch.zeros_like(given["logits"])
    experts = torch.tensor([[0, 1]]).expand(24, 2)
    want = plain_experts(given["x"], experts, torch.full((24, 2), 0.5), given["up"], given["down"], given["gate"])
    torch.testing.assert_close(tessera.moe(**given, top_k=2), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_moe_and_its_gradients_are_close_to_fp64(half, device):
    given = {name: t.to(device).requires_grad_() for name, t in moe_tensors(dtype=half).items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    want, want_loss = plain_moe(**exact)
    out, loss = tessera.moe(**given, top_k=TOP_K, balance_loss=True)
    direction = torch.randn_like(out)
    got = torch.autograd.grad((out * direction).sum() + loss, list(given.values()))
    expected = torch.autograd.grad((want * direction).sum() + want_loss, list(exact.values()))
    for a, b in zip((out, loss, *got), (want, want_loss, *expected)):
        assert ((a.double() - b).norm() / b.norm()).item() < 2e-2
    fp32_logits = tessera.moe(**{**given, "logits": given["logits"].float()}, top_k=TOP_K)
    torch.testing.assert_close(fp32_logits, out)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_graph_follows_the_routing():
    device = "cuda"
    given = {name: t.to(device) for name, t in moe_tensors(dtype=torch.bfloat16).items()}
    tessera.moe(**given, top_k=TOP_K)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tessera.moe(**given, top_k=TOP_K)
    for shift in range(3):
        given["logits"].copy_(given["logits"].roll(shift, dims=-1))
        graph.replay()
        torch.testing.assert_close(out, tessera.moe(**given, top_k=TOP_K), rtol=0, atol=0)


def test_moe_computes_only_the_gradients_that_are_needed():
    given = moe_tensors()
    given["x"].requires_grad_()
    shaped = {"x": given["x"].reshape(2, 12, K), "logits": given["logits"].reshape(2, 12, E)}
    tessera.moe(**given | shaped, top_k=2).sum().backward()
    want = torch.autograd.grad(plain_moe(**given)[0].sum(), given["x"])[0]
    torch.testing.assert_close(given["x"].grad, want, rtol=1e-4, atol=1e-5)


def test_errors_of_moe_name_the_argument():
    given = moe_tensors()
    with pytest.raises(tessera.Error, match="top_k is None"):
        tessera.moe(**given)
    for top_k in (0, -1, 7, 10**30):
        with pytest.raises(tessera.Error, match=f"top_k is {top_k}; 1 to the number of experts is accepted, which is {E}"):
            tessera.moe(**given, top_k=top_k)
    with pytest.raises(tessera.Error, match="either logits"):
        tessera.moe(**{**given, "logits": None}, top_k=2)
    with pytest.raises(tessera.Error, match="down is"):
        tessera.moe(**{**given, "down": given["down"][:, :-1].contiguous()}, top_k=2)
    with pytest.raises(tessera.Error, match="scoring"):
        tessera.moe(**given, top_k=2, scoring="relu")
    x = torch.randn(2, 3, given["x"].shape[-1])
    given |= {"x": x, "logits": None, "experts": torch.zeros(2, 3, 2, dtype=torch.int32)}
    with pytest.raises(tessera.Error, match=r"weights is \[3, 2, 2\], but x is"):  # as many as x has, in another order
        tessera.moe(**given, weights=torch.rand(3, 2, 2))
    with pytest.raises(tessera.Error, match="top_k is 3, experts is"):
        tessera.moe(**given, weights=torch.rand(2, 3, 2), top_k=3)
    with pytest.raises(tessera.Error, match=r"weights is \[2, 6\]"):
        tessera.moe(**given, weights=torch.rand(2, 6))
    with pytest.raises(tessera.Error, match=f"top_k is 0; 1 to the number of experts is accepted, which is {E}"):
        tessera.moe(**{**given, "experts": given["experts"][..., :0]}, weights=torch.rand(2, 3, 0))


@pytest.mark.parametrize("gated", [False, True])
def test_opcheck_of_moe(gated):
    given = {name: t.requires_grad_() for name, t in moe_tensors(gated).items()}
    tensors = [given.get(name) for name in ("x", "logits", "up", "down", "gate")]
    torch.library.opcheck(torch.ops.tessera.moe, (*tensors, None, None, 2, 2, 0, 1, True, True))


def test_moe_compiles_without_a_graph_break():
    given = moe_tensors()
    compiled = torch.compile(lambda **t: tessera.moe(**t, top_k=2), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**given), tessera.moe(**given, top_k=2))
