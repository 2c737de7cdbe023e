"""The functions of FlashAttention-3's flash_attn_interface on Tessera: change the import, keep the code.

    from tessera.flash_attn_interface import flash_attn_func

Signatures and results are FlashAttention-3's: return_attn_probs gives (out, lse). num_splits, pack_gqa, sm_margin and
scheduler_metadata are hints and are ignored: a kernel's plan decides. What is not supported (qv, the descales of fp8 but
for a cache's, the gradient of a call with attention_chunk) raises tessera.Error, which names the argument.
"""

import torch
from torch.compiler import is_compiling

from tessera import _flash
from tessera._error import Error

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def _refuse(**arguments):
    _flash.refuse("flash_attn_interface", **arguments)


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """q: [B, Sq, Hq, D], k: [B, Sk, Hkv, D], v: [B, Sk, Hkv, Dv] -> out, or (out, lse) with return_attn_probs."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return _flash.attend(
        q, k, v, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs,
        attention_chunk=attention_chunk,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """qkv: [B, S, 3, H, D], or [B, S, Hq + 2 Hkv, D] with num_heads_q = Hq."""
    _refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if isinstance(qkv, torch.Tensor) and qkv.dim() == 4:
        if num_heads_q is None:
            raise Error("qkv has 4 dims, but num_heads_q, which says how many heads are queries, is None")
        shared = (qkv.shape[2] - num_heads_q) // 2
        if shared < 1 or num_heads_q + 2 * shared != qkv.shape[2]:
            raise Error(f"qkv is {list(qkv.shape)} and num_heads_q is {num_heads_q}; [B, S, Hq + 2 Hkv, D] is accepted")
        q, k, v = qkv.split((num_heads_q, shared, shared), dim=2)
    else:
        q, k, v = _flash.unpacked(qkv, "qkv", 3, 5)
    return _flash.attend(
        q, k, v, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs,
        attention_chunk=attention_chunk,
    )  # fmt: skip


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """q: [total_q, Hq, D], k: [total_k, Hkv, D], v: [total_k, Hkv, Dv], cu_seqlens: int32 [B + 1]; lse is [Hq, total_q].

    seqused_q and seqused_k, int32 [B]: each sequence's leading rows that count. They are gathered; out is 0 and lse -inf
    in the other rows.
    """
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    for name, lengths in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if lengths is None:
            raise Error(f"{name} is None; int32 [B + 1] is accepted")
    for name, used, lengths in (("seqused_q", seqused_q, cu_seqlens_q), ("seqused_k", seqused_k, cu_seqlens_k)):
        if used is not None:
            _check_used(name, used, lengths)
    if seqused_k is not None:
        cu_seqlens_k, rows, _ = _used_rows(cu_seqlens_k, seqused_k, k.shape[0])
        k, v = k[rows], v[rows]
    back, total = None, q.shape[0]
    if seqused_q is not None:
        cu_seqlens_q, rows, back = _used_rows(cu_seqlens_q, seqused_q, total)
        q = q[rows]
    result = _flash.attend(
        q, k, v, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    if back is None:
        return result
    out, lse = result if return_attn_probs else (result, None)
    out = out.new_zeros(total + 1, *out.shape[1:]).index_copy(0, back, out)[:total]
    if not return_attn_probs:
        return out
    return out, lse.new_full((lse.shape[0], total + 1), -torch.inf).index_copy(1, back, lse)[:, :total]


def _check_used(name, used, cu_seqlens):
    if not isinstance(used, torch.Tensor) or used.dim() != 1 or used.shape[0] != cu_seqlens.shape[0] - 1:
        got = list(used.shape) if isinstance(used, torch.Tensor) else type(used).__name__
        raise Error(f"{name} is {got}; int32 [{cu_seqlens.shape[0] - 1}] is accepted")
    # On a GPU, only the device knows the values.
    if used.is_cpu and not is_compiling() and bool(((used < 0) | (used > cu_seqlens.diff())).any()):
        raise Error(f"{name} is {used.tolist()}, but the sequences have {cu_seqlens.diff().tolist()} rows")


def _used_rows(cu_seqlens, used, total):
    """Packs the leading rows of sequences: cu_seqlens, the rows to gather, and where to put the results.

    Surplus rows repeat the last one, and their results go to an additional row behind all others.
    """
    cu, sequence, position = _flash.packed_rows(used, total)
    rows = cu_seqlens[sequence] + position
    real = torch.arange(total, device=used.device) < cu[-1]
    return cu, rows.clamp(max=max(total - 1, 0)), torch.where(real, rows, total)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """q: [B, Sq, Hq, D] against k_cache, v_cache: [B, S, Hkv, D], or [pages, page_size, Hkv, D] with page_table.

    k and v, [B, Snew, Hkv, D], are first written into the cache after its cache_seqlens (an int, or int32 [B]) keys,
    rotated by rotary_cos and rotary_sin at rotary_seqlens (None: cache_seqlens), as q is. With cu_seqlens_q, int32
    [B + 1], and max_seqlen_q, q is [total_q, Hq, D] and lse is [Hq, total_q]. Returns out, or (out, lse, None, None)
    with return_softmax_lse: FlashAttention-3 returns the partial results of its splits, too. Inference only.

    A cache of float8_e4m3fn has k_descale and v_descale, float32 [B, Hkv], None for 1; q, and k and v, stay float16 or
    bfloat16: new keys are rounded as they are written. With 3 dims, the descales lie beside the keys or pages of the cache, as
    tessera.decode has them.

    An int that does not fit the cache raises. Lengths in a tensor on a GPU are known to the device alone: a sequence
    that does not fit gives 0, its cache is not written, and later calls are not affected.
    """
    _refuse(qv=qv, q_descale=q_descale, cu_seqlens_k_new=cu_seqlens_k_new)
    if getattr(k_cache, "dtype", None) != torch.float8_e4m3fn:
        for name, descale in (("k_descale", k_descale), ("v_descale", v_descale)):
            if descale is not None:
                raise Error(f"{name} is given, but k_cache is not of float8_e4m3fn", "unsupported")
    queries = None
    if cu_seqlens_q is not None:
        if max_seqlen_q is None:
            raise Error("cu_seqlens_q is given, but max_seqlen_q is None")
        queries = _flash.PackedQueries(q, cu_seqlens_q, max_seqlen_q, batched=k is not None)
        if k is not None and not queries.batched:
            queries = _PaddedQueries(q, cu_seqlens_q, max_seqlen_q, rotary_cos)
    out, lse = _flash.with_kvcache(
        q if queries is None else queries.q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        cache_batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=None,
        attention_chunk=attention_chunk,
        k_scale=k_descale,
        v_scale=v_descale,
        return_lse=True,
        **({} if queries is None else queries.lengths),
    )
    if queries is not None:
        out, lse = queries.packed(out, lse)
    return (out, lse, None, None) if return_softmax_lse else out


class _PaddedQueries:
    """PackedQueries of different lengths with keys to append: as a batch [B, max_seqlen_q, H, D], and the results back.

    Queries stand at their sequence's end, so that shorter sequences are padded in front.
    """

    lengths = {}

    def __init__(self, q, cu_seqlens, longest, rotary_cos):
        if rotary_cos is not None:
            raise Error(
                "rotary_cos is given with sequences of different lengths in cu_seqlens_q; "
                "tessera.flash_attn_interface supports rotary embedding for equal ones",
                "unsupported",
            )
        total = q.shape[0]
        lengths = cu_seqlens.diff()
        first = longest - lengths  # rows of padding
        rows = cu_seqlens[:-1, None] + torch.arange(longest, device=q.device) - first[:, None]
        self.q = q[rows.clamp(0, max(total - 1, 0))]
        _, self.sequence, position = _flash.packed_rows(lengths, total)
        self.at = (first[self.sequence] + position).clamp(max=longest - 1)

    def packed(self, out, lse):
        return out[self.sequence, self.at], lse[self.sequence, :, self.at].t()


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """The attention over all keys from that over parts of them, in fp32: (out, lse).

    out_partial: [parts, B, S, H, D], lse_partial: [parts, B, S, H] -> out [B, S, H, D] of out_dtype (None:
    out_partial's) and lse [B, S, H]. A part that sees no key has lse -inf.
    """
    lse = torch.logsumexp(lse_partial, dim=0)
    weights = torch.exp(lse_partial - torch.where(lse == -torch.inf, 0.0, lse))
    # A part without keys has weight 0, and its output may be anything.
    parts = torch.where(weights[..., None] > 0, out_partial, 0.0)
    combined = (weights[..., None] * parts).sum(0).to(out_dtype or out_partial.dtype)
    return (combined if out is None else out.copy_(combined)), lse


def get_scheduler_metadata(*args, **kwargs):
    """None: the division of work among a GPU's CTAs needs no preparation by the caller."""
    return None
