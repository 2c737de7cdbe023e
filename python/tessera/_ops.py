"""The operators as torch.library knows them: schema, kernels, shapes for tracing, gradients.

Eager calls on plain tensors skip the dispatcher (see _attention.py); torch.compile, torch.export, tensor subclasses
and modes come through here.
"""

import torch

from tessera import _native
from tessera._error import Error


def _intercepting():
    """Functions of torch that answer 0, False or None while no mode, transform or profiler looks at calls."""
    wanted = (
        (torch._C, "_len_torch_dispatch_stack"),
        (torch._C, "_len_torch_function_stack"),
        (torch._C._functorch, "peek_interpreter_stack"),
        (torch._C._autograd, "_profiler_enabled"),
        (torch._C, "_get_tracing_state"),  # torch.jit.trace, which records what the dispatcher sees
    )
    if all(hasattr(owner, name) for owner, name in wanted):
        return tuple(getattr(owner, name) for owner, name in wanted)
    return (lambda: True,)  # a torch that can no longer be asked: every call goes through the dispatcher


def _no_stream(_):
    raise Error("this PyTorch has no CUDA")


def _set_up(dlpack=True):
    pieces = {
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "int32": torch.int32,
        "uint8": torch.uint8,
        "get_num_threads": torch.get_num_threads,
        "current_stream": getattr(torch._C, "_cuda_getCurrentRawStream", _no_stream),
        "is_grad_enabled": torch.is_grad_enabled,
        "is_autocast_enabled": torch._C._is_any_autocast_enabled,
        "empty_like": torch.empty_like,
        "unplain": _intercepting(),
    }
    return _native.setup(Error, pieces, dlpack)


_set_up()

# The C ABI's numbers.
CAUSAL, DETERMINISTIC = 1, 2
UNSPECIFIED, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2

_OPTIONS = (
    "float scale, float softcap, int flags, int alignment, int window_left, int window_right, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k"
)

lib = torch.library.Library("tessera", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)
lib.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? alibi, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    f"{_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
lib.define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor? alibi, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    f"{_OPTIONS}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse) -> (Tensor dq, Tensor dk, Tensor dv)",
    tags=_TAGS,
)
lib.define(
    "decode(Tensor q, Tensor k, Tensor v, Tensor? alibi, Tensor? cache_seqlens, Tensor? page_table, "
    f"{_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)


def _forward(*args):
    return _native.forward(*args[:6], args[6:], False, True)


def _decode(*args):
    return _native.decode(*args[:6], args[6:], True)


def backward(*args):
    """_native.backward. Gradients often come expanded; the kernels want rows in one piece, and the fast ones no strides
    of 0, which one copy is cheaper than going without."""
    *head, dout, dlse = args
    if dout.stride(-1) != 1 or 0 in dout.stride():
        dout = dout.contiguous()
    if dlse is not None and dlse.stride(-1) != 1:
        dlse = dlse.contiguous()
    return _native.backward(*head, dout, dlse)


def _backward(*args):
    return backward(*args[:6], args[6:-4], False, *args[-4:])


for _device in ("CPU", "CUDA"):
    lib.impl("attention", _forward, _device)
    lib.impl("attention_backward", _backward, _device)
    lib.impl("decode", _decode, _device)


def refuse_vmap(*_, **__):
    raise Error(
        "tessera has no vmap rule: q, k and v already have a batch dim and a head dim, "
        "so fold the mapped dim into one of those"
    )


for _name in ("attention", "attention_backward", "decode"):
    lib.impl(_name, refuse_vmap, "FuncTorchBatched")


def _fake_forward(q, k, v, *_):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = q.shape[-3]
    lse_shape = (q.shape[0], q.shape[2], rows) if q.dim() == 4 else (q.shape[1], rows)
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _fake_backward(q, k, v, *_):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


torch.library.register_fake("tessera::attention", _fake_forward, lib=lib)
torch.library.register_fake("tessera::attention_backward", _fake_backward, lib=lib)
torch.library.register_fake("tessera::decode", _fake_forward, lib=lib)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):
    *inputs, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    grads = torch.ops.tessera.attention_backward(*inputs, *ctx.options, out, lse, dout, dlse)
    return *grads, *(None,) * (3 + len(ctx.options))


def refuse_second_derivative(ctx, *_):
    raise Error(
        "tessera.attention has no second derivative: its backward cannot itself be differentiated", "unsupported"
    )


def _refuse_decode_gradient(ctx, *_):
    raise Error(
        "tessera.decode has no gradient: it reads a cache at inference; use tessera.attention to train", "unsupported"
    )


torch.library.register_autograd("tessera::attention", _gradients, setup_context=_setup_context, lib=lib)
torch.library.register_autograd("tessera::attention_backward", refuse_second_derivative, lib=lib)
torch.library.register_autograd("tessera::decode", _refuse_decode_gradient, lib=lib)
