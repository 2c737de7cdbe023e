"""libtessera through ctypes: plans on torch tensors, run on torch's current stream."""

import ctypes
import os
import pathlib

FORWARD, BACKWARD, DECODE = 0, 1, 2
CAUSAL, DETERMINISTIC = 1, 2
UNSPECIFIED, TOP_LEFT = 0, 1
CPU, CUDA = 1, 2


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
    """The library would not do it; the message is its own sentence."""


def reason_of(refusal):
    """A sentence about the kernels that do not serve it, or the library's first line."""
    lines = str(refusal).splitlines()
    return "; ".join(line for line in lines if line.startswith("refused")) or lines[0]


def find_library(given=None):
    """--library, TESSERA_LIBRARY, next to the package, or the checkout's build folder; None where there is none."""
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
        self.lib.tessera_last_error.restype = ctypes.c_char_p
        self.lib.tessera_version.restype = ctypes.c_char_p
        self.lib.tessera_plan_explain.restype = ctypes.c_char_p
        self.lib.tessera_plan_explain.argtypes = [ctypes.c_void_p]
        self.lib.tessera_plan_workspace.restype = ctypes.c_size_t
        self.lib.tessera_plan_workspace.argtypes = [ctypes.c_void_p]
        self.lib.tessera_plan_destroy.argtypes = [ctypes.c_void_p]
        self.lib.tessera_plan_destroy.restype = None
        self.lib.tessera_plan_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t,
                                              ctypes.c_void_p]

    def check(self, status):
        if status != 0:
            raise Refused(self.lib.tessera_last_error().decode().strip())

    def version(self):
        return self.lib.tessera_version().decode()


def view_of(tensor):
    """A tessera_tensor on a torch tensor, which must outlive it."""
    import torch

    code, bits = {torch.float32: (2, 32), torch.float16: (2, 16), torch.bfloat16: (4, 16)}[tensor.dtype]
    rank = tensor.dim()
    device = Device(CUDA, tensor.device.index or 0) if tensor.is_cuda else Device(CPU, 0)
    return Tensor(tensor.data_ptr(), device, rank, DType(code, bits, 1), (ctypes.c_int64 * rank)(*tensor.shape),
                  (ctypes.c_int64 * rank)(*tensor.stride()), 0)


class Plan:
    """A planned call on fixed tensors ([B, S, H, D]); calling it is the library's call and nothing else."""

    def __init__(self, library, op, causal, deterministic=False, **tensors):
        import torch

        self.library = library
        self.tensors = tensors
        self.views = {name: view_of(tensor) for name, tensor in tensors.items()}
        flags = (CAUSAL if causal else 0) | (DETERMINISTIC if deterministic else 0)
        self.args = Attention(struct_size=ctypes.sizeof(Attention), flags=flags, window_left=-1, window_right=-1,
                              alignment=UNSPECIFIED if op == DECODE else TOP_LEFT)
        for name, tensor in self.views.items():
            setattr(self.args, name, ctypes.pointer(tensor))
        plan = ctypes.c_void_p()
        library.check(library.lib.tessera_plan_create(ctypes.c_int(op), ctypes.byref(self.args), ctypes.byref(plan)))
        self.plan = plan
        self.bytes = library.lib.tessera_plan_workspace(plan)
        self.explanation = library.lib.tessera_plan_explain(plan).decode()
        device = tensors["q"].device
        self.scratch = torch.empty(max(self.bytes, 1), dtype=torch.uint8, device=device)
        self.on_gpu = device.type == "cuda"
        self.pointer = self.scratch.data_ptr()
        self.arguments = ctypes.byref(self.args)
        self.run = library.lib.tessera_plan_run

    def __call__(self):
        import torch

        stream = torch.cuda.current_stream().cuda_stream if self.on_gpu else None
        self.library.check(self.run(self.plan, self.arguments, self.pointer, self.bytes, stream))

    def __del__(self):
        if getattr(self, "plan", None):
            self.library.lib.tessera_plan_destroy(self.plan)
            self.plan = None
