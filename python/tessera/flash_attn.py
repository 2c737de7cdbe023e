"""The functions of the flash_attn package on Tessera: change the import, keep the code.

    from tessera.flash_attn import flash_attn_func

Layouts, defaults and semantics are flash_attn's: [B, S, H, D], bottom-right causal masks and windows. Dropout is not
supported and raises tessera.Error. In place of attention probabilities, None is returned. As in flash_attn, a tensor
whose last dim is not contiguous is copied, and on a GPU one whose head dim is no multiple of 8 is copied and padded.
"""

import torch
from torch.nn.functional import pad as _pad

from tessera import _flash
from tessera._error import Error
from tessera._flash import unpacked as _unpacked

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "pad_input",
    "unpad_input",
]


def _attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, probs, **rest):
    _refuse_dropout(dropout_p)
    out = _flash.attend(
        q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, probs, **rest
    )
    return (*out, None) if probs else out


def _refuse_dropout(dropout_p):
    if dropout_p != 0.0:
        raise Error(f"dropout_p is {dropout_p}; only 0 is supported", "unsupported")


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """q: [B, Sq, Hq, D], k, v: [B, Sk, Hkv, D] -> out, or (out, lse, None) with return_attn_probs."""
    return _attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """qkv: [B, S, 3, H, D]."""
    q, k, v = _unpacked(qkv, "qkv", 3, 5)
    return _attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """q: [B, Sq, Hq, D], kv: [B, Sk, 2, Hkv, D]."""
    k, v = _unpacked(kv, "kv", 2, 5)
    return _attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """q: [total_q, Hq, D], k, v: [total_k, Hkv, D], cu_seqlens: int32 [B + 1]; lse is [Hq, total_q].

    With block_table, int32 [B, max_pages_per_seq], k and v are [pages, page_size, Hkv, D], which are read in place; if
    gradients are wanted, the pages are gathered first.
    """
    if block_table is not None:
        _refuse_dropout(dropout_p)
        out = _flash.paged_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), max_seqlen_q, max_seqlen_k, block_table,
            (softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs),
        )  # fmt: skip
        return (*out, None) if return_attn_probs else out
    return _attend(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """qkv: [total, 3, H, D]."""
    q, k, v = _unpacked(qkv, "qkv", 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """q: [total_q, Hq, D], kv: [total_k, 2, Hkv, D]."""
    k, v = _unpacked(kv, "kv", 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """q: [B, Sq, Hq, D] against k_cache, v_cache: [B, S, Hkv, D], or [pages, page_size, Hkv, D] with block_table.

    k and v, [B, Snew, Hkv, D], are first written into the cache after its cache_seqlens (an int, or int32 [B]) keys,
    rotated by rotary_cos and rotary_sin, as q is. num_splits is a hint and is ignored. Inference only.

    An int that does not fit the cache raises. Lengths in a tensor on a GPU are known to the device alone: a sequence
    that does not fit gives 0, its cache is not written, and later calls are not affected.
    """
    return _flash.with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        page_table=block_table,
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=None,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_softmax_lse,
    )


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """flash_attn.bert_padding's: the rows of [B, S, ...] that [B, S] masks do not leave out, packed, with gradients.

    Returns (rows [total, ...], their indices among B * S, cu_seqlens int32 [B + 1], the longest length, an int, and the lengths
    that attention_mask gives, int32 [B]). Rows of unused_mask are packed as well.
    """
    if hidden_states.shape[:2] != attention_mask.shape:
        raise Error(f"attention_mask is {list(attention_mask.shape)}, but hidden_states is {list(hidden_states.shape)}")
    kept = attention_mask.bool() if unused_mask is None else attention_mask.bool() | unused_mask.bool()
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = _pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    rows = hidden_states.flatten(0, 1).index_select(0, indices)
    return rows, indices, cu_seqlens, longest, attention_mask.bool().sum(-1, dtype=torch.int32)


def pad_input(hidden_states, indices, batch, seqlen):
    """flash_attn.bert_padding's: packed rows [total, ...] back at their indices in [batch, seqlen, ...], 0 elsewhere."""
    whole = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return whole.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
