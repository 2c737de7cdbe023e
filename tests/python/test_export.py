"""Ahead of time: torch.export with dynamic shapes, and an AOTInductor package. Inference only (docs/python.md)."""

import torch

import reference
import tessera


class Layer(torch.nn.Module):
    def forward(self, x):
        q, k, v = x.unflatten(-1, (3, 4, 16)).unbind(2)
        return tessera.attention(q, k, v, causal=True).flatten(2)


def exported():
    layer = Layer()
    shapes = {"x": {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("seq", min=2, max=4096)}}
    return layer, torch.export.export(layer, (torch.randn(2, 33, 192),), dynamic_shapes=shapes)


def assert_same(program, layer):
    for shape in ((2, 33, 192), (1, 2, 192), (3, 130, 192)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), layer(x))
        q, k, v = x.unflatten(-1, (3, 4, 16)).unbind(2)
        exact, _ = reference.attention(*(t.double() for t in (q, k, v)), causal=True)
        torch.testing.assert_close(program(x).double(), exact.flatten(2), rtol=0, atol=1e-5)


def test_export_keeps_one_operator_and_serves_other_shapes():
    layer, program = exported()
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [t for t in targets if t.startswith("tessera.")] == ["tessera.attention.default"], targets
    assert_same(program.module(), layer)


def test_an_aotinductor_package_serves_other_shapes_and_has_no_gradient(tmp_path):
    layer, program = exported()
    configs = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # of the C++ around the operator
    file = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "layer.pt2"), inductor_configs=configs)
    loaded = torch._inductor.aoti_load_package(file)
    assert_same(loaded, layer)
    assert not loaded(torch.randn(2, 33, 192, requires_grad=True)).requires_grad
