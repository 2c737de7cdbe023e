"""Fused attention for PyTorch: exact, on the CPU and on NVIDIA GPUs.

    import tessera
    out = tessera.attention(q, k, v, causal=True)      # q, k, v: [B, S, H, D]

tessera.sdpa has the signature of F.scaled_dot_product_attention, tessera.flash_attn the names of the flash_attn
package, and tessera.transformers.register() makes attn_implementation="tessera" known to Hugging Face models.
Every failure is a tessera.Error with a sentence.
"""

from tessera._error import Error
from tessera._attention import attention, decode, explain
from tessera._sdpa import sdpa
from tessera import _native

__version__ = _native.version()
__all__ = ["Error", "attention", "decode", "explain", "sdpa"]
