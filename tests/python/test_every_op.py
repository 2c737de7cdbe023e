"""What holds for every differentiable function of the package: transforms, autocast, and errors of tensors that do not fit."""

import numpy
import pytest
import torch

import tessera

OFFSETS = torch.tensor([0, 4, 4, 10], dtype=torch.int32)
LABELS = torch.arange(10) % 7
EXPERTS = torch.tensor([[0, 2], [1, 3]]).repeat(5, 1)


def moe(x, logits, up, down, gate):
    out, loss = tessera.moe(x, logits, up, down, gate, top_k=2, balance_loss=True)
    return out + loss


# Each: a function of tensors, and their shapes.
OPS = {
    "attention": (lambda q, k, v: tessera.attention(q, k, v, causal=True), [(2, 6, 4, 16), (2, 6, 2, 16), (2, 6, 2, 16)]),
    "sdpa": (lambda q, k, v: tessera.sdpa(q, k, v, is_causal=True), [(2, 4, 6, 16)] * 3),
    "linear": (
        lambda x, w, r, b: tessera.linear(x, w, b, activation="silu", residual=r),
        [(2, 5, 8), (6, 8), (2, 5, 6), (6,)],
    ),
    "grouped_linear": (
        lambda x, w, b: tessera.grouped_linear(x, w, OFFSETS, b, activation="gelu"),
        [(10, 8), (3, 6, 8), (3, 6)],
    ),
    "grouped_linear_without_offsets": (
        lambda x, w, b: tessera.grouped_linear(x, w, None, b, activation="relu"),
        [(10, 3, 8), (3, 6, 8), (3, 6)],
    ),
    "grouped_mlp": (tessera.grouped_mlp, [(5, 1, 8), (3, 6, 8), (3, 2, 6)]),
    "mlp": (tessera.mlp, [(2, 5, 8), (6, 8), (8, 6), (6, 8)]),
    "moe": (moe, [(2, 5, 8), (2, 5, 4), (4, 6, 8), (4, 8, 6), (4, 6, 8)]),
    "moe_of_chosen_experts": (
        lambda x, weights, up, down: tessera.moe(x, None, up, down, experts=EXPERTS, weights=weights),
        [(10, 8), (10, 2), (4, 6, 8), (4, 8, 6)],
    ),
    "rms_norm": (lambda x, w, r: sum(tessera.rms_norm(x, w, r)), [(2, 5, 8), (8,), (2, 5, 8)]),
    "layer_norm": (tessera.layer_norm, [(2, 5, 8), (8,), (8,)]),
    "rotary": (tessera.rotary, [(2, 6, 4, 16)]),
    "gmm_nll": (lambda p: tessera.gmm_nll(p, torch.linspace(-1, 1, 4)), [(4, 3, 3)]),
    "linear_cross_entropy": (lambda h, w: tessera.linear_cross_entropy(h, w, LABELS), [(10, 8), (7, 8)]),
    "linear_cross_entropy_of_rows": (
        lambda h, w: tessera.linear_cross_entropy(h, w, LABELS, reduction="none"),
        [(10, 8), (7, 8)],
    ),
}
# Those that contain a matrix product with weights.
AUTOCAST = ["linear", "grouped_linear", "grouped_linear_without_offsets", "grouped_mlp", "mlp", "moe", "linear_cross_entropy"]


def inputs_of(name, grad=False):
    return [torch.randn(shape, requires_grad=grad) for shape in OPS[name][1]]


@pytest.mark.parametrize("name", OPS)
def test_func_grad_is_the_gradient(name):
    function, inputs = OPS[name][0], inputs_of(name)
    leaves = [t.clone().requires_grad_() for t in inputs]
    want = torch.autograd.grad(function(*leaves).square().sum(), leaves)
    got = torch.func.grad(lambda *t: function(*t).square().sum(), argnums=tuple(range(len(inputs))))(*inputs)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["attention", "mlp", "rotary", "gmm_nll", "linear_cross_entropy"])
def test_func_grad_compiles(name):
    torch._dynamo.reset()
    function, inputs = OPS[name][0], inputs_of(name)
    gradients = torch.func.grad(lambda *t: function(*t).square().sum(), argnums=tuple(range(len(inputs))))
    compiled = torch.compile(gradients, backend="eager", fullgraph=True)(*inputs)
    for a, b in zip(compiled, gradients(*inputs)):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", [name for name in OPS if name != "rotary"])  # which is linear: its gradient has a gradient
@pytest.mark.parametrize("last_only", [False, True])
def test_second_derivatives_raise(name, last_only):
    """Also those of a gradient penalty, where the loss itself is differentiated as well, and of the last input's gradient."""
    function, inputs = OPS[name][0], inputs_of(name, grad=True)
    loss = function(*inputs).sum()
    with pytest.raises(tessera.Error, match="second|no gradient"):
        gradients = torch.autograd.grad(loss, inputs[-1:] if last_only else inputs, create_graph=True)
        (loss + sum(g.square().sum() for g in gradients)).backward()


@pytest.mark.parametrize("name", OPS)
def test_lazily_negated_tensors_are_negated(name):
    """As z.conj().imag is, and the gradient of what becomes an imaginary part."""
    function, inputs = OPS[name][0], inputs_of(name, grad=True)
    negated = [torch._neg_view(-t) for t in inputs]
    assert all(t.is_neg() for t in negated)
    out = function(*inputs)
    torch.testing.assert_close(function(*negated), out)
    with torch.no_grad():
        torch.testing.assert_close(function(*negated), out)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(out, inputs, dout)
    for leaves, gradient in ((inputs, torch._neg_view(-dout)), (negated, dout)):
        got = torch.autograd.grad(function(*leaves), inputs, gradient)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", OPS)
def test_vmap_raises(name):
    inputs = [torch.stack((t, t)) for t in inputs_of(name)]
    with pytest.raises(tessera.Error, match="no vmap rule"):
        torch.vmap(OPS[name][0])(*inputs)


@pytest.mark.parametrize("name", OPS)
def test_batched_gradients_are_right_or_refused(name):
    function, inputs = OPS[name][0], inputs_of(name, grad=True)
    out = function(*inputs)
    douts = torch.randn(2, *out.shape)
    try:
        got = torch.autograd.grad(out, inputs, douts, is_grads_batched=True, retain_graph=True)
    except RuntimeError as error:
        assert "batched gradient" in str(error) or "Batching rule" in str(error)
        return
    for i, dout in enumerate(douts):
        for a, b in zip(got, torch.autograd.grad(out, inputs, dout, retain_graph=True)):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_casts_to_its_type(name):
    function, inputs = OPS[name][0], inputs_of(name, grad=True)
    halves = [t.detach().bfloat16().requires_grad_() for t in inputs]
    if name == "moe":
        halves[1] = inputs[1].detach().requires_grad_()  # logits may be fp32, and are left
    want = function(*halves)
    with torch.autocast("cpu", torch.bfloat16):
        got = function(*inputs)
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs) if name == "linear" else got
    assert torch.equal(got, want) and torch.equal(compiled, want) and got.dtype == want.dtype
    dout = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(got, inputs, dout), torch.autograd.grad(want, halves, dout)):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


@pytest.mark.parametrize("name", OPS)
def test_a_tensor_without_memory_is_refused(name):
    """The operators' shape functions run for a meta tensor: with others that have memory, nothing would be computed."""
    function, inputs = OPS[name][0], inputs_of(name)
    if len(inputs) > 1:
        inputs[1] = inputs[1].to("meta")
        with pytest.raises(tessera.Error, match="cpu and meta"):
            function(*inputs)


@pytest.mark.parametrize("name", OPS)
def test_what_is_no_tensor_is_refused(name):
    function, inputs = OPS[name][0], inputs_of(name)
    for i in range(len(inputs)):
        with pytest.raises(tessera.Error, match="ndarray; a torch.Tensor is expected"):
            function(*(numpy.zeros(t.shape) if i == j else t for j, t in enumerate(inputs)))
