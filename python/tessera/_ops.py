"""The operators as torch.library knows them: schema, kernels, shapes for tracing, gradients.

Eager calls on plain tensors bypass the dispatcher (see _attention.py); torch.compile, torch.export, tensor subclasses,
modes and transforms use these operators.

PyTorch has no public function for some of what a short eager call must know. Each private symbol that is used has a
fallback for a PyTorch without it: slower, with the same results (tests/python/test_private_symbols.py).
"""

import ctypes
import multiprocessing

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling, is_dynamo_compiling

from tessera import _native
from tessera._error import Error


def _private(path):
    """The attribute of torch with this dotted path, or None if this PyTorch does not have it."""
    owner = torch
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def in_dual_level():
    """Whether tensors may carry forward-mode tangents."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def _interceptors():
    """Functions that return 0, False or None while no mode, transform or profiler intercepts calls."""
    functions = (
        _private("_C._len_torch_dispatch_stack"),
        _private("_C._len_torch_function_stack"),
        _private("_C._functorch.peek_interpreter_stack"),
        _private("_C._autograd._profiler_enabled"),
        _private("_C._get_tracing_state"),  # torch.jit.trace records what the dispatcher sees
    )
    # If any is missing, every call goes through the dispatcher.
    return functions if None not in functions else (lambda: True,)


def _current_stream(index):
    return torch.cuda.current_stream(index).cuda_stream


def _is_any_autocast_enabled():
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _has_interpreters():
    peek = _private("_C._functorch.peek_interpreter_stack")
    return peek is not None and peek() is not None


def _is_forked():
    """Whether multiprocessing has forked this process."""
    method = multiprocessing.get_start_method(allow_none=True)  # children that are not forked have theirs set
    is_fork = method in (None, "fork") or isinstance(multiprocessing.current_process(), multiprocessing.context.ForkProcess)
    return multiprocessing.parent_process() is not None and is_fork


def _parallel_loop():
    """The address of PyTorch's loop over its own threads; 0 before 2.10, and in a forked process, where PyTorch's threads may be
    its parent's. Threads of Tessera's would compete for the cores with PyTorch's, which stay awake for a while after each
    operation."""
    if _is_forked():
        return 0
    try:
        loop = ctypes.CDLL(torch._C.__file__).torch_parallel_for  # it is found in what this library needs
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(loop, ctypes.c_void_p).value


def _set_up(dlpack=None):
    global is_transforming  # whether a transform of torch.func is active
    is_transforming = _private("_C._are_functorch_transforms_active") or _has_interpreters
    if dlpack is None:  # before 2.10, a table is another package's, and its current stream may not be PyTorch's
        dlpack = torch.__version__ >= (2, 10)
    members = {
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "float32": torch.float32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "int32": torch.int32,
        "uint8": torch.uint8,
        "get_num_threads": torch.get_num_threads,
        "current_stream": _private("_C._cuda_getCurrentRawStream") or _current_stream,
        "is_grad_enabled": torch.is_grad_enabled,
        "is_autocast_enabled": _private("_C._is_any_autocast_enabled") or _is_any_autocast_enabled,
        "empty_like": torch.empty_like,
        "interceptors": _interceptors(),
        "forward_ad": forward_ad,
    }
    return _native.setup(Error, members, dlpack, _parallel_loop())


_set_up()

# What _native.mode returns. Dispatched: something intercepts the call, or a tensor is of another class or has no
# memory. Plain: straight to the kernel. Gradients: straight to the kernel, recorded by autograd. Autocast is added.
DISPATCHED, PLAIN, GRADIENTS, AUTOCAST = 0, 1, 2, 4


def eager_mode(*tensors):
    """PLAIN or GRADIENTS if a call with these tensors, some of which may be None, may bypass the dispatcher. What autocast
    casts must have been cast before."""
    return DISPATCHED if is_dynamo_compiling() else _native.mode(*tensors) & ~AUTOCAST


def prepared(**given):
    """What eager_mode returns for these tensors, of which all but the first may be None, and the tensors as autocast has them."""
    tensors = tuple(given.values())
    mode = DISPATCHED if is_dynamo_compiling() else _native.mode(*tensors)
    if mode not in (PLAIN, GRADIENTS) or tensors[0] is None:
        expect_tensors(**given)
        tensors = under_autocast(*tensors)
    return mode & ~AUTOCAST, tensors


def under_autocast(*tensors):
    """The tensors, some of which may be None, as autocast has them for a matrix product."""
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype) for t in tensors
    )


def _rows(tensor):
    """The tensor with a contiguous last dim, which the kernels need; gradients are often expanded or transposed."""
    if tensor is None or tensor.dim() == 0 or tensor.stride(-1) == 1 or tensor.shape[-1] <= 1:
        return tensor
    return tensor.contiguous()


def _flat(tensor):
    """[..., N] as [rows, N]; reshape(-1, N) does not know the rows if N is 0."""
    if tensor is None or tensor.dim() == 2:
        return tensor
    return tensor[None] if tensor.dim() < 2 else tensor.flatten(0, -2)


def want_gradients(*tensors):
    """Whether a gradient of one of these tensors, some of which may be None, may be asked for. While Dynamo traces a transform
    of torch.func, tensors do not say so."""
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in tensors) or (is_dynamo_compiling() and is_transforming())


def expect_tensors(**given):
    """Raises unless all of these, of which all but the first may be None, are tensors."""
    needed = True
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) and (needed or value is not None):
            raise Error(f"{name} is a {type(value).__name__}; a torch.Tensor is expected")
        needed = False


# Constants of tessera/attention.h.
CAUSAL, DETERMINISTIC, ROTARY_INTERLEAVED, BATCH_INVARIANT = 1, 2, 4, 8
FP8, FP8_ROTATE, FP8_RESIDUAL, FP8_FAST = 16, 32, 64, 128
SCALE_PER_PAGE, SCALE_PER_TOKEN = 256, 512
UNSPECIFIED, TOP_LEFT, BOTTOM_RIGHT = 0, 1, 2


def refuse_forward_mode(*_):
    raise Error(
        "tessera does not support forward-mode AD (torch.func.jvp, jacfwd, torch.autograd.forward_ad): no kernel "
        "computes tangents; use reverse mode (backward, torch.autograd.grad, torch.func.grad)",
        "unsupported",
    )


def refuse_tangents(tensors):
    """Raises if one of the tensors carries a forward-mode tangent, which a kernel would drop."""
    if in_dual_level():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
                refuse_forward_mode()


def _at_level(kernel, functional):
    """A function that runs an operator's autograd kernel, (keyset, *args), inside a transform of torch.func, and records it at
    the transform's level with the formula of an autograd.Function."""

    class AtLevel(torch.autograd.Function):
        @staticmethod
        def forward(ctx, keyset, *args):
            result = kernel(keyset, *args)  # gradients are off: it does not record
            functional.setup_context(ctx, args, result)
            return result

        @staticmethod
        def backward(ctx, *gradients):
            ctx.needs_input_grad = ctx.needs_input_grad[1:]
            result = functional.backward(ctx, *gradients)
            return None, *(result if isinstance(result, tuple) else (result,))

    # Function.apply would hand it to all levels, but this kernel is the dispatcher's for one of them.
    return super(torch.autograd.Function, AtLevel).apply


class _Library(torch.library.Library):
    """A library whose autograd kernels refuse tangents, which torch.library.register_autograd's own ignore, and work inside
    transforms of torch.func, where those raise."""

    functional = {}  # by operator: an autograd.Function with its formula

    def impl(self, op_name, fn, dispatch_key="", **options):
        if dispatch_key != "Autograd":
            return super().impl(op_name, fn, dispatch_key, **options)
        allowed = _private("_functorch.autograd_function.enable_single_level_autograd_function")
        at_level = _at_level(fn, self.functional[op_name.split("::")[-1]])

        def kernel(keyset, *args, **kwargs):
            refuse_tangents(args)
            if allowed is None or not is_transforming() or not torch.is_grad_enabled():
                return fn(keyset, *args, **kwargs)
            with allowed():
                return at_level(keyset, *args)

        return super().impl(op_name, kernel, dispatch_key, **options)


_OPTIONS = (
    "float scale, float softcap, int flags, int alignment, int window_left, int window_right, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, int attention_chunk"
)

lib = _Library("tessera", "DEF")
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
    "Tensor? cache_batch_idx, Tensor? leftpad_k, Tensor? cu_seqlens_q, Tensor? k_scale, Tensor? v_scale, "
    f"{_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
lib.define(
    "decode_append(Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor? alibi, Tensor? cache_seqlens, Tensor? page_table, "
    "Tensor? cache_batch_idx, Tensor? leftpad_k, Tensor? cu_seqlens_q, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? k_new, Tensor? v_new, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? rotary_seqlens, Tensor(c!)? status, Tensor(d!)? k_token_scale, Tensor(e!)? v_token_scale, "
    f"{_OPTIONS}) -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)
DECODE_TENSORS, APPEND_TENSORS = 11, 19  # the leading arguments of the two


def _forward(*args):
    return _native.forward(*args[:6], args[6:], False, True)


def _decode(*args):
    return _native.decode(*args[:DECODE_TENSORS], *(None,) * 6, args[DECODE_TENSORS:], True)


def note_writes(*written):
    """Lets autograd notice that these tensors, some of which may be None, were written to: it may have saved them."""
    increment_version([tensor for tensor in written if tensor is not None])


def _decode_append(*args):
    refuse_append_gradient(args[:APPEND_TENSORS])
    *head, k_scale, v_scale = args[:DECODE_TENSORS]
    *appended, k_token_scale, v_token_scale = args[DECODE_TENSORS:APPEND_TENSORS]
    if k_token_scale is not None:  # scales that are written
        k_scale, v_scale = k_token_scale, v_token_scale
    result = _native.decode(*head, k_scale, v_scale, *appended, args[APPEND_TENSORS:], True)
    if appended[0] is not None:
        note_writes(*head[1:3], k_token_scale, v_token_scale)
    note_writes(appended[-1])
    return result


def backward(*args):
    """_native.backward. Incoming gradients are often expanded. The kernels need a contiguous last dim, and the fast
    ones no strides of 0: one copy costs less than a slower kernel."""
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
    lib.impl("decode_append", _decode_append, _device)


def refuse_vmap(*_, **__):
    raise Error("tessera has no vmap rule: fold the mapped dim into the batch, or into the rows", "unsupported")


for _name in ("attention", "attention_backward", "decode", "decode_append"):
    lib.impl(_name, refuse_vmap, "FuncTorchBatched")


def register_fake(name, shapes):
    """torch.library.register_fake for an operator, which then refuses tensors on different devices, as the kernels do."""

    def checked(*args, **kwargs):
        devices = {arg.device for arg in args if isinstance(arg, torch.Tensor)}
        if len(devices) > 1:
            raise Error(f"tensors of tessera::{name} are on {' and '.join(sorted(map(str, devices)))}; one device is accepted")
        return shapes(*args, **kwargs)

    torch.library.register_fake(f"tessera::{name}", checked, lib=lib)


def _fake_forward(q, k, v, *_):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = q.shape[-3]
    lse_shape = (q.shape[0], q.shape[2], rows) if q.dim() == 4 else (q.shape[1], rows)
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _fake_backward(q, k, v, *_):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


register_fake("attention", _fake_forward)
register_fake("attention_backward", _fake_backward)
register_fake("decode", _fake_forward)
register_fake("decode_append", _fake_forward)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6:]
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout, dlse):
    *inputs, out, lse = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    grads = _attention_backward(*inputs, *ctx.options, out, lse, dout, dlse)
    return *grads, *(None,) * (3 + len(ctx.options))


def refuse_second_derivative(ctx, *_):
    raise Error(
        "tessera.attention has no second derivative: its backward cannot itself be differentiated", "unsupported"
    )


def register_autograd(name, gradients, setup_context=None):
    """torch.library.register_autograd for an operator. Returns the function to call it with: torch.func's transforms need an
    autograd.Function with setup_context, which torch.library does not make."""
    operator = getattr(torch.ops.tessera, name)

    class Functional(torch.autograd.Function):
        @staticmethod
        def forward(*args):
            return operator(*args)

        @staticmethod
        def setup_context(ctx, inputs, output):
            if setup_context is not None:
                setup_context(ctx, inputs, output)

        backward = staticmethod(gradients)
        jvp = staticmethod(refuse_forward_mode)
        vmap = staticmethod(refuse_vmap)

    lib.functional[name] = Functional
    torch.library.register_autograd(f"tessera::{name}", gradients, setup_context=setup_context, lib=lib)

    def call(*args):
        return Functional.apply(*args) if not is_compiling() and is_transforming() else operator(*args)

    return call


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(gradient, *_):
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *_):
        raise Error("tessera has no second derivatives", "unsupported")

    jvp = staticmethod(refuse_forward_mode)
    vmap = staticmethod(refuse_vmap)


def final(gradient, *inputs):
    """A gradient that has been computed from these inputs without a graph: with create_graph=True, differentiating it raises."""
    return _Final.apply(gradient, *inputs) if torch.is_grad_enabled() else gradient


class Backward(torch.autograd.Function):
    """backward for create_graph=True."""

    @staticmethod
    def forward(*args):
        return backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(refuse_second_derivative)
    jvp = staticmethod(refuse_forward_mode)
    vmap = staticmethod(refuse_vmap)


def _refuse_decode_gradient(*_):
    raise Error(
        "tessera.decode has no gradient: it reads a cache at inference; use tessera.attention to train", "unsupported"
    )


def refuse_append_gradient(tensors):
    """Autograd has no formula for operators that write to their arguments, so the call is refused, not its backward."""
    if torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors):
        _refuse_decode_gradient()


attention = register_autograd("attention", _gradients, _setup_context)
_attention_backward = register_autograd("attention_backward", refuse_second_derivative)
decode = register_autograd("decode", _refuse_decode_gradient)
