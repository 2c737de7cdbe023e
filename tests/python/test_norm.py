"""tessera.rms_norm, layer_norm and rotary: values against fp64, gradients, fake tensors and torch.compile."""

import itertools
import re

import pytest
import torch

import tessera

EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def tensors(dtype, rows=11, width=37, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    return make(rows, width), make(width), make(width), make(rows, width)


def expected(x, weight, bias, residual, eps, centered):
    h = x if residual is None else x + residual
    wide = h.double()
    if centered:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    return y + bias.double() if centered else y


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("centered", (False, True))
def test_norms_are_close_to_fp64(dtype, centered):
    x, weight, bias, residual = tensors(dtype)
    if centered:
        out, total = tessera.layer_norm(x, weight, bias, residual, eps=1e-3)
    else:
        out, total = tessera.rms_norm(x, weight, residual, eps=1e-3)
    want = expected(x, weight, bias, residual, 1e-3, centered)
    assert out.dtype == dtype and torch.equal(total, x + residual)
    assert (out.double() - want).abs().max() <= 2 * EPSILON[dtype] * want.abs().max()


@pytest.mark.parametrize("centered", (False, True))
@pytest.mark.parametrize("with_residual", (False, True))
def test_gradients_are_those_of_pytorch(centered, with_residual):
    x, weight, bias, residual = (t.requires_grad_() for t in tensors(torch.float32))
    dout, dsum = (torch.randn(11, 37, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    given = [x, weight] + ([bias] if centered else []) + ([residual] if with_residual else [])
    added = residual if with_residual else None
    own = tessera.layer_norm(x, weight, bias, added) if centered else tessera.rms_norm(x, weight, added, eps=1e-5)
    reference = expected(x, weight, bias, added, 1e-5, centered).float()
    if with_residual:
        mine = torch.autograd.grad(own, given, (dout, dsum))
        theirs = torch.autograd.grad((reference, x + residual), given, (dout, dsum))
    else:
        mine = torch.autograd.grad(own, given, dout)
        theirs = torch.autograd.grad(reference, given, dout)
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_leading_dims_are_kept_and_the_weight_may_be_left_out():
    x = torch.randn(2, 3, 5, 16)
    torch.testing.assert_close(tessera.rms_norm(x), torch.nn.functional.rms_norm(x, (16,), eps=1e-6))
    torch.testing.assert_close(tessera.layer_norm(x), torch.nn.functional.layer_norm(x, (16,)))


def test_a_residual_that_alone_has_a_gradient():
    x, weight, _, residual = (t.requires_grad_() for t in tensors(torch.float32))
    out, total = tessera.rms_norm(x, weight, residual)
    (dx,) = torch.autograd.grad(total.sum(), x)
    torch.testing.assert_close(dx, torch.ones_like(x))


def rotated(x, cos, sin, interleaved):
    half = cos.shape[-1]
    c, s = cos[None, :, None, :].double(), sin[None, :, None, :].double()
    x = x.double()
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * c - b * s, b * c + a * s), -1)
    return torch.cat((turned, rest), -1)


@pytest.mark.parametrize("interleaved", (False, True))
@pytest.mark.parametrize("width", (16, 10))
def test_rotary_is_close_to_fp64_and_its_gradient_turns_back(interleaved, width):
    x = torch.randn(2, 7, 3, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    angles = torch.arange(7.0)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    cos, sin = angles.cos(), angles.sin()
    out = tessera.rotary(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(out.double(), rotated(x, cos, sin, interleaved), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tessera.rotary(x, interleaved=interleaved, rotated=width), out, rtol=1e-4, atol=1e-4)
    back = tessera.rotary(out, cos, sin, interleaved=interleaved, inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-5)
    (dx,) = torch.autograd.grad(out, x, out.detach())
    torch.testing.assert_close(dx, x, rtol=1e-5, atol=1e-5)


def test_rotary_of_other_than_four_dims_is_refused():
    with pytest.raises(tessera.Error, match="x has 1 dims"):
        tessera.rotary(torch.randn(8))


def test_rotary_takes_positions_with_and_without_tables():
    x = torch.randn(2, 3, 1, 8)
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    out = tessera.rotary(x, positions=positions)
    tail = tessera.rotary(torch.cat((torch.zeros(1, 5, 1, 8), x[1:]), 1))[:, 5:]
    torch.testing.assert_close(out[1:], tail)
    angles = torch.arange(8.0)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(tessera.rotary(x, angles.cos(), angles.sin(), positions=positions), out)


def test_errors_name_the_argument():
    x, weight, bias, residual = tensors(torch.float32)
    with pytest.raises(tessera.Error, match="weight has size 36 in dim 0"):
        tessera.rms_norm(x, weight[:-1])
    with pytest.raises(tessera.Error, match="weight is bf16, but x is fp32"):
        tessera.layer_norm(x, weight.bfloat16(), bias)
    with pytest.raises(tessera.Error, match="residual has shape"):
        tessera.rms_norm(x, weight, residual[:-1])
    with pytest.raises(tessera.Error, match="rotated is 7"):
        tessera.rotary(torch.randn(1, 2, 1, 8), rotated=7)
    with pytest.raises(tessera.Error, match="rotated is -2"):
        tessera.rotary(torch.randn(1, 2, 1, 8), rotated=-2)
    with pytest.raises(tessera.Error, match="base is 0; a number above 0 is accepted"):
        tessera.rotary(torch.randn(1, 2, 1, 8), base=0)
    with pytest.raises(tessera.Error, match="cos has 2 rows, but x has 3 tokens"):
        tessera.rotary(torch.randn(1, 3, 1, 8), torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(tessera.Error, match="positions is torch.float32; integers are accepted"):
        tessera.rotary(torch.randn(1, 3, 1, 8), positions=torch.arange(3) / 2)
    for norm, eps in itertools.product((tessera.rms_norm, tessera.layer_norm), (None, "a", [1e-5])):
        with pytest.raises(tessera.Error, match=rf"eps is {re.escape(repr(eps))}; a number is accepted"):
            norm(x, eps=eps)
    with pytest.raises(tessera.Error, match="eps is a torch.Tensor; a number is expected"):
        tessera.rms_norm(x, eps=torch.tensor(1e-5))


def test_positions_may_be_too_large_for_int32():
    x, positions = torch.randn(1, 3, 1, 8), torch.arange(3) + 2**32
    angles = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    tables = angles.cos().float(), angles.sin().float()
    torch.testing.assert_close(tessera.rotary(x, positions=positions), tessera.rotary(x, *tables))
    assert tessera.rotary(x, *tables, positions=positions).isnan().all()  # outside of the tables


def test_opcheck():
    x, weight, bias, residual = (t.requires_grad_() for t in tensors(torch.float32, rows=4, width=6))
    ops = torch.ops.tessera
    torch.library.opcheck(ops.norm, (x, weight, bias, residual, 1e-5, True))
    torch.library.opcheck(ops.norm, (x, weight, None, None, 1e-5, False))
    _, total, rstd, mean = (t.detach() for t in ops.norm(x, weight, bias, residual, 1e-5, True))
    plain = (x.detach(), total, weight.detach(), rstd, mean, residual.detach(), True, True, True)
    torch.library.opcheck(ops.norm_backward, plain)
    tables = torch.randn(4, 2), torch.randn(4, 2)
    torch.library.opcheck(ops.rotary, (torch.randn(2, 4, 3, 6, requires_grad=True), *tables, None, False, False))


def test_compiles_without_a_graph_break():
    x, weight, _, residual = tensors(torch.float32)

    def layer(x, weight, residual):
        out, total = tessera.rms_norm(x * 2, weight, residual)
        return out + total

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, residual), layer(x, weight, residual))
