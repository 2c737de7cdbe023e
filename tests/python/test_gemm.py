"""tessera.linear and tessera.gemm: values against fp64, gradients, fake tensors and torch.compile."""

import pytest
import torch

import tessera

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu": torch.nn.functional.gelu,
}
EPSILON = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def tensors(dtype, m=37, n=29, k=45, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    return make(m, k), make(n, k) / k**0.5, make(n), make(m, n)


def expected(x, weight, bias, residual, activation):
    x, weight, bias, residual = (t.double() for t in (x, weight, bias, residual))
    return ACTIVATIONS[activation](x @ weight.T + bias) + residual


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_is_close_to_fp64(dtype, activation):
    x, weight, bias, residual = tensors(dtype)
    out = tessera.linear(x, weight, bias, activation=activation, residual=residual)
    want = expected(x, weight, bias, residual, activation)
    assert out.dtype == dtype
    assert (out.double() - want).abs().max() <= 8 * EPSILON[dtype] * want.abs().max()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_pytorch(activation):
    given = [t.requires_grad_() for t in tensors(torch.float32, m=12, n=10, k=7)]
    x, weight, bias, residual = given
    dout = torch.randn(12, 10, generator=torch.Generator().manual_seed(1))
    own = torch.autograd.grad(tessera.linear(x, weight, bias, activation=activation, residual=residual), given, dout)
    reference = torch.autograd.grad(
        ACTIVATIONS[activation](torch.nn.functional.linear(x, weight, bias)) + residual, given, dout
    )
    for mine, theirs in zip(own, reference):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_leading_dims_are_kept_and_any_tensor_may_be_left_out():
    x, weight, _, _ = tensors(torch.float32, m=24)
    out = tessera.linear(x.reshape(2, 3, 4, -1), weight)
    assert out.shape == (2, 3, 4, 29)
    torch.testing.assert_close(out.reshape(24, -1), x @ weight.T, rtol=1e-4, atol=1e-5)


def test_gradients_that_are_expanded_or_transposed_are_accepted():
    x, weight, _, _ = (t.requires_grad_() for t in tensors(torch.float32))
    tessera.linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand_as(x), rtol=1e-4, atol=1e-5)


def test_gemm_takes_operands_either_way_and_every_epilogue():
    a, b, bias, residual = tensors(torch.float32)
    want = a.double() @ b.double().T
    for ta in (False, True):
        for tb in (False, True):
            out = tessera.gemm(
                a.T.contiguous() if ta else a, b.T.contiguous() if tb else b, transpose_a=ta, transpose_b=tb
            )
            torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)
    gate = torch.randn_like(b)
    out = tessera.gemm(a, b, gate=gate, activation="silu", bias=bias, gate_bias=bias, residual=residual)
    want = (want + bias) * torch.nn.functional.silu(a.double() @ gate.double().T + bias) + residual
    torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)
    half = tessera.gemm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    assert half.dtype == torch.float32


def test_errors_name_the_argument():
    a, b, bias, _ = tensors(torch.float32)
    with pytest.raises(tessera.Error, match="b has size = 44"):
        tessera.gemm(a, b[:, :-1].contiguous())
    with pytest.raises(tessera.Error, match="activation is 'tanh'"):
        tessera.linear(a, b, activation="tanh")
    with pytest.raises(tessera.Error, match="bias has length = 28"):
        tessera.linear(a, b, bias[:-1])
    with pytest.raises(tessera.Error, match="tessera.gemm has no gradient"):
        tessera.gemm(a.requires_grad_(), b).sum().backward()


def test_opcheck():
    x, weight, bias, residual = (t.requires_grad_() for t in tensors(torch.float32, m=6, n=5, k=4))
    for activation in (0, 2):
        torch.library.opcheck(torch.ops.tessera.linear, (x, weight, bias, residual, activation))
    plain = [t.detach() for t in (x, weight, bias, residual)]
    torch.library.opcheck(
        torch.ops.tessera.gemm, (plain[0], plain[1], plain[2], None, None, None, plain[3], 2, 0, False)
    )


def test_compiles_without_a_graph_break():
    x, weight, bias, _ = tensors(torch.float32)
    compiled = torch.compile(
        lambda *args: tessera.linear(*args, activation="silu") * 2, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x, weight, bias), tessera.linear(x, weight, bias, activation="silu") * 2)
