"""tessera.gmm_nll: values and gradients against PyTorch's distributions, fake tensors and torch.compile."""

import pytest
import torch

import tessera

EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def mixture(dtype, shape=(3, 5), components=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    params = torch.randn(*shape, components, 3, generator=generator).to(dtype)
    return params, torch.randn(*shape, generator=generator)


def expected(params, target):
    logits, mu, log_sigma = params.double().unbind(-1)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=logits), torch.distributions.Normal(mu, log_sigma.exp())
    )
    return -mixture.log_prob(target.double())


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_losses_and_gradients_are_those_of_pytorch(dtype, reduction):
    params, target = mixture(dtype)
    params.requires_grad_()
    own = tessera.gmm_nll(params, target, reduction)
    each = expected(params, target)
    want = each if reduction == "none" else getattr(each, reduction)()
    assert own.dtype == torch.float32 and own.shape == want.shape
    torch.testing.assert_close(own.double(), want, rtol=1e-5, atol=1e-5)
    dout = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    (mine,) = torch.autograd.grad(own, params, dout)
    (theirs,) = torch.autograd.grad(want, params, dout.double())
    assert mine.dtype == dtype
    assert (mine.double() - theirs.double()).abs().max() <= 8 * EPSILON[dtype] * theirs.double().abs().max()


def test_far_targets_and_extreme_sigmas_give_finite_losses_and_gradients():
    params, target = mixture(torch.float32)
    for log_sigma, far in ((0.0, 1e4), (-80.0, 1.0), (80.0, 1.0), (-80.0, 1e30)):
        hostile = params.clone()
        hostile[..., 2] = log_sigma
        hostile.requires_grad_()
        loss = tessera.gmm_nll(hostile, target + far)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(hostile.grad).all()


def test_one_mixture_may_be_without_leading_dims():
    params, target = torch.randn(5, 3, requires_grad=True), torch.randn(())
    for reduction in ("mean", "sum", "none"):
        loss = tessera.gmm_nll(params, target, reduction)
        assert loss.shape == () and torch.equal(loss, tessera.gmm_nll(params[None], target[None], "sum"))
        loss.backward()


def test_nothing_is_saved_without_a_gradient():
    params, target = mixture(torch.float32)
    out, dparams = torch.ops.tessera.gmm_nll(params.flatten(0, 1), target.flatten(), 1, False)
    assert dparams.numel() == 0
    torch.testing.assert_close(out[0], tessera.gmm_nll(params, target))


def test_errors_name_the_argument():
    params, target = mixture(torch.float32)
    with pytest.raises(tessera.Error, match="reduction is 'max'"):
        tessera.gmm_nll(params, target, "max")
    with pytest.raises(tessera.Error, match="target"):
        tessera.gmm_nll(params, target[:-1])
    with pytest.raises(tessera.Error, match="params has 0 components"):
        tessera.gmm_nll(params[..., :0, :], target)
    with pytest.raises(tessera.Error, match="params has size 2 in dim 2"):
        tessera.gmm_nll(params[..., :2].contiguous(), target)
    with pytest.raises(tessera.Error, match="no gradient for target"):
        tessera.gmm_nll(params.requires_grad_(), target.requires_grad_()).backward()


def test_opcheck():
    params, target = mixture(torch.float32, shape=(6,), components=3)
    for reduction in (0, 1):
        torch.library.opcheck(torch.ops.tessera.gmm_nll, (params.clone().requires_grad_(), target, reduction, True))


def test_compiles_without_a_graph_break():
    params, target = mixture(torch.float32)
    compiled = torch.compile(lambda p, t: tessera.gmm_nll(p * 2, t) * 3, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(params, target), tessera.gmm_nll(params * 2, target) * 3)


def heads(dtype, components=10, hidden=12, width=8, shape=(3, 5)):
    generator = torch.Generator().manual_seed(2)

    def normal(*dims):
        return torch.randn(*dims, generator=generator).to(dtype)

    return normal(*shape, width), normal(components, hidden, width), normal(components, 3, hidden) / 4, normal(*shape).float()


def expected_of_heads(x, up, down, target):
    hidden = torch.nn.functional.silu(torch.einsum("...c,khc->...kh", x.double(), up.double()))
    return expected(torch.einsum("...kh,koh->...ko", hidden, down.double()), target)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_the_likelihood_of_mlps_and_its_gradients_are_those_of_pytorch(dtype, reduction):
    *leaves, target = heads(dtype)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    own = tessera.mlp_gmm_nll(*leaves, target, reduction)
    each = expected_of_heads(*leaves, target)
    want = each if reduction == "none" else getattr(each, reduction)()
    assert own.dtype == torch.float32 and own.shape == want.shape
    close = 16 * EPSILON[dtype]
    torch.testing.assert_close(own.double(), want, rtol=close, atol=close)
    dout = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    mine = torch.autograd.grad(own, leaves, dout)
    theirs = torch.autograd.grad(want, leaves, dout.double())
    for a, b in zip(mine, theirs):
        assert a.dtype == dtype
        assert (a.double() - b.double()).norm() <= 16 * EPSILON[dtype] * b.double().norm()


def test_the_likelihood_of_mlps_without_a_gradient_and_its_errors():
    x, up, down, target = heads(torch.float32)
    own = tessera.mlp_gmm_nll(x, up, down, target)
    torch.testing.assert_close(own, tessera.gmm_nll(tessera.grouped_mlp(x[..., None, :], up, down), target))
    relu = tessera.mlp_gmm_nll(x, up, down, target, "sum", activation="relu")
    apart = tessera.gmm_nll(tessera.grouped_mlp(x[..., None, :], up, down, activation="relu"), target, "sum")
    torch.testing.assert_close(relu, apart)
    with pytest.raises(tessera.Error, match="reduction is 'max'"):
        tessera.mlp_gmm_nll(x, up, down, target, "max")
    with pytest.raises(tessera.Error, match="down"):
        tessera.mlp_gmm_nll(x, up, down[:, :2], target)
    with pytest.raises(tessera.Error, match="up is a NoneType"):
        tessera.mlp_gmm_nll(x, None, down, target)
    with pytest.raises(tessera.Error, match="target"):
        tessera.mlp_gmm_nll(x, up, down, target[:-1])
    with pytest.raises(tessera.Error, match="no gradient for target"):
        tessera.mlp_gmm_nll(x, up.requires_grad_(), down, target.requires_grad_()).backward()


def test_the_likelihood_of_mlps_compiles_and_takes_transforms_and_autocast():
    x, up, down, target = heads(torch.float32, components=3, shape=(6,))

    def loss(d):
        return tessera.mlp_gmm_nll(x, up, d * 2, target) * 3

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(down), loss(down))
    leaf = down.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(down), want)
    with torch.autocast("cpu", torch.bfloat16):
        rough = tessera.mlp_gmm_nll(x, up, down, target)
    torch.testing.assert_close(rough, tessera.mlp_gmm_nll(x, up, down, target), rtol=0.05, atol=0.05)
