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


@pytest.mark.parametrize("k, n", [(0, 3), (4, 0), (0, 0)])
def test_there_may_be_no_columns(k, n):
    x, weight, bias = torch.randn(2, 3, k), torch.randn(n, k), torch.randn(n)
    want = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(tessera.linear(x, weight, bias, residual=torch.zeros(2, 3, n)), want)
    out = tessera.mlp(x, torch.randn(5, k), torch.randn(n, 5), residual=want)
    assert out.shape == want.shape and torch.isfinite(out).all()
    assert tessera.grouped_linear(torch.randn(2, 1, k), torch.randn(3, n, k)).shape == (2, 3, n)


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
    with pytest.raises(tessera.Error, match=r"weight is \[29, 44\] of torch.float32, but x is"):
        tessera.linear(a, b[:, :-1])
    with pytest.raises(tessera.Error, match=r"weight is .* of torch.bfloat16, but x is .* of torch.float32"):
        tessera.linear(a, b.bfloat16())
    x, swapped = torch.randn(2, 3, 8), torch.randn(3, 2, 4)  # as many rows as x, in another order
    with pytest.raises(tessera.Error, match=r"residual is \[3, 2, 4\]"):
        tessera.linear(x, torch.randn(4, 8), residual=swapped)
    with pytest.raises(tessera.Error, match=r"residual is \[3, 2, 4\]"):
        tessera.mlp(x, torch.randn(5, 8), torch.randn(4, 5), residual=swapped)
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
    torch.library.opcheck(torch.ops.tessera.gemm, (plain[0], plain[1], *(None,) * 5, 0, 0, False, True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rows_of_a_padded_result_are_aligned(dtype):
    a, b, *_ = tensors(dtype, m=6, n=5, k=4)
    made = tessera.gemm(a, b, padded=True)
    assert made.shape == (6, 5) and made.stride() == (128 // dtype.itemsize, 1)
    assert torch.equal(made, tessera.gemm(a, b))


def test_compiles_without_a_graph_break():
    x, weight, bias, _ = tensors(torch.float32)
    compiled = torch.compile(
        lambda *args: tessera.linear(*args, activation="silu") * 2, fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x, weight, bias), tessera.linear(x, weight, bias, activation="silu") * 2)


OFFSETS = (0, 5, 5, 6, 30, 37)  # an empty group and one of a single row


def grouped(dtype=torch.float32, n=11, k=13):
    generator = torch.Generator().manual_seed(2)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    groups = len(OFFSETS) - 1
    return make(OFFSETS[-1], k), make(groups, n, k) / k**0.5, make(groups, n), torch.tensor(OFFSETS, dtype=torch.int32)


def each_group(x, weight, bias, activation):
    parts = [x[begin:end] for begin, end in zip(OFFSETS, OFFSETS[1:])]
    return torch.cat([ACTIVATIONS[activation](p @ w.T + b) for p, w, b in zip(parts, weight, bias)])


@pytest.mark.parametrize("dtype", EPSILON)
def test_grouped_linear_is_close_to_fp64(dtype):
    x, weight, bias, offsets = grouped(dtype)
    out = tessera.grouped_linear(x, weight, offsets, bias, activation="silu")
    want = each_group(x.double(), weight.double(), bias.double(), "silu")
    assert out.dtype == dtype
    assert (out.double() - want).abs().max() <= 8 * EPSILON[dtype] * want.abs().max()


@pytest.mark.parametrize("activation", ("none", "gelu"))
def test_gradients_of_ragged_groups_are_those_of_pytorch(activation):
    x, weight, bias, offsets = grouped()
    given = [t.requires_grad_() for t in (x, weight, bias)]
    dout = torch.randn(37, 11, generator=torch.Generator().manual_seed(1))
    own = torch.autograd.grad(tessera.grouped_linear(x, weight, offsets, bias, activation=activation), given, dout)
    reference = torch.autograd.grad(each_group(x, weight, bias, activation), given, dout)
    for mine, theirs in zip(own, reference):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compiled", (False, True))
def test_rows_of_no_group_have_a_gradient_of_zero(compiled, monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # with NaN
    x, weight, bias, offsets = grouped()
    given = [t.requires_grad_() for t in (x, weight, bias)]
    function = torch.compile(tessera.grouped_linear, backend="aot_eager") if compiled else tessera.grouped_linear
    torch.use_deterministic_algorithms(True)
    try:
        out = function(x, weight, offsets.clamp(max=31), bias, activation="silu")
        own = torch.autograd.grad(out[:31].sum(), given)
    finally:
        torch.use_deterministic_algorithms(False)
    reference = torch.autograd.grad(each_group(x, weight, bias, "silu")[:31].sum(), given)
    for mine, theirs in zip(own, reference):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", (False, True))
def test_without_offsets_every_group_has_all_rows(shared):
    _, weight, bias, _ = grouped()
    groups = weight.shape[0]
    x = torch.randn(2, 6, 1 if shared else groups, 13, generator=torch.Generator().manual_seed(3))
    given = [t.requires_grad_() for t in (x, weight, bias)]
    out = tessera.grouped_linear(x, weight, None, bias, activation="silu")
    want = torch.nn.functional.silu(
        torch.einsum("...gk,gnk->...gn", x.expand(2, 6, groups, 13), weight) + bias
    )
    assert out.shape == (2, 6, groups, 11)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    for mine, theirs in zip(torch.autograd.grad(out, given, dout), torch.autograd.grad(want, given, dout)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_grouped_gemm_takes_every_kind_of_group():
    x, weight, bias, offsets = grouped()
    product = torch.cat([x[b:e] @ w.T for b, e, w in zip(OFFSETS, OFFSETS[1:], weight)])
    gated = tessera.grouped_gemm(x, weight, offsets, gate=weight, activation="silu", residual=product)
    torch.testing.assert_close(gated, product * torch.nn.functional.silu(product) + product, rtol=1e-4, atol=1e-4)
    sums = tessera.grouped_gemm(x, product, offsets, transpose_a=True, transpose_b=True)
    want = torch.stack([x[b:e].T @ product[b:e] for b, e in zip(OFFSETS, OFFSETS[1:])])
    torch.testing.assert_close(sums, want, rtol=1e-4, atol=1e-4)
    shared = tessera.grouped_gemm(x, weight)
    torch.testing.assert_close(shared, torch.einsum("mk,gnk->gmn", x, weight), rtol=1e-4, atol=1e-4)


def test_errors_of_groups_name_the_argument():
    x, weight, bias, offsets = grouped()
    with pytest.raises(tessera.Error, match="offsets has length 5, but b has 5 groups"):
        tessera.grouped_linear(x, weight, offsets[:-1])
    with pytest.raises(tessera.Error, match=r"offsets\[4\] is 3; 6 to 37 is accepted"):
        tessera.grouped_linear(x, weight, torch.tensor([0, 5, 5, 6, 3, 37], dtype=torch.int32))
    with pytest.raises(tessera.Error, match=r"x is \[37, 13\]"):
        tessera.grouped_linear(x, weight)
    with pytest.raises(tessera.Error, match="bias has size = 4 in dim 0, but there are 5 groups"):
        tessera.grouped_linear(x, weight, offsets, bias[:-1])
    with pytest.raises(tessera.Error, match="offsets divide K"):
        tessera.grouped_gemm(x, weight[0], offsets)


def test_opcheck_of_groups():
    x, weight, bias, offsets = grouped()
    given = [t.requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(torch.ops.tessera.grouped_linear, (given[0], given[1], offsets, given[2], 2))
    rows = torch.randn(4, 5, 13, requires_grad=True)
    torch.library.opcheck(torch.ops.tessera.grouped_linear, (rows, given[1], None, given[2], 0))
    plain = [x.detach(), weight.detach()]
    torch.library.opcheck(torch.ops.tessera.grouped_gemm, (*plain, offsets, *(None,) * 5, 0, 0, False, False))


def mlp_tensors(gated, biased, dtype=torch.float32, m=24, k=10, hidden=21, n=12):
    generator = torch.Generator().manual_seed(5)
    make = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)
    given = {"x": make(m, k), "up": make(hidden, k) / k**0.5, "down": make(n, hidden) / hidden**0.5}
    if gated:
        given["gate"] = make(hidden, k) / k**0.5
    if biased:
        given |= {"up_bias": make(hidden), "down_bias": make(n), "residual": make(m, n)}
        if gated:
            given["gate_bias"] = make(hidden)
    return given


def plain_mlp(activation, x, up, down, gate=None, up_bias=0, gate_bias=0, down_bias=0, residual=0):
    hidden = x @ up.T + up_bias
    f = ACTIVATIONS[activation]
    hidden = f(hidden) if gate is None else hidden * f(x @ gate.T + gate_bias)
    return hidden @ down.T + down_bias + residual


@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("biased", (False, True))
@pytest.mark.parametrize("recompute", (False, True))
@pytest.mark.parametrize("activation", ("silu", "gelu", "none"))
def test_mlp_and_its_gradients_are_those_of_pytorch(gated, biased, recompute, activation):
    given = {name: t.requires_grad_() for name, t in mlp_tensors(gated, biased).items()}
    out = tessera.mlp(**given, activation=activation, recompute=recompute)
    want = plain_mlp(activation, **given)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(6))
    tensors = tuple(given.values())
    for mine, theirs in zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(want, tensors, dout)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("gated", (False, True))
def test_mlp_is_close_to_fp64(dtype, gated):
    given = mlp_tensors(gated, True, dtype)
    want = plain_mlp("silu", **{name: t.double() for name, t in given.items()})
    for keep in (False, True):  # with and without what a backward needs
        out = tessera.mlp(**{name: t.requires_grad_(keep) for name, t in given.items()})
        assert out.dtype == dtype
        assert (out.double() - want).abs().max() <= 12 * EPSILON[dtype] * want.abs().max()


def test_mlp_computes_only_the_gradients_that_are_needed():
    given = mlp_tensors(True, False)
    given["x"].requires_grad_()
    tessera.mlp(given["x"].reshape(2, 12, -1), given["up"], given["down"], given["gate"]).sum().backward()
    want = torch.autograd.grad(plain_mlp("silu", **given).sum(), given["x"])[0]
    torch.testing.assert_close(given["x"].grad, want, rtol=1e-4, atol=1e-5)
    down = given["down"].requires_grad_()
    tessera.mlp(given["x"].detach(), given["up"], down, given["gate"]).sum().backward()
    torch.testing.assert_close(
        down.grad, torch.autograd.grad(plain_mlp("silu", **given).sum(), down)[0], rtol=1e-4, atol=1e-5
    )


def test_what_recomputes_gives_the_same_bits_with_and_without_gradients():
    """Else a gated one rounds what it keeps before it multiplies."""
    x, up, gate, down = (torch.randn(shape).bfloat16() for shape in ((9, 16), (21, 16), (21, 16), (16, 21)))
    leaf = x.clone().requires_grad_()
    assert torch.equal(tessera.mlp(leaf, up, down, gate, recompute=True), tessera.mlp(x, up, down, gate))
    experts = [t[None] for t in (up, down, gate)]
    trained = tessera.moe(leaf, x[:, :1], *experts, top_k=1, recompute=True)
    assert torch.equal(trained, tessera.moe(x, x[:, :1], *experts, top_k=1))


def test_errors_of_mlp_name_the_argument():
    given = mlp_tensors(False, True)
    with pytest.raises(tessera.Error, match="up_bias and gate_bias are given both or neither"):
        tessera.mlp(given["x"], given["up"], given["down"], given["up"], up_bias=given["up_bias"])
    with pytest.raises(tessera.Error, match="down has size = 20 in dim 1, but up gives 21"):
        tessera.mlp(given["x"], given["up"], given["down"][:, :-1].contiguous())


@pytest.mark.parametrize("gated", (False, True))
def test_opcheck_of_mlp(gated):
    given = {name: t.requires_grad_() for name, t in mlp_tensors(gated, True).items()}
    names = ("x", "up", "down", "gate", "up_bias", "gate_bias", "down_bias", "residual")
    torch.library.opcheck(torch.ops.tessera.mlp, (*(given.get(name) for name in names), 2, True))


@pytest.mark.parametrize("biased", (False, True))
def test_groups_with_one_input_are_one_mlp(biased):
    shapes = ((2, 5, 10), (3, 13, 10), (3, 2, 13), (3, 13), (3, 2))
    given = [torch.randn(shape).requires_grad_() for shape in shapes[: 5 if biased else 3]]
    x, up, down, *biases = given
    up_bias, down_bias = biases or (None, None)
    out = tessera._mlp.mlp_of_groups(x, up, down, "silu", up_bias, down_bias)
    want = tessera.grouped_mlp(x[:, :, None], up, down, up_bias=up_bias, down_bias=down_bias)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # nothing is saved
        plain = tessera._mlp.mlp_of_groups(x, up, down, "silu", up_bias, down_bias)
    torch.testing.assert_close(plain, want, rtol=1e-4, atol=1e-5)
    dout = torch.randn(want.shape)
    for mine, theirs in zip(torch.autograd.grad(out, given, dout), torch.autograd.grad(want, given, dout)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("hidden", (13, 16))
def test_grouped_mlp_and_its_gradients_are_those_of_pytorch(shared, hidden):
    generator = torch.Generator().manual_seed(3)
    groups, k, n = 3, 10, 2
    shapes = ((2, 5, 1 if shared else groups, k), (groups, hidden, k), (groups, n, hidden), (groups, hidden), (groups, n))
    given = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    x, up, down, up_bias, down_bias = given
    out = tessera.grouped_mlp(x, up, down, up_bias=up_bias, down_bias=down_bias)
    inner = torch.nn.functional.silu(torch.einsum("abgk,ghk->abgh", x.expand(2, 5, groups, k), up) + up_bias)
    want = torch.einsum("abgh,gnh->abgn", inner, down) + down_bias
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    dout = torch.randn(want.shape, generator=generator)
    for mine, theirs in zip(torch.autograd.grad(out, given, dout), torch.autograd.grad(want, given, dout)):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    with torch.no_grad():  # nothing is saved
        torch.testing.assert_close(tessera.grouped_mlp(x, up, down, up_bias=up_bias, down_bias=down_bias), want)
    with pytest.raises(tessera.Error, match="up has 2 dims"):
        tessera.grouped_mlp(x, up[0], down)
    for wrong, biases, said in (
        (down[1:], {}, "down has size 2 in dim 0; 3 is expected"),
        (down[:, :, 1:], {}, f"down has size {hidden - 1} in dim 2; {hidden} is expected"),
        (down, {"up_bias": up_bias[1:]}, rf"up_bias is \[2, {hidden}\]; \[3, {hidden}\] is expected"),
        (down, {"down_bias": down_bias.flatten()}, r"down_bias is \[6\]; \[3, 2\] is expected"),
    ):
        with pytest.raises(tessera.Error, match=said):
            tessera.grouped_mlp(x, up, wrong, **biases)


@pytest.mark.parametrize("transpose_b", (False, True))
@pytest.mark.parametrize("n", (64, 71))
def test_what_is_not_finite_stays_in_its_row(device, n, transpose_b):
    # Rows of 93 and 71 elements start anywhere, and may be loaded with elements of their neighbours.
    m, k = 1001, 93
    a, b = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16()
    a[500, -1], a[501, 0], a[777] = torch.inf, torch.nan, torch.nan
    made = tessera.gemm(a, b.T.contiguous() if transpose_b else b, transpose_b=transpose_b).float()
    others = [row for row in range(m) if row not in (500, 501, 777)]
    torch.testing.assert_close(made[others], (a[others].float() @ b.float().T), rtol=2e-2, atol=1e-1)
    assert made[[501, 777]].isnan().all() and not made[500].isfinite().any()
