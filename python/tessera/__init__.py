"""Fused attention for PyTorch: exact, on the CPU and on NVIDIA GPUs.

    import tessera
    out = tessera.attention(q, k, v, causal=True)      # q, k, v: [B, S, H, D]

tessera.decode is attention against a KV cache. tessera.sdpa has the signature of F.scaled_dot_product_attention,
tessera.flash_attn and tessera.flash_attn_interface have the functions of the flash_attn package and of FlashAttention-3,
and tessera.transformers.register() makes attn_implementation="tessera" available to Hugging Face models.
tessera.linear is a linear layer with its activation and residual in one kernel, tessera.gemm any such product.
Every call that fails raises tessera.Error with a message that says why.
"""

from tessera._error import Error
from tessera._attention import attention, decode, explain
from tessera._gemm import gemm, linear
from tessera._sdpa import sdpa
from tessera import _native

__version__ = _native.version()
__all__ = ["Error", "attention", "decode", "explain", "gemm", "linear", "sdpa"]
