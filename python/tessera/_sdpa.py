import torch

from tessera._attention import attention_heads_first
from tessera._error import Error


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention on Tessera: same signature, [B, H, S, D] layout, top-left causal mask.

    attn_mask and dropout_p are not supported and raise tessera.Error; there is no fallback.
    """
    if attn_mask is not None:
        raise Error(
            "attn_mask is given; tessera.sdpa does not support it. is_causal, or the masks of tessera.attention "
            "(causal, window, cu_seqlens), may express the same mask",
            "unsupported",
        )
    if dropout_p != 0.0:
        raise Error(f"dropout_p is {dropout_p}; only 0 is supported", "unsupported")
    try:
        dims = query.dim()
        valid = dims == key.dim() == value.dim() and dims in (3, 4)
    except AttributeError:
        valid = False
    if not valid:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, torch.Tensor):
                raise Error(f"{name} is a {type(tensor).__name__}; a torch.Tensor is expected")
        given = ", ".join(str(t.dim()) for t in (query, key, value))
        raise Error(f"query, key and value have {given} dims; 4 are accepted, [B, H, S, D], or 3 for all three")
    if dims == 3:
        return sdpa(query[None], key[None], value[None], None, 0.0, is_causal, scale, enable_gqa)[0]
    if not enable_gqa and query.size(1) != key.size(1):
        raise Error(f"query has {query.size(1)} heads and key has {key.size(1)}; enable_gqa=True allows that")
    return attention_heads_first(query, key, value, "top_left" if is_causal else None, scale)
