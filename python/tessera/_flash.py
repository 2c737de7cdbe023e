"""What tessera.flash_attn and tessera.flash_attn_interface share."""

from numbers import Integral

import torch
from torch.compiler import is_compiling
from torch.nn.functional import pad

from tessera._attention import attention, decode
from tessera._error import Error
from tessera._ops import want_gradients

# Longer queries of one known length go to the forward, which reuses each key for a whole tile of queries.
MOST_DECODE_ROWS = 16


def refuse(module, **arguments):
    for name, value in arguments.items():
        if value is not None:
            raise Error(f"{name} is given; tessera.{module} does not support it", "unsupported")


def contiguous(*tensors):
    """Kernels need a contiguous last dim. flash_attn copies a tensor that has none, and so do we."""
    try:
        return [t if t is None or t.stride(-1) == 1 else t.contiguous() for t in tensors]
    except (AttributeError, IndexError):  # no tensor, or one without dims: the library's own checks say which
        return tensors


def _window(window_size):
    """Any negative side is no bound, and tensors count as numbers."""
    if type(window_size) is tuple and window_size == (-1, -1):
        return window_size
    try:
        left, right = (-1 if side is None else max(int(side), -1) for side in window_size)
    except (TypeError, ValueError):
        raise Error(f"window_size is {window_size!r}; (left, right) is accepted, -1 for no bound") from None
    return left, right


def _softcap(softcap):
    return float(softcap) if softcap is not None and softcap > 0 else 0.0


def _is_odd(q, v):
    """Whether a GPU's kernels serve these head dims only as padded copies."""
    return isinstance(q, torch.Tensor) and q.is_cuda and (q.shape[-1] % 8 != 0 or v.shape[-1] % 8 != 0)


def _padded(*tensors):
    return [None if t is None else pad(t, (0, -t.shape[-1] % 8)) for t in tensors]


def attend(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_lse, **lengths):
    """The forward, differentiable: out, or (out, lse)."""
    q, k, v = contiguous(q, k, v)
    odd = _is_odd(q, v)
    dim_v = v.shape[-1] if odd else 0
    if odd:
        softmax_scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        q, k, v = _padded(q, k, v)
    result = attention(
        q,
        k,
        v,
        causal="bottom_right" if causal else None,
        alignment="bottom_right",
        window=_window(window_size),
        softcap=_softcap(softcap),
        alibi=alibi_slopes,
        scale=softmax_scale,
        deterministic=deterministic or None,  # torch.use_deterministic_algorithms also counts
        return_lse=return_lse,
        **lengths,
    )
    if not odd:
        return result
    return (result[0][..., :dim_v], result[1]) if return_lse else result[..., :dim_v]


def with_kvcache(
    q, k_cache, v_cache, k, v, *, cache_seqlens, page_table, cache_batch_idx, leftpad, rotary_cos, rotary_sin,
    rotary_interleaved, rotary_seqlens, softmax_scale, causal, window_size, softcap, alibi_slopes, return_lse,
    attention_chunk=0, cu_seqlens_q=None, max_seqlen_q=None, k_scale=None, v_scale=None,
):  # fmt: skip
    """Attention against a KV cache, to which k and v are appended first: out, or (out, lse)."""
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(tensor, torch.Tensor):
            raise Error(f"{name} is a {type(tensor).__name__}; a torch.Tensor is expected")
    if is_e4m3 := k_cache.dtype == torch.float8_e4m3fn:
        k_scale, v_scale = (torch.ones(1, 1, dtype=torch.float32, device=q.device) if s is None else s for s in (k_scale, v_scale))
    if (k is None) != (v is None):
        raise Error("one of k and v is given; both or neither are accepted")
    if k is not None and cache_seqlens is None:
        raise Error("k and v are given, but not cache_seqlens, which says where in the cache to write them")
    if k is None and rotary_cos is not None:
        raise Error("rotary_cos is given, but not k and v; rotary embedding is of new keys and their queries")
    q, k, v, rotary_cos, rotary_sin = contiguous(q, k, v, rotary_cos, rotary_sin)
    new = 0 if k is None else k.size(1)
    masks = dict(window=_window(window_size), softcap=_softcap(softcap), alibi=alibi_slopes, scale=softmax_scale)
    masks["attention_chunk"] = attention_chunk
    known = None
    if isinstance(cache_seqlens, Integral):  # NumPy's, too
        cache_seqlens = int(cache_seqlens)
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        room = k_cache.size(1) if page_table is None else k_cache.size(1) * page_table.size(1)
        known = room if cache_seqlens is None else cache_seqlens
        if not 0 <= known <= room - new:
            raise Error(f"cache_seqlens and k need room for {known + new} keys; the cache has room for {room}")
    if _is_odd(q, v_cache) and not is_e4m3:
        return _padded_cache(
            q, k_cache, v_cache, k, v, masks, cache_seqlens=cache_seqlens, page_table=page_table,
            cache_batch_idx=cache_batch_idx, leftpad=leftpad, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved, rotary_seqlens=rotary_seqlens, causal=causal, return_lse=return_lse,
            cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        )  # fmt: skip
    plain = page_table is None and cache_batch_idx is None and leftpad is None and rotary_cos is None and not is_e4m3
    if known is not None and plain and cu_seqlens_q is None and q.is_cuda and q.size(1) > MOST_DECODE_ROWS:
        if new:
            with torch.no_grad():
                k_cache[:, known : known + new] = k
                v_cache[:, known : known + new] = v
        used = known + new
        return attention(
            q, k_cache[:, :used], v_cache[:, :used], causal="bottom_right" if causal else None,
            alignment="bottom_right", return_lse=return_lse, **masks,
        )  # fmt: skip
    if isinstance(cache_seqlens, int):
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    return decode(
        q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        k_new=k,
        v_new=v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        cache_batch_idx=cache_batch_idx,
        leftpad_k=leftpad,
        causal=causal,
        return_lse=return_lse,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        k_scale=k_scale,
        v_scale=v_scale,
        **masks,
    )


def _padded_cache(q, k_cache, v_cache, k, v, masks, *, return_lse, **rest):
    """with_kvcache on copies whose head dims are multiples of 8, which costs a copy of the whole cache."""
    scale = q.shape[-1] ** -0.5 if masks["scale"] is None else masks["scale"]
    out, lse = with_kvcache(
        *_padded(q), *(copies := _padded(k_cache, v_cache)), *_padded(k, v), softmax_scale=scale,
        window_size=masks["window"], softcap=masks["softcap"], alibi_slopes=masks["alibi"],
        attention_chunk=masks["attention_chunk"], return_lse=True, **rest,
    )  # fmt: skip
    if k is not None:
        with torch.no_grad():
            for cache, copy in zip((k_cache, v_cache), copies):
                cache.copy_(copy[..., : cache.shape[-1]])
    out = out[..., : v_cache.shape[-1]]
    return (out, lse) if return_lse else out


def unpacked(packed, name, parts, dims):
    if not isinstance(packed, torch.Tensor) or packed.dim() != dims or packed.shape[-3] != parts:
        got = list(packed.shape) if isinstance(packed, torch.Tensor) else type(packed).__name__
        wanted = f"[B, S, {parts}, H, D]" if dims == 5 else f"[total, {parts}, H, D]"
        raise Error(f"{name} is {got}; {wanted} is accepted")
    return packed.unbind(-3)


# ---- Rows that are gathered, because the forward reads packed sequences alone ----
# Shapes do not depend on values, so nothing waits for the device; surplus rows belong to no sequence.


def packed_rows(lengths, rows):
    """Packs sequences of these lengths, int32 [B], into `rows` rows: cu_seqlens, and each row's sequence and position.

    Surplus rows have the last sequence, at a position behind its end.
    """
    cu = pad(lengths.cumsum(0), (1, 0)).int()
    row = torch.arange(rows, device=lengths.device)
    sequence = torch.searchsorted(cu[1:].long(), row, right=True).clamp(max=lengths.shape[0] - 1)
    return cu, sequence, row - cu[sequence]


def from_pages(pages, page_table, sequence, position):
    """[pages, page_size, H, D] -> the rows at these positions of these sequences, [rows, H, D]."""
    size = pages.shape[1]
    entry = (position // size).clamp(max=page_table.shape[1] - 1)
    page = page_table[sequence, entry].clamp(0, pages.shape[0] - 1)
    return pages[page, position % size]


class PackedQueries:
    """Queries [total, H, D] for a cache: as they are or, a few per sequence and all of one number, as a batch, which has
    a kernel of its own. On a GPU only the device knows the lengths: total must be their sum there.
    lengths: what with_kvcache takes with q; packed(): its results as [total, H, D] and [H, total]."""

    def __init__(self, q, cu_seqlens, longest, batched=False):
        batch = cu_seqlens.shape[0] - 1
        self.batched = q.shape[0] == batch * longest and (batched or longest <= MOST_DECODE_ROWS)
        if self.batched and cu_seqlens.is_cpu and not is_compiling():  # rows of q may belong to no sequence
            self.batched = bool((cu_seqlens.diff() == longest).all())
        self.q = q.unflatten(0, (batch, longest)) if self.batched else q
        self.lengths = {} if self.batched else dict(cu_seqlens_q=cu_seqlens, max_seqlen_q=longest)

    def packed(self, out, lse):
        return (out.flatten(0, 1), lse.transpose(0, 1).flatten(1)) if self.batched else (out, lse)


def paged_varlen(q, k, v, cu_seqlens_q, lengths_k, max_seqlen_q, max_seqlen_k, page_table, rest):
    """Packed queries against a paged cache, lengths_k: int32 [B]. rest: the arguments of attend after v.

    Pages are read in place. If gradients are wanted, they are gathered.
    """
    *masks, deterministic, return_lse = rest
    softmax_scale, causal, window_size, softcap, alibi_slopes = masks
    batch = page_table.shape[0]
    if not want_gradients(q, k, v):
        queries = PackedQueries(q, cu_seqlens_q, max_seqlen_q)
        out, lse = with_kvcache(
            queries.q, k, v, None, None, cache_seqlens=lengths_k, page_table=page_table, cache_batch_idx=None,
            leftpad=None, rotary_cos=None, rotary_sin=None, rotary_interleaved=False, rotary_seqlens=None,
            softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
            alibi_slopes=alibi_slopes, return_lse=True, **queries.lengths,
        )  # fmt: skip
        out, lse = queries.packed(out, lse)
        return (out, lse) if return_lse else out
    longest = min(max_seqlen_k, page_table.shape[1] * k.shape[1])
    cu_seqlens_k, sequence, position = packed_rows(lengths_k, batch * longest)
    k, v = (from_pages(t, page_table, sequence, position) for t in (k, v))
    return attend(
        q, k, v, *rest, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
        max_seqlen_k=longest,
    )  # fmt: skip
