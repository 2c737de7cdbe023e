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
