import json
import warnings

import torch
from torch import are_deterministic_algorithms_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from tessera import _native, _ops
from tessera._error import Error
from tessera._fp8 import Fp8Attention

_DISPATCHED, _PLAIN, _GRADIENTS, _AUTOCAST = _ops.DISPATCHED, _ops.PLAIN, _ops.GRADIENTS, _ops.AUTOCAST
_PRECISIONS = {
    "fp8": _ops.FP8,
    "fp8_rotated": _ops.FP8 | _ops.FP8_ROTATE,
    "fp8_residual": _ops.FP8 | _ops.FP8_RESIDUAL,
    "fp8_fast": _ops.FP8 | _ops.FP8_FAST,
}
_ALIGNMENTS = {None: _ops.UNSPECIFIED, "top_left": _ops.TOP_LEFT, "bottom_right": _ops.BOTTOM_RIGHT}


class _Attention(torch.autograd.Function):
    """The gradient of an eager call on plain tensors; all other calls use that of torch.ops.tessera.attention.

    rest: the arguments of _native.forward after q, k and v, as one tuple, since autograd inspects every argument.
    """

    @staticmethod
    def forward(ctx, q, k, v, rest):
        alibi, cu_seqlens_q, cu_seqlens_k, options, heads_first, return_lse = rest
        out, lse = _native.forward(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, options, heads_first, True)
        ctx.save_for_backward(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, out, lse)
        ctx.options, ctx.heads_first = options, heads_first
        if not return_lse:
            return out
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse=None):
        *inputs, out, lse = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        _ops.refuse_tangents((dout, dlse))
        # With create_graph=True, differentiating the result must raise: there is no second derivative.
        run = _ops.Backward.apply if torch.is_grad_enabled() else _ops.backward
        return *run(*inputs, ctx.options, ctx.heads_first, out, lse, dout, dlse), None

    jvp = staticmethod(_ops.refuse_forward_mode)


def _direct_apply():
    """_Attention.apply without the search for tensors that have escaped a torch.func transform: _native.mode has done
    that. It is a method of a private base class of Function."""
    return getattr(super(torch.autograd.Function, _Attention), "apply", _Attention.apply)


_apply = _direct_apply()


def _float(name, value):
    """value, which must not become 0 in fp32 unless it is 0: that means something else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise Error(f"{name} is {value!r}; a number is accepted") from None
    if number != 0 and abs(number) < 1e-45:
        raise Error(f"{name} is {value!r}, which is 0 in fp32")
    return number


def _options(
    causal, alignment, window, softcap, scale, deterministic, max_seqlen_q, max_seqlen_k, attention_chunk, precision=None
):
    """The arguments of the C ABI that are not tensors."""
    # A tensor's value may change, and options are cached.
    for name, value, wanted in (
        ("causal", causal, "bool"),
        ("deterministic", deterministic, "bool"),
        ("scale", scale, "number"),
        ("softcap", softcap, "number"),
        ("attention_chunk", attention_chunk, "number"),
        ("window", window, "pair of numbers"),
    ):
        if isinstance(value, torch.Tensor):
            raise Error(f"{name} is a torch.Tensor; a {wanted} is expected")
    if isinstance(window, (tuple, list)) and any(isinstance(side, torch.Tensor) for side in window):
        raise Error("window has a torch.Tensor in it; numbers are expected")
    flags = 0
    if causal:
        flags = _ops.CAUSAL
        if isinstance(causal, str):
            if alignment is not None and alignment != causal:
                raise Error(f"causal is {causal!r}, but alignment is {alignment!r}; give one of them")
            alignment = causal
    try:
        align = _ALIGNMENTS[alignment]
    except (KeyError, TypeError):
        name = "causal" if isinstance(causal, str) else "alignment"
        accepted = "True, " if name == "causal" else ""
        raise Error(f"{name} is {alignment!r}; {accepted}'top_left', 'bottom_right' and None are accepted") from None
    if deterministic:
        flags |= _ops.DETERMINISTIC
    if precision is not None:
        try:
            flags |= _PRECISIONS[precision]
        except (KeyError, TypeError):
            raise Error(f"precision is {precision!r}; 'fp8', 'fp8_rotated', 'fp8_residual', 'fp8_fast' and None are accepted") from None
    left = right = -1
    if window is not None:
        try:
            left, right = (-1 if side is None else side for side in window)
        except (TypeError, ValueError):
            raise Error(f"window is {window!r}; (left, right) is accepted, None or -1 for no bound") from None
    for name, value in (
        ("left side of window", left),
        ("right side of window", right),
        ("max_seqlen_q", max_seqlen_q),
        ("max_seqlen_k", max_seqlen_k),
        ("attention_chunk", attention_chunk),
    ):
        # Options are cached, and 9.0 would be found as 9, and 9 as 9.0.
        if value is not None and not isinstance(value, int) and not hasattr(value, "__index__"):
            raise Error(f"{name} is {value!r}; an integer is accepted")
    if scale is None:
        scale = 0.0
    elif scale == 0:
        raise Error("scale is 0; a number that is not 0 is accepted, None for 1 / sqrt(head dim)")
    numbers = (_float("scale", scale), _float("softcap", 0.0 if softcap is None else softcap))
    lengths = (0 if length is None else length for length in (max_seqlen_q, max_seqlen_k, attention_chunk))
    return *numbers, flags, align, left, right, *lengths


_cache = {}  # arguments -> _options(*arguments): a lookup costs a tenth of computing them


def _kept(cache, given, options):
    if len(cache) >= 1024:
        cache.clear()
    cache[given] = options
    return options


def _cached_options(given):
    try:
        known = _cache.get(given)
    except TypeError:  # a list is not hashable
        return _options(*given)
    return known or _kept(_cache, given, _options(*given))


def _first_served(precisions, call):
    for i, precision in enumerate(precisions):
        try:
            return call(precision)
        except Error as error:
            if error.status != "unsupported" or i + 1 == len(precisions):
                raise
            message = f"precision={precision!r} is not served, {precisions[i + 1]!r} is used: {error}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)
    raise Error("precision is empty; at least one is expected")


def attention(
    q,
    k,
    v,
    *,
    causal=None,
    window=None,
    softcap=0.0,
    alibi=None,
    scale=None,
    return_lse=False,
    deterministic=None,
    alignment=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    attention_chunk=0,
    precision=None,
):
    """softmax(scale * q k^T, masked) v, differentiable in q, k and v.

    q: [B, Sq, Hq, D], k: [B, Sk, Hkv, D], v: [B, Sk, Hkv, Dv], any strides with a contiguous last dim, Hq a multiple of
    Hkv; float16, bfloat16 or, on the CPU, float32. Returns out [B, Sq, Hq, Dv], with return_lse=True also the rows'
    log-sum-exp, float32 [B, Hq, Sq], itself differentiable.

    causal         None; "top_left" (query i stands at key i), "bottom_right" (at key i + Sk - Sq), or True if Sq = Sk
    window         (left, right): keys visible on either side of a query's position; None or -1: all
    softcap        scores become softcap * tanh(score / softcap); 0: off
    alibi          slopes, float32 [Hq] or [B, Hq]; not differentiable
    scale          of the scores; None: 1 / sqrt(D)
    deterministic  gradients bitwise equal from run to run; None: as torch.use_deterministic_algorithms says
    alignment      as for causal, for a window or ALiBi without causal if Sq != Sk
    cu_seqlens_q, cu_seqlens_k   packed sequences: int32 [B + 1]; q, k and v are then [total, H, D], lse [Hq, total_q]
    max_seqlen_q, max_seqlen_k   optional: the longest sequences
    attention_chunk   a query at position x sees only keys of its chunk, x // attention_chunk; 0: all. No gradient

    precision         "fp8": q, k and v are rounded to e4m3, with a scale for each head of a sequence or each block of its
                      rows, and the forward runs on these; gradients are computed in q's type, on values rounded with
                      a scale for each head, which differ below 2^-14 of its largest one. "fp8_rotated":
                      q and k are multiplied by a random-sign Hadamard matrix before they are rounded. "fp8_residual":
                      what rounding takes from the 8 largest key channels of a head is kept; no gradient. "fp8_fast":
                      sums of more than 1,024 keys are truncated. A tuple: the first that is served, with a warning if that is not the first

    A row with no visible key gives 0, and log-sum-exp -inf. docs/contract.md has the full contract.
    """
    if precision is not None and isinstance(precision, tuple):
        given = {name: value for name, value in locals().items() if name != "precision"}
        return _first_served(precision, lambda each: attention(**given, precision=each))
    if max_seqlen_q is not None or max_seqlen_k is not None:  # a tensor's value may change, and options are cached
        max_seqlen_q, max_seqlen_k = (int(n) if isinstance(n, torch.Tensor) else n for n in (max_seqlen_q, max_seqlen_k))
    if alibi is not None and isinstance(alibi, torch.Tensor) and alibi.requires_grad and torch.is_grad_enabled():
        raise Error("alibi requires a gradient, which tessera does not compute; pass alibi.detach()")
    mode = _DISPATCHED
    if not is_dynamo_compiling():
        mode = _native.forward_if_plain(
            q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, False, return_lse, _cached_options,
            causal, alignment, window, softcap, scale, deterministic, max_seqlen_q, max_seqlen_k, attention_chunk, precision,
        )  # fmt: skip
        if type(mode) is not int:  # the result
            return mode
    if deterministic is None:  # only gradients differ
        deterministic = are_deterministic_algorithms_enabled()
    given = (causal, alignment, window, softcap, scale, deterministic, max_seqlen_q, max_seqlen_k, attention_chunk, precision)
    if mode == _GRADIENTS and precision is None:
        return _apply(q, k, v, (alibi, cu_seqlens_q, cu_seqlens_k, _cached_options(given), False, return_lse))

    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise Error(f"{name} is a {type(tensor).__name__}; a torch.Tensor is expected")
    q, k, v = _ops.under_autocast(q, k, v)
    options = _options(*given)
    if precision is not None:
        if precision == "fp8_residual" and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
            message = "fp8_residual has no gradient; precision='fp8' and 'fp8_rotated' have, or use torch.no_grad()"
            raise Error(message, "unsupported")
        if not is_compiling() and _ops.is_transforming():
            raise Error(f"precision is {precision!r}, which torch.func's transforms do not support", "unsupported")
        out, lse = Fp8Attention.apply(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, options)
        return (out, lse) if return_lse else out
    if mode == _GRADIENTS + _AUTOCAST:
        return _apply(q, k, v, (alibi, cu_seqlens_q, cu_seqlens_k, options, False, return_lse))
    if mode == _PLAIN + _AUTOCAST:
        return _native.forward(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, options, False, return_lse)
    out, lse = _ops.attention(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, *options)
    return (out, lse) if return_lse else out


def attention_heads_first(query, key, value, causal, scale):
    """attention for tensors of [B, H, S, D], with the options of sdpa."""
    mode = _DISPATCHED
    if not is_dynamo_compiling():
        mode = _native.forward_if_plain(
            query, key, value, None, None, None, True, False, _cached_options,
            causal, None, None, 0.0, scale, None, None, None, 0, None,
        )  # fmt: skip
        if type(mode) is not int:  # the result
            return mode
    if mode == _GRADIENTS:
        deterministic = are_deterministic_algorithms_enabled()
        options = _cached_options((causal, None, None, 0.0, scale, deterministic, None, None, 0))
        return _apply(query, key, value, (None, None, None, options, True, False))
    out = attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), causal=causal, scale=scale)
    return out.transpose(1, 2)


def _decode_options(
    causal, window, softcap, scale, rotary_interleaved, batch_invariant, max_seqlen_q=0, attention_chunk=0, scale_flag=0
):
    for name, value in (("rotary_interleaved", rotary_interleaved), ("batch_invariant", batch_invariant)):
        if isinstance(value, torch.Tensor):
            raise Error(f"{name} is a torch.Tensor; a bool is expected")
    if isinstance(causal, str) and causal != "bottom_right":
        raise Error(f"causal is {causal!r}; True, False and 'bottom_right' are accepted: queries stand at each sequence's end")
    scale, softcap, flags, *rest = _options(
        causal if isinstance(causal, torch.Tensor) else bool(causal), "bottom_right", window, softcap, scale, False,
        max_seqlen_q, 0, attention_chunk,
    )  # fmt: skip
    flags |= _ops.ROTARY_INTERLEAVED * bool(rotary_interleaved) | _ops.BATCH_INVARIANT * bool(batch_invariant)
    return scale, softcap, flags | scale_flag, *rest


_decode_cache = {}


def _cached_decode_options(*given):
    try:
        known = _decode_cache.get(given)
    except TypeError:  # a list is not hashable
        return _decode_options(*given)
    return known or _kept(_decode_cache, given, _decode_options(*given))


def _cache_and_scale(name, cache, scale):
    """As the library takes them: e4m3 as uint8, and scales of heads with a dim of one block more."""
    if getattr(cache, "dtype", None) == torch.float8_e4m3fn:
        cache = cache.view(torch.uint8)
    elif getattr(cache, "dtype", None) == torch.uint8:
        raise Error(f"{name}_cache is uint8; float8_e4m3fn is accepted, as {name}_cache.view(torch.float8_e4m3fn)")
    if isinstance(scale, torch.Tensor):
        if scale.dim() not in (2, 3):
            raise Error(
                f"{name}_scale has {scale.dim()} dims; 2 are accepted, [B or 1, Hkv or 1], or 3, beside the keys of the cache"
            )
        scale = scale.unsqueeze(-1) if scale.dim() == 2 else scale
    return cache, scale


def _scale_flag(cache, page_table, k_scale, v_scale):
    """Of scales that lie beside the keys of the cache: those with 3 dims."""
    shapes = {n: s.shape for n, s in (("k_scale", k_scale), ("v_scale", v_scale)) if isinstance(s, torch.Tensor)}
    if all(len(shape) != 3 for shape in shapes.values()) or not isinstance(cache, torch.Tensor) or cache.dim() != 4:
        return 0
    if len({tuple(shape[2:]) for shape in shapes.values()}) > 1:
        text = " and ".join(f"{name} is {list(shape)}" for name, shape in shapes.items())
        raise Error(f"{text}; both have scales of heads, of pages or of tokens")
    keys, (name, shape) = cache.shape[1], next(iter(shapes.items()))
    if shape[2] == keys:
        return _ops.SCALE_PER_TOKEN
    if page_table is None or shape[2] != 1:
        page = "" if page_table is None else ", or 1 for a whole page,"
        raise Error(f"{name} is {list(shape)}; {keys} scales for the keys{page} are accepted as its last dim")
    return _ops.SCALE_PER_PAGE


def decode(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens=None,
    page_table=None,
    k_new=None,
    v_new=None,
    rotary_cos=None,
    rotary_sin=None,
    rotary_interleaved=False,
    rotary_seqlens=None,
    cache_batch_idx=None,
    leftpad_k=None,
    status=None,
    batch_invariant=False,
    causal=True,
    window=None,
    softcap=0.0,
    alibi=None,
    scale=None,
    return_lse=False,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    attention_chunk=0,
    k_scale=None,
    v_scale=None,
):
    """Attention of new queries, few or many, against a KV cache, for inference. They stand at each sequence's end.

    q: [B, Sq, Hq, D]; k_cache: [B, S, Hkv, D], v_cache: [B, S, Hkv, Dv], or [pages, page_size, Hkv, D] with page_table,
    int32 [B, max_pages_per_seq]. Returns out [B, Sq, Hq, Dv], with return_lse=True also the rows' log-sum-exp, float32
    [B, Hq, Sq].

    cache_seqlens    int32 [B], the keys in use, the queries' own included; None: the whole cache. With k_new, the keys
                     in use before it is appended
    k_new, v_new     [B, Sn, Hkv, D], written into the caches in place, behind the keys in use, and attended to
    rotary_cos, rotary_sin   of q's type, [positions, R / 2]: the first R columns of k_new and q are rotated before all
                     else. New key i is at position cache_seqlens + i, query i too if causal or a window is given, else
                     at cache_seqlens
    rotary_interleaved   the pairs are columns 2i and 2i + 1; else i and i + R / 2
    rotary_seqlens   int32 [B], positions to use for rotary embedding instead of cache_seqlens
    cache_batch_idx  int32 [B], the row of the caches that each sequence has; not with page_table
    leftpad_k        int32 [B], the keys at each sequence's start that no query sees
    status           int32 [B], written: 0, or 1 if the sequence was refused on the device
    batch_invariant  a sequence's result is bitwise the same whatever else is in the batch
    cu_seqlens_q     int32 [B + 1], packed queries: q and out are [total_q, H, D], lse [Hq, total_q]; not with k_new
    max_seqlen_q     optional: the longest sequence of queries
    attention_chunk  a query at position x sees only keys of its chunk, x // attention_chunk; 0: all
    k_scale, v_scale   of caches of float8_e4m3fn, which need them: float32 [B or 1, Hkv or 1]. A key is what k_cache has
                     times its scale; k_new is divided by it, rounded to float8_e4m3fn, and attended to as such.
                     With 3 dims they lie beside the cache: [B, Hkv, S], or [pages, Hkv, page_size] with page_table, has a
                     scale for each key, which k_new writes: a power of two. [pages, Hkv or 1, 1] has one for each page,
                     which must be there before a key is appended to it

    On the CPU, lengths and indices that do not fit the cache raise. On a GPU only the device knows them: such a sequence
    gets 0 (log-sum-exp -inf), its cache is not written, and its status is 1.
    """
    flag = 0 if k_scale is None and v_scale is None else _scale_flag(k_cache, page_table, k_scale, v_scale)
    k_cache, k_scale = _cache_and_scale("k", k_cache, k_scale)
    v_cache, v_scale = _cache_and_scale("v", v_cache, v_scale)
    interleaved = rotary_interleaved and rotary_cos is not None
    longest = int(max_seqlen_q) if isinstance(max_seqlen_q, torch.Tensor) else max_seqlen_q
    given = (causal, window, softcap, scale, interleaved, batch_invariant, longest, attention_chunk, flag)
    head = (q, k_cache, v_cache, alibi, cache_seqlens, page_table, cache_batch_idx, leftpad_k, cu_seqlens_q)
    head += (k_scale, v_scale)
    appended = (k_new, v_new, rotary_cos, rotary_sin, rotary_seqlens, status)
    if not is_dynamo_compiling() and _native.mode(q, k_cache, v_cache) & ~_AUTOCAST == _PLAIN:
        if k_new is not None:
            _ops.refuse_append_gradient((k_new, v_new, rotary_cos, rotary_sin))
        result = _native.decode(*head, *appended, _cached_decode_options(*given), return_lse)
        if k_new is not None:
            _ops.note_writes(k_cache, v_cache, *((k_scale, v_scale) if flag == _ops.SCALE_PER_TOKEN else ()))
        if status is not None:
            _ops.note_writes(status)
        return result
    options = _decode_options(*given)  # a graph that reads the cache of options would depend on its contents
    if all(each is None for each in appended):
        out, lse = _ops.decode(*head, *options)
    else:
        _ops.refuse_append_gradient(head + appended)
        if not is_compiling():
            _ops.refuse_tangents(head + appended)
        written = (None, None)
        if flag == _ops.SCALE_PER_TOKEN and k_new is not None:
            head, written = head[:-2] + written, (k_scale, v_scale)
        out, lse = torch.ops.tessera.decode_append(*head, *appended, *written, *options)
    return (out, lse) if return_lse else out


_OPS = {"forward": 0, "backward": 1, "decode": 2}
_FORMATS = {"text": 0, "json": 1}


def explain(
    q,
    k,
    v,
    *,
    op="forward",
    arch=None,
    format="text",
    causal=None,
    window=None,
    softcap=0.0,
    alibi=None,
    scale=None,
    deterministic=None,
    alignment=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    cache_seqlens=None,
    page_table=None,
    k_new=None,
    v_new=None,
    rotary_cos=None,
    rotary_sin=None,
    rotary_interleaved=False,
    rotary_seqlens=None,
    cache_batch_idx=None,
    leftpad_k=None,
    status=None,
    batch_invariant=False,
    attention_chunk=0,
    k_scale=None,
    v_scale=None,
    precision=None,
):
    """Which kernel would serve this call, and why the others would not. Nothing is run, and no data is read.

    op: "forward", "backward" or "decode". arch: "cpu" or "sm_75" ... "sm_121" for a device that need not be present,
    with tensors on any device, including meta; None: the tensors' own.

    format="text" returns a str for people. format="json" returns the same as a dict: family, op, problem, fields,
    device; chosen (kernel, config, workspace, predicted_us or measured_us, why, tuned), or None if no kernel serves the
    call; offered, a list of further options of the same form; refused, a list of {kernel, reason}; padded, only for head
    dims that no kernel serves: those of the copies that tessera.flash_attn would make.
    """
    for name, value, accepted in (("op", op, _OPS), ("format", format, _FORMATS)):
        if not isinstance(value, str) or value not in accepted:
            raise Error(f"{name} is {value!r}; {', '.join(map(repr, accepted))} are accepted")
    if arch is not None and not isinstance(arch, str):
        raise Error(f"arch is {arch!r}; a name such as 'sm_90a' or 'cpu' is accepted")
    if op == "decode":
        if precision is not None:
            raise Error(f"precision is {precision!r}, which tessera.decode does not take")
        flag = _scale_flag(k, page_table, k_scale, v_scale)
        k, k_scale = _cache_and_scale("k", k, k_scale)
        v, v_scale = _cache_and_scale("v", v, v_scale)
        interleaved = rotary_interleaved and rotary_cos is not None
        options = _decode_options(
            causal, window, softcap, scale, interleaved, batch_invariant, max_seqlen_q, attention_chunk, flag
        )
        rest = (cache_seqlens, page_table, cache_batch_idx, leftpad_k, cu_seqlens_q, k_scale, v_scale)
        rest += (k_new, v_new, rotary_cos, rotary_sin, rotary_seqlens, status)
    else:
        if deterministic is None:
            deterministic = are_deterministic_algorithms_enabled()
        lengths = (max_seqlen_q, max_seqlen_k)
        options = _options(causal, alignment, window, softcap, scale, deterministic, *lengths, attention_chunk, precision)
        rest = (cu_seqlens_q, cu_seqlens_k)
    if arch is None and isinstance(q, torch.Tensor) and q.device.type not in ("cpu", "cuda"):
        raise Error(f"q is on {q.device}, which no kernel serves; give arch to ask for another device")
    ask = lambda format: _native.explain(_OPS[op], arch, _FORMATS[format], options, q, k, v, alibi, *rest)  # noqa: E731
    answer = json.loads(ask("json")) if format == "json" else ask("text")
    dims = [t.shape[-1] for t in (q, v)]
    if any(dim % 8 for dim in dims) and (answer if format == "json" else json.loads(ask("json")))["chosen"] is None:
        dim_qk, dim_v = (dim + -dim % 8 for dim in dims)
        if format == "json":
            answer["padded"] = {"dim_qk": dim_qk, "dim_v": dim_v}
        else:
            answer += f"padded  by tessera.flash_attn, as copies with Dqk={dim_qk} Dv={dim_v}\n"
    return answer
