"""Fused attention for PyTorch: exact, on the CPU and on NVIDIA GPUs.

    import tessera
    out = tessera.attention(q, k, v, causal=True)      # q, k, v: [B, S, H, D]

tessera.decode is attention against a KV cache, tessera.quantize_fp8 the rounding of attention(precision="fp8"). tessera.sdpa has the signature of F.scaled_dot_product_attention,
tessera.flash_attn and tessera.flash_attn_interface have the functions of the flash_attn package and of FlashAttention-3,
and tessera.transformers.register() makes attn_implementation="tessera" available to Hugging Face models.
tessera.linear is a linear layer with its activation and residual in one kernel, tessera.gemm any such product;
tessera.grouped_linear and tessera.grouped_gemm are one for each of several groups of rows, such as those of experts. tessera.mlp is
two linear layers with an activation or a gated pair between them, tessera.moe a mixture of such experts with its router.
tessera.rms_norm and tessera.layer_norm add a residual on the way, tessera.rotary turns queries and keys, and tessera.gmm_nll
is the likelihood of Gaussian mixtures, tessera.mlp_gmm_nll that of the mixtures that MLPs give. tessera.linear_cross_entropy is the loss of a language model's head, whose logits are never
all in memory.
Every call that fails raises tessera.Error with a message that says why.
"""

from tessera._error import Error
from tessera._attention import attention, decode, explain
from tessera._cross_entropy import linear_cross_entropy
from tessera._fp8 import quantize_fp8
from tessera._gemm import gemm, grouped_gemm, grouped_linear, grouped_mlp, linear
from tessera._loss import gmm_nll, mlp_gmm_nll
from tessera._mlp import mlp
from tessera._moe import moe
from tessera._norm import layer_norm, rms_norm, rotary
from tessera._sdpa import sdpa
from tessera import _flops  # for FlopCounterMode
from tessera import _native

__version__ = _native.version()
__all__ = [
    "Error",
    "attention",
    "decode",
    "explain",
    "gemm",
    "gmm_nll",
    "grouped_gemm",
    "grouped_linear",
    "grouped_mlp",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "mlp",
    "mlp_gmm_nll",
    "moe",
    "quantize_fp8",
    "rms_norm",
    "rotary",
    "sdpa",
]
