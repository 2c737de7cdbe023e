"""The functions of the flash_attn package on Tessera: change the import, keep the code.

    from tessera.flash_attn import flash_attn_func

Layouts, defaults and semantics are flash_attn's: [B, S, H, D], bottom-right causal masks and windows. What is not
supported (dropout, rotary embedding inside the cache update, ...) raises tessera.Error, which names the argument. In
place of attention probabilities, None is returned.
"""

import torch

from tessera._attention import attention, decode
from tessera._error import Error

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _refuse(**arguments):
    for name, value in arguments.items():
        if value is not None:
            raise Error(f"{name} is given; tessera.flash_attn does not support it", "unsupported")


def _attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, probs, **rest):
    if dropout_p != 0.0:
        raise Error(f"dropout_p is {dropout_p}; only 0 is supported", "unsupported")
    out = attention(
        q,
        k,
        v,
        causal="bottom_right" if causal else None,
        alignment="bottom_right",
        window=tuple(window_size),
        softcap=softcap,
        alibi=alibi_slopes,
        scale=softmax_scale,
        deterministic=deterministic or None,  # torch.use_deterministic_algorithms also counts
        return_lse=probs,
        **rest,
    )
    return (*out, None) if probs else out


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
    """q: [total_q, Hq, D], k, v: [total_k, Hkv, D], cu_seqlens: int32 [B + 1]; lse is [Hq, total_q]."""
    _refuse(block_table=block_table)
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

    k and v, [B, Snew, Hkv, D], are first written into the cache after its cache_seqlens (an int, or int32 [B]) keys.
    num_splits is a hint and is ignored. Inference only.
    """
    _refuse(
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad
    )
    if (k is None) != (v is None):
        raise Error("one of k and v is given; both or neither are accepted")
    if k is not None and cache_seqlens is None:
        raise Error("k and v are given, but not cache_seqlens, which says where in the cache to write them")
    batch = q.shape[0]
    lengths = cache_seqlens
    if isinstance(lengths, int):
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    if k is not None:
        _append(k_cache, v_cache, k, v, lengths, block_table)
        lengths = lengths + k.shape[1]
    masks = dict(window=tuple(window_size), softcap=softcap, alibi=alibi_slopes, scale=softmax_scale)
    known = cache_seqlens is None or isinstance(cache_seqlens, int)
    if q.is_cuda and known and block_table is None:
        # All sequences have the same length, so the forward over the used part of the cache computes the same.
        used = k_cache.shape[1] if cache_seqlens is None else cache_seqlens + (0 if k is None else k.shape[1])
        return attention(
            q,
            k_cache[:, :used],
            v_cache[:, :used],
            causal="bottom_right" if causal else None,
            alignment="bottom_right",
            return_lse=return_softmax_lse,
            **masks,
        )
    return decode(
        q,
        k_cache,
        v_cache,
        cache_seqlens=lengths,
        page_table=block_table,
        causal=causal,
        return_lse=return_softmax_lse,
        **masks,
    )


def _unpacked(packed, name, parts, dims):
    if not isinstance(packed, torch.Tensor) or packed.dim() != dims or packed.shape[-3] != parts:
        got = list(packed.shape) if isinstance(packed, torch.Tensor) else type(packed).__name__
        wanted = f"[B, S, {parts}, H, D]" if dims == 5 else f"[total, {parts}, H, D]"
        raise Error(f"{name} is {got}; {wanted} is accepted")
    return packed.unbind(-3)


def _append(k_cache, v_cache, k, v, lengths, block_table):
    """Writes the new keys and values after each sequence's end, in place."""
    rows = lengths.long()[:, None] + torch.arange(k.shape[1], device=k.device)  # [B, Snew]
    page_size = k_cache.shape[1]
    room = page_size if block_table is None else page_size * block_table.shape[1]
    if rows.device.type == "cpu" and rows.numel() and int(rows.max()) >= room:
        raise Error(f"cache_seqlens and k need room for {int(rows.max()) + 1} keys; the cache has room for {room}")
    if block_table is None:
        where = (torch.arange(k.shape[0], device=k.device)[:, None], rows)
    else:
        where = (block_table.long().gather(1, rows // page_size), rows % page_size)
    with torch.no_grad():
        k_cache[where] = k.to(k_cache.dtype)
        v_cache[where] = v.to(v_cache.dtype)
