"""tessera.linear_cross_entropy: values and gradients against PyTorch, fake tensors and torch.compile."""

import pytest
import torch
import torch.nn.functional as F

import tessera
from tessera import _cross_entropy

EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def problem(dtype, shape=(3, 7), width=16, classes=29, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, width, generator=generator).to(dtype)
    weight = (torch.randn(classes, width, generator=generator) / 2).to(dtype)
    target = torch.randint(classes, shape, generator=generator)
    target.flatten()[::4] = -100
    return hidden, weight, target


def expected(hidden, weight, target, reduction="mean", **options):
    logits = F.linear(hidden.double(), weight.double())
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction=reduction, **options)
    return loss.reshape(target.shape) if reduction == "none" else loss


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_losses_and_gradients_are_those_of_pytorch(dtype, reduction):
    hidden, weight, target = problem(dtype)
    given = hidden.requires_grad_(), weight.requires_grad_()
    own = tessera.linear_cross_entropy(*given, target, reduction=reduction)
    want = expected(*given, target, reduction)
    assert own.dtype == torch.float32 and own.shape == want.shape
    # Logits up to about 8 are rounded to the type.
    torch.testing.assert_close(own.double(), want, rtol=1e-5, atol=8 * EPSILON[dtype])
    dout = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(torch.autograd.grad(own, given, dout), torch.autograd.grad(want, given, dout.double())):
        assert mine.dtype == dtype
        assert (mine.double() - theirs.double()).abs().max() <= 16 * EPSILON[dtype] * theirs.double().abs().max()


def test_only_the_gradients_that_are_needed_are_made():
    hidden, weight, target = problem(torch.float32)
    for needed in ((True, False), (False, True)):
        given = [t.clone().requires_grad_(one) for t, one in zip((hidden, weight), needed)]
        tessera.linear_cross_entropy(*given, target).backward()
        want = torch.autograd.grad(expected(*given, target), given[needed.index(True)])[0]
        torch.testing.assert_close(given[needed.index(True)].grad, want, rtol=1e-4, atol=1e-6)
        assert given[needed.index(False)].grad is None
    with torch.no_grad():
        torch.testing.assert_close(
            tessera.linear_cross_entropy(hidden.requires_grad_(), weight, target).double(),
            expected(hidden, weight, target),
            rtol=1e-5,
            atol=1e-6,
        )


def test_targets_are_ignored():
    hidden, weight, target = problem(torch.float32)
    hidden.requires_grad_()
    target[target == -100] = 3
    own = tessera.linear_cross_entropy(hidden, weight, target, ignore_index=3)
    torch.testing.assert_close(own.double(), expected(hidden, weight, target, ignore_index=3), rtol=1e-5, atol=1e-6)
    for nothing in (torch.full_like(target, -100), torch.full_like(target, 1 << 40)):
        own = tessera.linear_cross_entropy(hidden, weight, nothing)
        (gradient,) = torch.autograd.grad(own, hidden)
        assert own == 0 and (gradient == 0).all()


def test_large_logits_give_finite_losses_and_gradients():
    hidden, weight, target = problem(torch.float32)
    hidden = (hidden * 1e4).requires_grad_()
    loss = tessera.linear_cross_entropy(hidden, weight, target)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(hidden.grad).all()
    torch.testing.assert_close(loss.double(), expected(hidden, weight, target), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", EPSILON)
def test_a_second_backward_and_a_second_gradient_raise(dtype):
    hidden, weight, target = problem(dtype)
    loss = tessera.linear_cross_entropy(hidden.requires_grad_(), weight, target)
    loss.backward(retain_graph=True)
    with pytest.raises(tessera.Error, match="in place"):
        loss.backward()
    loss = tessera.linear_cross_entropy(hidden, weight, target)
    with pytest.raises(tessera.Error, match="second gradient"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_errors_name_the_argument():
    hidden, weight, target = problem(torch.float32)
    with pytest.raises(tessera.Error, match="reduction is 'max'"):
        tessera.linear_cross_entropy(hidden, weight, target, reduction="max")
    with pytest.raises(tessera.Error, match="target"):
        tessera.linear_cross_entropy(hidden, weight, target[:-1])
    with pytest.raises(tessera.Error, match="integers are accepted"):
        tessera.linear_cross_entropy(hidden, weight, target.float())
    with pytest.raises(tessera.Error, match="weight has size 15 in dim 1; 16 is expected"):
        tessera.linear_cross_entropy(hidden, weight[:, 1:].contiguous(), target)


def test_opcheck():
    hidden, weight, target = problem(torch.float32, shape=(6,))
    labels = target.to(torch.int32)
    for reduction in (0, 1, 2):
        torch.library.opcheck(
            torch.ops.tessera.linear_cross_entropy,
            (hidden.clone().requires_grad_(), weight.clone().requires_grad_(), labels, reduction, True, True),
        )
    torch.library.opcheck(
        torch.ops.tessera.linear_cross_entropy_backward, (torch.randn(6), hidden, weight, labels, True, True)
    )


def test_compiles_without_a_graph_break():
    hidden, weight, target = problem(torch.float32)
    weight.requires_grad_()
    run = lambda h, w, t: tessera.linear_cross_entropy(h * 2, w, t) * 3  # noqa: E731
    loss = torch.compile(run, fullgraph=True, backend="aot_eager")(hidden, weight, target)
    want = run(hidden, weight, target)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(torch.autograd.grad(loss, weight), torch.autograd.grad(want, weight))


def test_fp16_sums_over_many_rows_do_not_overflow():
    hidden = torch.full((4096, 4), 32.0, dtype=torch.float16, requires_grad=True)
    weight = torch.zeros(64, 4, dtype=torch.float16, requires_grad=True)
    target = torch.zeros(4096, dtype=torch.long)
    given = hidden, weight
    own = torch.autograd.grad(tessera.linear_cross_entropy(*given, target), given)
    want = torch.autograd.grad(expected(*given, target), given)
    for mine, theirs in zip(own, want):
        torch.testing.assert_close(mine.double(), theirs.double(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("narrow", (torch.int8, torch.uint8, torch.int16, torch.int32))
def test_targets_may_be_of_any_integer_type(narrow):
    hidden, weight, target = problem(torch.float32, classes=300)
    target = target.clamp(0, 99)
    own = tessera.linear_cross_entropy(hidden, weight, target.to(narrow), ignore_index=-200)
    torch.testing.assert_close(own.double(), expected(hidden, weight, target), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("missing", ((), ("_unscale_",), ("_unscale_", "_foreach_mul_")))
def test_gradients_are_scaled_in_place_and_in_fp32(dtype, missing, monkeypatch):
    for symbol in missing:
        monkeypatch.setattr(_cross_entropy, symbol, None)
    gradient, scale = torch.randn(50, 40).to(dtype), torch.tensor(1 / 3)
    rounded = scale.to(dtype) if missing == ("_unscale_",) and dtype == torch.bfloat16 else scale
    want = (gradient.float() * rounded).to(dtype)
    assert _cross_entropy._scale_in_place(gradient, scale) is gradient
    assert torch.equal(gradient, want)


@pytest.mark.parametrize("dtype", EPSILON)
def test_a_second_backward_raises_with_saved_tensor_hooks(dtype):
    hidden, weight, target = problem(dtype)
    kept = []

    def pack(tensor):
        kept.append(tensor.detach())
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        loss = tessera.linear_cross_entropy(hidden.requires_grad_(), weight, target)
    (loss * 3).backward(retain_graph=True)
    with pytest.raises(tessera.Error, match="in place"):
        (loss * 3).backward()
