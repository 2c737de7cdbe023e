"""libtessera through ctypes: plans on torch tensors, run on torch's current stream."""

import ctypes
import json
import os
import pathlib

# Constants of tessera/tessera.h and tessera/attention.h.
FORWARD, BACKWARD, DECODE = 0, 1, 2
CAUSAL, DETERMINISTIC = 1, 2
ALIGN_UNSPECIFIED, ALIGN_TOP_LEFT = 0, 1
CPU, CUDA = 1, 2
UNSUPPORTED = 2
EXPLAIN_JSON = 1


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


TensorPtr = ctypes.POINTER(Tensor)


class Attention(ctypes.Structure):
    _fields_ = (
        [("struct_size", ctypes.c_size_t)]
        + [(name, TensorPtr) for name in ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv")]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("alibi_slopes", TensorPtr)]
        + [("flags", ctypes.c_uint32), ("alignment", ctypes.c_int)]
        + [("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64)]
        + [("cu_seqlens_q", TensorPtr), ("cu_seqlens_k", TensorPtr)]
        + [("max_seqlen_q", ctypes.c_int64), ("max_seqlen_k", ctypes.c_int64)]
        + [("cache_seqlens", TensorPtr), ("page_table", TensorPtr)]
    )


class Refused(RuntimeError):
    """The library returned an error; the message is the library's. If no kernel serves the problem, `refused` says why,
    as explain does: [{"kernel": ..., "reason": ...}, ...]."""

    def __init__(self, message, refused=()):
        super().__init__(message)
        self.refused = list(refused)

    @property
    def reason(self):
        """On one line."""
        lines = str(self).splitlines() or [""]
        return "; ".join(f"{each['kernel']}: {each['reason']}" for each in self.refused) or lines[0]


def find_library(given=None):
    """--library, TESSERA_LIBRARY, next to the package, or the checkout's build folder; None if there is none."""
    if given or os.environ.get("TESSERA_LIBRARY"):
        return pathlib.Path(given or os.environ["TESSERA_LIBRARY"])
    package = pathlib.Path(__file__).resolve().parent.parent
    for folder in (package, package / "lib", package.parent.parent / "build" / "lib"):
        for name in (*sorted(folder.glob("libtessera.so*")), *folder.glob("_native.abi3.so")):
            return name
    return None


class Library:
    def __init__(self, path):
        self.path = path
        self.lib = ctypes.CDLL(str(path))
        pointer, size, text = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
        args = ctypes.POINTER(Attention)
        for name, result, arguments in (
            ("tessera_last_error", text, []),
            ("tessera_version", text, []),
            ("tessera_set_num_threads", ctypes.c_int, [ctypes.c_int32]),
            ("tessera_plan_explain", text, [pointer, ctypes.c_int]),
            ("tessera_plan_workspace", size, [pointer]),
            ("tessera_plan_destroy", None, [pointer]),
            ("tessera_attention_plan_create", ctypes.c_int, [ctypes.c_int, args, ctypes.POINTER(pointer)]),
            ("tessera_attention_plan_run", ctypes.c_int, [pointer, args, pointer, size, pointer]),
            ("tessera_attention_explain", ctypes.c_int,
             [ctypes.c_int, args, text, ctypes.c_int, text, size, ctypes.POINTER(size)]),
        ):
            function = getattr(self.lib, name, None)
            if function is None:
                raise OSError(f"{path} has no {name}: it is not libtessera, or one of another version")
            function.restype, function.argtypes = result, arguments

    def check(self, status):
        if status != 0:
            raise Refused(self.lib.tessera_last_error().decode().strip())

    def version(self):
        return self.lib.tessera_version().decode()

    def set_num_threads(self, threads):
        self.check(self.lib.tessera_set_num_threads(threads))

    def explain(self, op, args):
        """The library's explanation for these arguments, as a dict."""
        needed = ctypes.c_size_t()
        self.check(self.lib.tessera_attention_explain(op, args, None, EXPLAIN_JSON, None, 0, ctypes.byref(needed)))
        text = ctypes.create_string_buffer(needed.value)
        self.check(self.lib.tessera_attention_explain(op, args, None, EXPLAIN_JSON, text, needed.value, None))
        return json.loads(text.value)

    def plan(self, op, args):
        """A plan's handle; Refused if there is none."""
        plan = ctypes.c_void_p()
        status = self.lib.tessera_attention_plan_create(op, args, ctypes.byref(plan))
        if status == UNSUPPORTED:
            message = self.lib.tessera_last_error().decode().strip()
            raise Refused(message, self.explain(op, args)["refused"])
        self.check(status)
        return plan


def view_of(tensor):
    """A tessera_tensor on a torch tensor, which must outlive it."""
    import torch

    code, bits = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16)}[tensor.dtype]
    rank = tensor.dim()
    device = Device(CUDA, tensor.device.index or 0) if tensor.is_cuda else Device(CPU, 0)
    return Tensor(tensor.data_ptr(), device, rank, DType(code, bits, 1), (ctypes.c_int64 * rank)(*tensor.shape),
                  (ctypes.c_int64 * rank)(*tensor.stride()), 0)


class Plan:
    """A planned call on fixed tensors ([B, S, H, D]); calling it is the library's call and nothing else.

    explanation: the library's, as a dict."""

    def __init__(self, library, op, causal, deterministic=False, **tensors):
        import torch

        self.library = library
        self.tensors = tensors  # kept alive
        self.views = {name: view_of(tensor) for name, tensor in tensors.items()}
        flags = (CAUSAL if causal else 0) | (DETERMINISTIC if deterministic else 0)
        self.args = Attention(struct_size=ctypes.sizeof(Attention), flags=flags, window_left=-1, window_right=-1,
                              alignment=ALIGN_UNSPECIFIED if op == DECODE else ALIGN_TOP_LEFT)
        for name, tensor in self.views.items():
            setattr(self.args, name, ctypes.pointer(tensor))
        self.arguments = ctypes.byref(self.args)
        self.plan = library.plan(op, self.arguments)
        self.bytes = library.lib.tessera_plan_workspace(self.plan)
        self.explanation = json.loads(library.lib.tessera_plan_explain(self.plan, EXPLAIN_JSON))
        device = tensors["q"].device
        self.workspace = torch.empty(max(self.bytes, 1), dtype=torch.uint8, device=device)
        self.pointer = self.workspace.data_ptr()
        self.on_gpu = device.type == "cuda"
        self.run = library.lib.tessera_attention_plan_run

    def __call__(self):
        import torch

        stream = torch.cuda.current_stream().cuda_stream if self.on_gpu else None
        self.library.check(self.run(self.plan, self.arguments, self.pointer, self.bytes, stream))

    def __del__(self):
        if getattr(self, "plan", None):
            self.library.lib.tessera_plan_destroy(self.plan)
            self.plan = None
