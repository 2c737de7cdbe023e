"""PyTorch's private symbols that the package uses: which versions have them, and that it works without each of them.

If a newer PyTorch fails here, the package still works with it, through a fallback that is slower.
"""

import ctypes
import types

import pytest
import torch
from reference import assert_accurate, attention as reference
from torch.autograd import forward_ad

import tessera
from tessera import _attention, _ops

VERSIONS = ((2, 9), (2, 13))  # the oldest and the newest PyTorch that were seen to have all symbols
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
# Looked up through _ops._private.
INTERCEPTORS = [
    "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack",
    "_C._functorch.peek_interpreter_stack",
    "_C._autograd._profiler_enabled",
    "_C._get_tracing_state",
]
SYMBOLS = [*INTERCEPTORS, "_C._is_any_autocast_enabled", "_C._are_functorch_transforms_active"]
CUDA_SYMBOLS = ["_C._cuda_getCurrentRawStream", "cuda._sleep"]
OTHERS = [
    "autograd.forward_ad._current_level",
    "_amp_foreach_non_finite_check_and_unscale_",
    "_assert_async",
    "_foreach_mul_",
    "_functorch.autograd_function.enable_single_level_autograd_function",
    *(CUDA_SYMBOLS if torch.cuda.is_available() else []),
]
FORWARD_AD_WITHOUT_LEVEL = types.SimpleNamespace(unpack_dual=forward_ad.unpack_dual)


@pytest.mark.parametrize("path", [*SYMBOLS, *OTHERS])
def test_the_versions_that_have_a_symbol(path):
    found = _ops._private(path) is not None
    if VERSIONS[0] <= VERSION <= VERSIONS[1]:
        assert found
    elif not found:
        pytest.skip(f"PyTorch {torch.__version__} has no torch.{path}; the fallback is used")


@pytest.fixture
def without(monkeypatch):
    """Sets the package up as for a PyTorch without the given symbols."""

    def hide(*paths):
        real = _ops._private
        monkeypatch.setattr(_ops, "_private", lambda path: None if path in paths else real(path))
        _ops._set_up()

    yield hide
    monkeypatch.undo()
    _ops._set_up()


def check_forward_and_backward(device, dtype):
    inputs = [torch.randn(2, 37, 4, 64, device=device).to(dtype).requires_grad_() for _ in range(3)]
    dout = torch.randn_like(inputs[0])

    def run(precision):
        leaves = [t.detach().to(precision).requires_grad_() for t in inputs]
        out, _ = reference(*leaves, causal=True)
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(precision))

    exact, plain = run(torch.float64), run(dtype)
    out = tessera.attention(*inputs, causal=True)
    got = (out, *torch.autograd.grad(out, inputs, dout))
    for name, *three in zip(("out", "dq", "dk", "dv"), got, exact, plain):
        assert_accurate(*three, name)
    with torch.no_grad():
        assert torch.equal(tessera.attention(*inputs, causal=True), out)


def mode():
    return _ops._native.mode(*(torch.ones(1, 1, 1, 8) for _ in range(3)))


@pytest.mark.parametrize("path", [None, *SYMBOLS])
def test_forward_and_backward_without_a_symbol(without, device, dtype, path):
    without(path)
    assert mode() == (_attention._DISPATCHED if path in INTERCEPTORS else _attention._PLAIN)
    check_forward_and_backward(device, dtype)


def test_forward_and_backward_without_any_symbol(without, monkeypatch, device, dtype):
    monkeypatch.setattr(_ops, "forward_ad", FORWARD_AD_WITHOUT_LEVEL)
    monkeypatch.setattr(_attention, "_apply", _attention._Attention.apply)
    without(*SYMBOLS, "_C._cuda_getCurrentRawStream")
    assert mode() == _attention._DISPATCHED
    check_forward_and_backward(device, dtype)


def test_autocast_without_its_symbol(without, device):
    without("_C._is_any_autocast_enabled")
    inputs = [torch.randn(1, 8, 2, 64, device=device) for _ in range(3)]
    with torch.autocast(device, dtype=torch.bfloat16):
        assert tessera.attention(*inputs).dtype == torch.bfloat16


def test_functional_grad_without_its_symbol(without):
    inputs = [torch.randn(1, 8, 2, 16) for _ in range(3)]
    loss = lambda q: tessera.attention(q, *inputs[1:], deterministic=True).sum()  # noqa: E731
    want = torch.func.grad(loss)(inputs[0])
    without("_C._are_functorch_transforms_active")
    assert torch.equal(torch.func.grad(loss)(inputs[0]), want)


def test_tangents_are_refused_without_the_current_level(without, monkeypatch):
    monkeypatch.setattr(_ops, "forward_ad", FORWARD_AD_WITHOUT_LEVEL)
    without()
    q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    tessera.attention(q, k, v)
    with forward_ad.dual_level(), pytest.raises(tessera.Error, match="forward-mode AD"):
        tessera.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def test_no_current_level_means_that_there_may_be_tangents(monkeypatch):
    assert not _ops.in_dual_level()
    with forward_ad.dual_level():
        assert _ops.in_dual_level()
    monkeypatch.setattr(_ops, "forward_ad", FORWARD_AD_WITHOUT_LEVEL)
    assert _ops.in_dual_level()


def test_function_apply_without_its_private_base(monkeypatch, device, dtype):
    if VERSIONS[0] <= VERSION <= VERSIONS[1]:
        assert isinstance(_attention._apply, types.BuiltinMethodType)  # else it is Function.apply, in Python
    monkeypatch.setattr(_attention, "_apply", _attention._Attention.apply)
    check_forward_and_backward(device, dtype)


def test_the_stream_without_its_symbol(without, monkeypatch):
    asked = []

    def stream(index):
        asked.append(index)
        return types.SimpleNamespace(cuda_stream=0x70)

    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    assert _ops._current_stream(1) == 0x70 and asked == [1]


def test_a_compiled_model_without_assert_async_refuses_what_may_be_packed(monkeypatch):
    pytest.importorskip("transformers", minversion="5.5")
    from tessera import transformers

    transformers._assert_unpacked(torch.tensor(True))
    monkeypatch.delattr(torch, "_assert_async")
    with pytest.raises(tessera.Error, match="packed by position ids"):
        transformers._assert_unpacked(torch.tensor(True))


# DLPack's C exchange table is public; PyTorch has one from 2.10 on. Without it, tensors are read by their attributes.
TABLE = "__dlpack_c_exchange_api__"
CAPSULE = b"dlpack_exchange_api"


def table_words():
    """PyTorch's table: version (major in the lower half), the table of an older version, five functions."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return list((ctypes.c_uint64 * 7).from_address(pointer(getattr(torch.Tensor, TABLE), CAPSULE)))


def capsule_of(table, name=CAPSULE):
    """table must outlive it."""
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return make(ctypes.addressof(table), name, None)


@pytest.fixture
def patched(monkeypatch):
    """monkeypatch, after whose changes the package is set up again."""
    yield monkeypatch
    monkeypatch.undo()
    _ops._set_up()


def test_without_pytorchs_loop_it_has_threads_of_its_own(patched):
    assert (_ops._parallel_loop() != 0) == (VERSION >= (2, 10))
    patched.setattr(ctypes, "CDLL", lambda path: object())
    assert _ops._parallel_loop() == 0
    _ops._set_up()
    check_forward_and_backward("cpu", torch.bfloat16)


def test_the_versions_that_have_the_exchange_table():
    assert hasattr(torch.Tensor, TABLE) == _ops._set_up() == (VERSION >= (2, 10))


def test_forward_and_backward_without_the_exchange_table(patched, device, dtype):
    patched.delattr(torch.Tensor, TABLE, raising=False)
    assert _ops._set_up() is False
    check_forward_and_backward(device, dtype)


@pytest.mark.skipif(VERSION < (2, 10), reason="PyTorch has no exchange table")
def test_an_exchange_table_that_is_not_what_is_expected_is_not_used(patched, device):
    version, _, *functions = table_words()
    kept = []

    def uses(version=version, older=0, functions=functions, name=CAPSULE):
        kept.append((ctypes.c_uint64 * 7)(version, older, *functions))
        patched.setattr(torch.Tensor, TABLE, capsule_of(kept[-1], name))
        used = _ops._set_up()
        check_forward_and_backward(device, torch.bfloat16)
        return used

    newer = version + 99  # a major version of DLPack that there is not
    assert uses()
    assert uses(newer, older=ctypes.addressof(kept[0]))
    assert not uses(newer)
    assert not uses(functions=[*functions[:3], 0, functions[4]])  # no borrowed export
    assert not uses(functions=[*functions[:4], 0])  # no current stream
    assert not uses(name=b"another")
    patched.setattr(torch.Tensor, TABLE, ctypes.addressof(kept[0]))  # no capsule
    assert _ops._set_up() is False
    patched.setattr(torch, "__version__", type(torch.__version__)("2.9.1"))  # to which another package gave a table
    assert not uses()
