import torch

from tessera._attention import attention_heads_first
from tessera._error import Error


def sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """F.scaled_dot_product_attention by Tessera: same signature, [B, H, S, D] layout, causal from the top left.

    attn_mask and dropout_p are not served and raise; nothing falls back.
    """
    if attn_mask is not None:
        raise Error(
            "attn_mask is given, and tessera.sdpa takes none; is_causal, or the masks of tessera.attention "
            "(causal, window, cu_seqlens), may say the same",
            "unsupported",
        )
    if dropout_p != 0.0:
        raise Error(f"dropout_p is {dropout_p}; only 0 is served", "unsupported")
    try:
        dims = query.dim()
        served = dims == key.dim() == value.dim() and dims in (3, 4)
    except AttributeError:
        served = False
    if not served:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if not isinstance(tensor, torch.Tensor):
                raise Error(f"{name} is a {type(tensor).__name__}; a torch.Tensor is expected")
        given = ", ".join(str(t.dim()) for t in (query, key, value))
        raise Error(f"query, key and value have {given} dims; 4 are accepted, [B, H, S, D], or 3 for all three")
    if dims == 3:
        return sdpa(query[None], key[None], value[None], None, 0.0, is_causal, scale, enable_gqa)[0]
    if not enable_gqa and query.size(1) != key.size(1):
        raise Error(f"query has {query.size(1)} heads and key has {key.size(1)}; enable_gqa=True lets queries share them")
    return attention_heads_first(query, key, value, "top_left" if is_causal else None, scale)
