"""The operators under torch.compile, torch.export, modes, streams and CUDA graphs."""

import pytest
import torch
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import tessera

PLAIN = (0.0, 0.0, 1, 0, -1, -1, 0, 0, 0)  # scale, softcap, causal, alignment, window, max_seqlens, chunk


def qkv(device, dtype, rows=24, grad=False):
    shapes = ((2, rows, 4, 64), (2, rows, 2, 64), (2, rows, 2, 64))
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=grad) for shape in shapes]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.mark.parametrize("packed", [False, True])
def test_attention_passes_opcheck(device, packed):
    q, k, v = qkv(device, torch.bfloat16)  # lse has a different type
    lengths = (None, None)
    options = PLAIN
    if packed:
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        lengths = (torch.tensor([0, 20, 48], dtype=torch.int32, device=device),) * 2
        # The alignment is given: opcheck copies its tensors, and on a GPU the lengths are not read to compare them.
        options = (*PLAIN[:3], 1, *PLAIN[4:6], 28, 28, 0)
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    alibi = torch.rand(4, device=device)
    for slopes in (None, alibi):
        opcheck(torch.ops.tessera.attention.default, (*inputs, slopes, *lengths, *options))


def test_attention_backward_passes_opcheck(device, dtype):
    q, k, v = qkv(device, dtype)
    out, lse = tessera.attention(q, k, v, causal=True, return_lse=True)
    for dlse in (None, torch.randn_like(lse)):
        args = (q, k, v, None, None, None, *PLAIN, out, lse, torch.randn_like(out), dlse)
        opcheck(torch.ops.tessera.attention_backward.default, args)


OPTIONS = [
    dict(causal=True),
    dict(causal="bottom_right", window=(5, 0), softcap=15.0),
    dict(window=(3, 3), scale=0.2, deterministic=True),
    dict(return_lse=True),
]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_into_one_graph(device, dtype, backend):
    for options in OPTIONS if backend == "aot_eager" else OPTIONS[:1]:

        def layer(q, k, v):
            result = tessera.attention(q * 2, k.sin(), v, **options)
            out = result[0] + result[1].sum() if options.get("return_lse") else result
            return out.relu()

        inputs = qkv(device, dtype, grad=True)
        want = layer(*inputs)
        dout = torch.randn_like(want)
        want_grads = torch.autograd.grad(want, inputs, dout)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        got = compiled(*inputs)
        got_grads = torch.autograd.grad(got, inputs, dout)
        tolerance = dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=5e-2, rtol=2e-2)
        torch.testing.assert_close(got, want, **tolerance)
        for a, b in zip(got_grads, want_grads):
            torch.testing.assert_close(a, b, **tolerance)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*inputs), want, **tolerance)


def test_dynamic_shapes_compile_once(device, dtype):
    graphs = 0

    def counting(graph, _):
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(
        lambda q, k, v: tessera.attention(q, k, v, causal=True), fullgraph=True, backend=counting, dynamic=True
    )
    for rows in (10, 25, 40):
        inputs = qkv(device, dtype, rows)
        assert torch.equal(compiled(*inputs), tessera.attention(*inputs, causal=True))
    assert graphs == 1


def test_sdpa_and_decode_compile(device, dtype):
    q, k, v = (t.transpose(1, 2) for t in qkv(device, dtype))
    call = lambda q, k, v: tessera.sdpa(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v))
    q, k, v = qkv(device, dtype)
    lengths = torch.tensor([24, 9], dtype=torch.int32, device=device)
    call = lambda q, k, v, n: tessera.decode(q[:, :1], k, v, cache_seqlens=n)  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, lengths), call(q, k, v, lengths))


def test_autocast_inside_a_graph(device):
    inputs = qkv(device, torch.float32)

    def layer(q, k, v):
        with torch.autocast(device, dtype=torch.bfloat16):
            return tessera.attention(q, k, v, causal=True)

    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs)
    assert got.dtype == torch.bfloat16 and torch.equal(got, layer(*inputs))


def test_export_keeps_the_operator(device, dtype):
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return tessera.attention(q, k, v, causal=True)

    inputs = tuple(qkv(device, dtype))
    program = torch.export.export(Layer(), inputs)
    assert any("tessera.attention" in str(node.target) for node in program.graph.nodes)
    assert torch.equal(program.module()(*inputs), Layer()(*inputs))


def test_modes_see_the_operator(device, dtype):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Watch():
        tessera.attention(*qkv(device, dtype))
    assert any("tessera.attention" in name for name in seen)
    with torch.profiler.profile() as profile:
        tessera.attention(*qkv(device, dtype))
    assert any(event.name == "tessera::attention" for event in profile.events())


def test_subclasses_reach_the_operator(device, dtype):
    class Tagged(torch.Tensor):
        pass

    q, k, v = qkv(device, dtype)
    out = tessera.attention(q.as_subclass(Tagged), k, v)
    assert torch.equal(out.as_subclass(torch.Tensor), tessera.attention(q, k, v))


def test_double_backward_is_refused_in_a_graph(device, dtype):
    q, k, v = qkv(device, dtype, grad=True)
    out, _ = torch.ops.tessera.attention(q, k, v, None, None, None, *PLAIN)
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(tessera.Error, match="no second derivative"):
        dq.sum().backward()


def test_the_operator_refuses_vmap(device, dtype):
    batched = [torch.stack([t, t]) for t in qkv(device, dtype)]
    with pytest.raises(tessera.Error, match="no vmap rule"):
        torch.vmap(lambda q, k, v: torch.ops.tessera.attention(q, k, v, None, None, None, *PLAIN))(*batched)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@cuda
def test_work_goes_to_the_current_stream():
    q, k, v = qkv("cuda", torch.bfloat16, rows=512)
    tessera.attention(q, k, v)  # compiles the kernel
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late = q * 0.5
        out = tessera.attention(late, k, v, causal=True)
    stream.synchronize()
    assert torch.equal(out, tessera.attention(q * 0.5, k, v, causal=True))


@cuda
def test_a_graph_captures_forward_and_backward():
    inputs = qkv("cuda", torch.bfloat16, rows=200, grad=True)
    dout = torch.randn_like(inputs[0])

    def step():
        out = tessera.attention(*inputs, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out, inputs, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        for tensor in inputs:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    for got, want in zip(results, step()):
        assert torch.equal(got, want)


@cuda
def test_compiled_cuda_graphs_replay():
    inputs = qkv("cuda", torch.bfloat16, rows=128)
    compiled = torch.compile(
        lambda q, k, v: tessera.attention(q * 1.5, k, v, causal=True), fullgraph=True, mode="reduce-overhead"
    )
    for _ in range(3):
        got = compiled(*inputs).clone()
    torch.testing.assert_close(got, tessera.attention(inputs[0] * 1.5, *inputs[1:], causal=True))


@cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_the_tensors_device_is_used_not_the_current_one():
    q, k, v = qkv("cuda:1", torch.bfloat16)
    out = tessera.attention(q, k, v)
    torch.cuda.set_device(1)
    try:
        assert torch.equal(out, tessera.attention(q, k, v))
    finally:
        torch.cuda.set_device(0)
