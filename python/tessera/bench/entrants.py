"""The entrants: Tessera and its peers. Each is made for a cell and has forward() and, after start_backward(),
backward(). A decode cell's forward() is its decode step.

Tensors are [B, S, H, D] in memory; SDPA's backends see them as [B, H, S, D] through strides, which all of them accept
without a copy. The forward is timed as in inference (no gradients, no LSE); the backward is timed alone, after an
untimed forward. choose() is called before either and is not timed: it sets the process-wide switches of SDPA.
"""

from . import library


class Tessera:
    """Fast mode; Deterministic is the same with the flag set."""

    deterministic = False

    def __init__(self, cell, q, k, v, lib):
        import torch

        self.lib, self.cell = lib, cell
        self.q, self.k, self.v = q, k, v
        self.out = torch.empty(cell.out_shape, dtype=q.dtype, device=q.device)
        self.run_forward = self.plan_forward()
        self.explanation = self.run_forward.explanation

    def plan_forward(self):
        """Decode runs through its own op or, if no kernel serves that, as users must: as the forward of one query."""
        tensors = dict(q=self.q, k=self.k, v=self.v, out=self.out)
        if not self.cell.decode:
            return library.Plan(self.lib, library.FORWARD, self.cell.causal, **tensors)
        try:
            self.through = "decode"
            return library.Plan(self.lib, library.DECODE, False, **tensors)
        except library.Refused as refusal:
            self.through, self.refusal = "forward", refusal.reason
            return library.Plan(self.lib, library.FORWARD, False, **tensors)

    def choose(self):
        pass

    def forward(self):
        self.run_forward()
        return self.out

    def start_backward(self, dout):
        import torch

        b, s, h, _ = self.q.shape
        self.lse = torch.empty(b, h, s, dtype=torch.float32, device=self.q.device)
        self.saved = torch.empty_like(self.out)
        library.Plan(self.lib, library.FORWARD, self.cell.causal, q=self.q, k=self.k, v=self.v, out=self.saved,
                     lse=self.lse)()
        self.grads = tuple(torch.empty_like(t) for t in (self.q, self.k, self.v))
        dq, dk, dv = self.grads
        self.run_backward = library.Plan(self.lib, library.BACKWARD, self.cell.causal, self.deterministic, q=self.q,
                                         k=self.k, v=self.v, out=self.saved, lse=self.lse, dout=dout, dq=dq, dk=dk,
                                         dv=dv)
        self.explanation = self.run_backward.explanation

    def backward(self):
        self.run_backward()
        return self.grads


class TesseraDeterministic(Tessera):
    deterministic = True


class Torch:
    """Anything with autograd support: `attend(q, k, v)` on [B, S, H, D] tensors."""

    def __init__(self, cell, q, k, v, attend, choose=lambda: None):
        self.cell, self.attend, self.choose = cell, attend, choose
        self.q, self.k, self.v = q, k, v

    def forward(self):
        return self.attend(self.q, self.k, self.v)

    def start_backward(self, dout):
        import torch

        self.leaves = [t.detach().requires_grad_() for t in (self.q, self.k, self.v)]
        self.dout = dout
        self.choose()
        with torch.enable_grad():
            self.result = self.attend(*self.leaves)

    def backward(self):
        import torch

        return torch.autograd.grad(self.result, self.leaves, self.dout, retain_graph=True)


def sdpa(name, deterministic=False):
    def make(cell, q, k, v, _):
        import torch
        import torch.nn.functional as functional

        switches = torch.backends.cuda
        backends = {"flash": switches.enable_flash_sdp, "cudnn": switches.enable_cudnn_sdp,
                    "efficient": switches.enable_mem_efficient_sdp, "math": switches.enable_math_sdp}

        def choose():
            for backend, enable in backends.items():
                enable(backend == name)
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # that would be a kernel of its own

        grouped = {"enable_gqa": True} if cell.heads_kv != cell.heads_q else {}

        def attend(q, k, v):
            return functional.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=cell.causal,
                **grouped).transpose(1, 2)

        return Torch(cell, q, k, v, attend, choose)

    return make


def flex(cell, q, k, v, _):
    import torch
    from torch.nn.attention import flex_attention as module

    mask = None
    if cell.causal:
        mask = module.create_block_mask(lambda b, h, i, j: i >= j, None, None, cell.seq_q, cell.seq_k, device=q.device)
    torch.compiler.reset()
    compiled = torch.compile(module.flex_attention, dynamic=False)

    def attend(q, k, v):
        return compiled(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), block_mask=mask,
                        enable_gqa=cell.heads_kv != cell.heads_q).transpose(1, 2)

    return Torch(cell, q, k, v, attend)


def flash_attn(module_name, deterministic=False):
    def make(cell, q, k, v, _):
        import importlib

        function = importlib.import_module(module_name).flash_attn_func

        def attend(q, k, v):
            result = function(q, k, v, causal=cell.causal, deterministic=deterministic)
            return result[0] if isinstance(result, tuple) else result

        return Torch(cell, q, k, v, attend)

    return make


class Vllm:
    """FlashAttention-3 as vLLM builds it: forward only, over packed sequences of equal length."""

    def __init__(self, cell, q, k, v, _):
        import torch
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        starts = torch.arange(0, cell.batch + 1, dtype=torch.int32, device=q.device)
        packed = [t.flatten(0, 1) for t in (q, k, v)]
        self.forward = lambda: flash_attn_varlen_func(
            *packed, max_seqlen_q=cell.seq_q, cu_seqlens_q=starts * cell.seq_q, max_seqlen_k=cell.seq_k,
            cu_seqlens_k=starts * cell.seq_k, causal=cell.causal, fa_version=3).view(cell.out_shape)

    def choose(self):
        pass

    def start_backward(self, dout):
        raise library.Refused("vLLM's build has no backward")


class FlashInfer:
    """Forward only, over packed sequences of equal length."""

    def __init__(self, cell, q, k, v, _):
        import flashinfer
        import torch

        self.shape = cell.out_shape
        starts = torch.arange(0, cell.batch + 1, dtype=torch.int32, device=q.device)
        self.wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=q.device), "NHD")
        self.wrapper.plan(starts * cell.seq_q, starts * cell.seq_k, cell.heads_q, cell.heads_kv, cell.dim_qk,
                          causal=cell.causal, q_data_type=q.dtype)
        self.packed = [t.flatten(0, 1) for t in (q, k, v)]

    def choose(self):
        pass

    def forward(self):
        return self.wrapper.run(*self.packed).view(self.shape)

    def start_backward(self, dout):
        raise library.Refused("flashinfer has no backward")


# By name, as in --peers: how to make one, and what it is.
OURS = {
    "tessera": (Tessera, "Tessera"),
    "tessera-det": (TesseraDeterministic, "Tessera, deterministic backward"),
}
PEERS = {
    "fa2": (sdpa("flash"), "SDPA, FlashAttention-2 backend"),
    "cudnn": (sdpa("cudnn"), "SDPA, cuDNN backend"),
    "efficient": (sdpa("efficient"), "SDPA, memory-efficient backend"),
    "math": (sdpa("math"), "SDPA, unfused"),
    "fa2-det": (sdpa("flash", True), "SDPA, FlashAttention-2 backend, deterministic"),
    "cudnn-det": (sdpa("cudnn", True), "SDPA, cuDNN backend, deterministic"),
    "flex": (flex, "FlexAttention, compiled"),
    "flash_attn": (flash_attn("flash_attn"), "flash_attn package"),
    "fa3": (flash_attn("flash_attn_interface"), "FlashAttention-3 package"),
    "fa3-det": (flash_attn("flash_attn_interface", True), "FlashAttention-3 package, deterministic"),
    "fa3-vllm": (Vllm, "FlashAttention-3 in vLLM"),
    "fa4": (flash_attn("flash_attn.cute"), "FlashAttention-4 package"),
    "fa4-det": (flash_attn("flash_attn.cute", True), "FlashAttention-4 package, deterministic"),
    "flashinfer": (FlashInfer, "flashinfer package"),
}
# FlashAttention-4 installs the folder flash_attn, too, without FlashAttention-2's modules in it.
PACKAGES = {"flash_attn": "flash_attn.flash_attn_interface", "fa3": "flash_attn_interface",
            "fa3-det": "flash_attn_interface", "fa3-vllm": "vllm.vllm_flash_attn", "fa4": "flash_attn.cute",
            "fa4-det": "flash_attn.cute", "flashinfer": "flashinfer"}


def chosen_of(text, known, is_installed):
    """--peers: the names that it lists and that are installed, and the others of its list."""
    names = list(known) if text == "all" else [] if text == "none" else text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"--peers has '{unknown[0]}'; {', '.join(known)}, all and none are accepted")
    missing = [name for name in names if not is_installed(name)]
    return [name for name in names if name not in missing], missing


def installed(name):
    import importlib.util

    try:
        return name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None
    except Exception:  # the package around it is missing or cannot be imported
        return False
