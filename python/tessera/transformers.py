"""Hugging Face models on Tessera.

    import tessera.transformers

    tessera.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tessera")   # or, on a loaded model:
    model.set_attn_implementation("tessera")
    model.set_experts_implementation("tessera")   # mixtures of experts: Mixtral, Qwen-MoE and what is shaped like them
    tessera.transformers.report(model)

Padded and packed batches run as packed sequences: only real tokens are computed. What is not supported (dropout,
relative position biases, custom dense masks, experts with biases) raises tessera.Error; there is no fallback.
"""

import sys

import torch
from torch.compiler import is_compiling

from tessera._attention import attention, decode, explain
from tessera._error import Error
from tessera._moe import moe
from tessera._ops import under_autocast, want_gradients

NAME = "tessera"
_registered = {NAME}  # names under which forward is registered
_MOST_DECODE_ROWS = 16  # a pass with at most so many queries per sequence, without gradients, is decode


def register(name=NAME):
    """Registers attn_implementation=name and experts_implementation=name with transformers, version 5.5 and up."""
    try:
        import transformers
        from transformers import AttentionInterface
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as missing:
        raise Error(f"transformers 5.5 or newer is needed: {missing}", "unsupported") from None
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 5):
        raise Error(f"transformers is {transformers.__version__}; 5.5 or newer is needed", "unsupported")
    _registered.add(name)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, segments)
    ALL_EXPERTS_FUNCTIONS.register(name, experts)


# ---- Masks ----
# Transformers asks for a mask once per forward pass and passes it to every layer. Ours is int32 and linear in the length:
#   [B, 1, 2, max(Sq, Sk)]  causal: the sequence that each key (row 0) and each query (row 1) belongs to, -1 for padding and
#                           for the unused part of a static cache
#   [B, 1, 1, Sk]           every query sees all keys that are not padding
#   [1, 2, 1, B]            decode: the keys in use of each sequence and how many of these are padding on the left
#   [1, 1, 3, 1]            in a graph, causal: whether the pass is packed, which is not known while tracing
#   [1, 1, 4, 1]            causal, and nothing else: of this one and the next, only the shape says something
#   [1, 1, 5, 1]            every query sees every key
# A mask's shape does not depend on how many keys are in use, so that a compiled model with a static cache is compiled once.
# What the model's mask says counts, since layers may say nothing or something else; only in a graph, where the mask function
# cannot be inspected, a sliding window is the one that the layer asks for.

_PACKED_OR_NOT, _CAUSAL, _ALL = 3, 4, 5


def segments(
    batch_size,
    kv_length,
    q_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    device=None,
    use_vmap=False,
    **kwargs,
):
    """The mask of one forward pass, from the arguments of transformers' create_*_mask functions."""
    if attention_mask is not None:
        device = attention_mask.device
    causal = "allow_is_bidirectional_skip" not in kwargs  # only create_bidirectional_mask* pass that
    mask = _segments(
        batch_size, kv_length, q_length, q_offset, kv_offset, mask_function, attention_mask, device, use_vmap, causal,
        kwargs.get("config"),
    )  # fmt: skip
    if mask is None:
        mask = torch.empty((1, 1, _CAUSAL if causal else _ALL, 1), dtype=torch.int32, device=device)
    if not is_compiling():
        mask._tessera_window = _window_of(mask_function)
    return mask


def _segments(
    batch_size, kv_length, q_length, q_offset, kv_offset, mask_function, attention_mask, device, use_vmap, causal, config
):
    """The mask, or None if causal, or seeing everything, is all there is, but for a window."""
    if use_vmap or not _is_supported(mask_function, config):
        raise Error(
            "the model has a mask pattern of its own (chunks, blocks or a custom mask function); tessera supports "
            "causal, bidirectional and sliding-window masks, padding and packed sequences",
            "unsupported",
        )
    first = q_offset - kv_offset if kv_offset else q_offset  # where query 0 stands among the keys
    static = isinstance(first, torch.Tensor)
    padded = None
    if attention_mask is not None:
        padded = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
    few = causal and q_length <= _MOST_DECODE_ROWS and not torch.is_grad_enabled()
    if few and static:  # before anything that depends on the length, which would change the mask's shape
        mask = _decode_mask(batch_size, first + q_length, padded, device)
        if mask is not None:
            return mask
    if padded is not None:
        seen = torch.nn.functional.pad(padded, (0, kv_length - padded.shape[1]))
    else:
        seen = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)

    if not causal:
        if attention_mask is None or (not is_compiling() and bool(seen.all())):
            return None
        return _mask(seen.int() - 1)

    if static and not is_compiling():
        first, static = int(first), False
    packed = None
    if attention_mask is None and not static and first == 0 and q_length == kv_length > 1:
        packed = _packed(mask_function, batch_size, q_length, device)
    if packed is not None:
        return packed
    if not static and first + q_length == kv_length:
        if attention_mask is None or (not is_compiling() and bool(seen.all())):
            return None
    if few and not static:
        mask = _decode_mask(batch_size, first + q_length, padded, device)
        if mask is not None:
            return mask
    keys = torch.where(seen & (torch.arange(kv_length, device=device) < first + q_length), 0, -1).int()
    at = torch.arange(q_length, device=device) + first
    return _mask(keys, keys[:, at])


def _decode_mask(batch, used, padded, device):
    """The mask of a pass that decode serves, if padding is on the left alone; else None.

    used: the keys in use, an int, or a tensor for a static cache. padded: bool [B, used], false for padding; or None.
    Every token of a model costs these operations on the host, so they are few: what is known on the device alone is copied
    at once and looked at here.
    """
    if padded is None:
        if isinstance(used, torch.Tensor):
            lengths = used.int().expand(batch)
        else:
            lengths = torch.full((batch,), used, dtype=torch.int32, device=device)
        return torch.stack((lengths, torch.zeros_like(lengths)))[None, :, None]
    if is_compiling():  # where the padding is, is not known while tracing
        return None
    width = padded.shape[1]
    known = padded.reshape(-1).view(torch.uint8)
    if isinstance(used, torch.Tensor):
        known = torch.cat((used.reshape(1).long().view(torch.uint8), known))
    known = known.cpu().numpy().tobytes()
    if isinstance(used, torch.Tensor):
        used, known = int.from_bytes(known[:8], sys.byteorder), known[8:]
    if used != width:
        return None
    leftpad = []
    for first in range(0, batch * width, width):
        row = known[first : first + width]
        leftpad.append(len(row) - len(row.lstrip(b"\0")))
        if row.find(b"\0", leftpad[-1]) >= 0:
            return None
    return torch.tensor(([used] * batch, leftpad), dtype=torch.int32, device=device)[None, :, None]


def _is_supported(mask_function, config):
    """Whether causal, window and segments together express the mask function."""
    if getattr(config, "attention_chunk_size", None) is not None:
        return False
    if mask_function is None:
        return True
    if is_compiling():  # a closure cannot be inspected while tracing
        return mask_function.__name__ != "or_mask"
    cells = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    name = mask_function.__qualname__.split(".")[0]
    if name == "and_masks":
        return all(_is_supported(part, None) for part in cells[0])
    return name in (
        "causal_mask_function",
        "bidirectional_mask_function",
        "sliding_window_overlay",
        "sliding_window_bidirectional_overlay",
        "packed_sequence_mask_function",
    )


def _window_of(mask_function):
    """(left, right) of the sliding windows that a supported mask function has, -1 for no bound; None if it has none."""
    if mask_function is None:
        return None
    name = mask_function.__qualname__.split(".")[0]
    first = [cell.cell_contents for cell in mask_function.__closure__ or ()][:1]
    if name == "sliding_window_overlay":
        return first[0] - 1, -1
    if name == "sliding_window_bidirectional_overlay":
        return first[0], first[0]
    windows = [window for window in map(_window_of, first[0] if name == "and_masks" else ()) if window is not None]
    if not windows:
        return None
    return tuple(min((side for side in sides if side >= 0), default=-1) for sides in zip(*windows))


def _packed(mask_function, batch, rows, device):
    """The mask if position ids restart within a row; else None.

    Transformers encodes that in the mask function: two adjacent tokens are of one sequence if the second sees the first.
    """
    from transformers.masking_utils import causal_mask_function

    if mask_function is None or mask_function is causal_mask_function:
        return None
    b = torch.arange(batch, device=device)[:, None]
    i = torch.arange(1, rows, device=device)[None, :]
    together = mask_function(b, b.new_zeros(()), i, i - 1).expand(batch, rows - 1)
    if is_compiling():
        return (~together.all()).int().expand(1, 1, 3, 1)
    if bool(together.all()):
        return None
    ids = torch.nn.functional.pad((~together).cumsum(1), (1, 0))
    return _mask(ids, ids)


def _mask(*rows):
    width = max(row.shape[1] for row in rows)
    padded = [torch.nn.functional.pad(row, (0, width - row.shape[1]), value=-1) for row in rows]
    return torch.stack(padded, dim=1).int()[:, None]


def _sequences(mask, rows, keys, windowed):
    """int32 [B, Sq] and [B, Sk]: the sequence of each query and key."""
    of_keys = mask[:, 0, 0, :keys]
    if mask.shape[2] == 2:
        return mask[:, 0, 1, :rows], of_keys
    # Padding counts as queries if they see every key; a window's queries must be as far from each other as their keys.
    return of_keys if windowed and rows == keys else of_keys.new_zeros(of_keys.shape[0], rows), of_keys


def _has_holes(ids):
    """Whether padding lies between real keys of a row. Packing removes it, which moves keys closer to each other."""
    real = torch.nn.functional.pad(ids >= 0, (1, 0))
    return ((real[:, 1:] & ~real[:, :-1]).sum(1) > 1).any()


class _Packing:
    """How the rows of a padded batch move into packed sequences and back, computed once per mask."""

    def __init__(self, mask, rows, keys, windowed):
        queries, keys = _sequences(mask, rows, keys, windowed)
        self.prefix = None
        if bool((queries == 0).all()):
            lengths = (keys == 0).sum(1)
            longest = int(lengths.max())
            if bool((keys[:, :longest] == 0).all()):
                self.prefix = longest  # a static cache without padding: only its used part is needed
                return
        self.holes = bool(_has_holes(keys))
        sequences = max(int(mask.max()), 0) + 1
        self.queries, self.cu_q, self.max_q = self._rows(queries, sequences)
        self.keys, self.cu_k, self.max_k = self._rows(keys, sequences)

    @staticmethod
    def _rows(ids, sequences):
        batch = torch.arange(ids.shape[0], device=ids.device, dtype=ids.dtype)[:, None]
        real = ids >= 0
        counts = torch.bincount((batch * sequences + ids)[real], minlength=ids.shape[0] * sequences)
        cu = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        return real.flatten().nonzero().flatten(), cu, int(counts.max())


def _packed_rows(t, rows):
    """[B, S, H, D] -> the real rows, [total, H, D]."""
    return t.flatten(0, 1).index_select(0, rows)


# ---- The layers' attention ----

_CHANGE_RESULTS = ("block_indices", "indices", "block_mask", "alibi", "attn_bias")  # arguments of some models' layers


def forward(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    softcap=None,
    is_causal=None,
    s_aux=None,
    position_bias=None,
    cache=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    max_length_k=None,
    **kwargs,
):
    """One layer's attention: query [B, H, Sq, D], key and value [B, Hkv, Sk, D] -> [B, Sq, H, D]."""
    if dropout:
        raise Error(
            f"attention dropout is {dropout}; only 0 is supported: set config.attention_dropout (attn_pdrop) to 0",
            "unsupported",
        )
    for name, given in (
        ("position_bias", position_bias is not None),
        ("cache", cache is not None),
        ("output_attentions", bool(kwargs.get("output_attentions"))),
        *((name, kwargs.get(name) is not None) for name in _CHANGE_RESULTS),
    ):
        if given:
            raise Error(f"{name} is given; tessera does not support it", "unsupported")
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    wanted = q.dtype
    if wanted == torch.float32 and q.is_cuda and not torch.is_autocast_enabled("cuda"):
        # Norms kept in float32 (as for training on quantised weights) make the activations of a half model float32.
        half = getattr(module.config, "dtype", None)
        if half in (torch.float16, torch.bfloat16):
            q, k, v = q.to(half), k.to(half), v.to(half)
    decodes = plain = False
    if attention_mask is not None:
        if attention_mask.dtype != torch.int32 or attention_mask.dim() != 4 or attention_mask.shape[2] > _ALL:
            raise Error(
                f"attention_mask is {list(attention_mask.shape)} of {attention_mask.dtype}; a 2-D padding mask is "
                "supported, a mask of query and key is not",
                "unsupported",
            )
        decodes = attention_mask.shape[1] == 2
        causal = decodes or 1 < attention_mask.shape[2] < _ALL
        plain = attention_mask.shape[2] >= _PACKED_OR_NOT
    else:
        plain = True
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    masks = dict(
        causal="bottom_right" if causal else None,
        alignment="bottom_right",
        softcap=softcap or 0.0,
        scale=scaling,
        return_lse=s_aux is not None,
    )
    if not is_compiling() and hasattr(attention_mask, "_tessera_window"):
        window = attention_mask._tessera_window
    elif attention_mask is not None and sliding_window is None and _has_window(module):
        raise Error(
            f"{type(module).__name__} does not pass its sliding window to its attention, and in a compiled model the mask "
            "does not say it; run the model without torch.compile",
            "unsupported",
        )
    else:  # in transformers, the window of a layer includes the query itself
        window = (sliding_window - 1,) * 2 if sliding_window is not None and sliding_window > 0 else None
    if window is not None:
        masks["window"] = (window[0], 0) if causal else window

    if decodes:
        used, leftpad = attention_mask[0, 0, 0], attention_mask[0, 1, 0]
        out = _with_sinks(_decode(q, k, v, masks, cache_seqlens=used, leftpad_k=leftpad), s_aux)
    elif cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if q.shape[0] != 1:
            raise Error(f"cu_seq_lens_q is given with a batch of {q.shape[0]}; packed sequences must be a batch of 1")
        out = attention(
            q[0], k[0], v[0], cu_seqlens_q=cu_seq_lens_q, cu_seqlens_k=cu_seq_lens_k,
            max_seqlen_q=max_length_q, max_seqlen_k=max_length_k, **masks,
        )  # fmt: skip
        out = _with_sinks(out, s_aux)[None]
    elif plain:
        if attention_mask is not None and attention_mask.shape[2] == _PACKED_OR_NOT:
            _assert_unpacked((attention_mask == 0).all())
        few = q.shape[1] <= _MOST_DECODE_ROWS
        if few and not want_gradients(q, k, v):
            out = _decode(q, k, v, masks)
        else:
            out = attention(q, k, v, **masks)
        out = _with_sinks(out, s_aux)
    elif is_compiling():
        out = _masked_in_a_graph(q, k, v, attention_mask, masks, s_aux)
    else:
        out = _masked(q, k, v, attention_mask, masks, s_aux)
    return out.to(wanted) if out.dtype != wanted and wanted == torch.float32 and q.is_cuda else out, None


def _has_window(module):
    """Whether this layer's mask has a sliding window, as far as the model's config says."""
    config = getattr(module, "config", None)
    if not getattr(config, "sliding_window", None) or not getattr(config, "use_sliding_window", True):
        return False
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return types is None or (index is not None and types[index] == "sliding_attention")


def _decode(q, k, v, masks, **lengths):
    """decode with the masks of attention; its alignment is always bottom-right."""
    q, k, v = under_autocast(q, k, v)
    return decode(q, k, v, **{name: value for name, value in masks.items() if name != "alignment"}, **lengths)


_HOLES = "padding between the tokens of a sequence is not supported with a sliding window; pad on the left or the right"


def _assert_unpacked(unpacked):
    """Fails at run time if position ids pack sequences in a compiled model."""
    _assert(
        unpacked,
        "tessera: sequences packed by position ids alone are not supported in a compiled model; "
        "pass cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k",
    )


def _assert(condition, message):
    """Fails at run time, in a graph. PyTorch has no public function for that."""
    assert_async = getattr(torch, "_assert_async", None)
    if assert_async is None:  # nothing can fail at run time, so refuse what may be wrong
        raise Error(message, "unsupported")
    assert_async(condition, message)


def _masked(q, k, v, mask, masks, sinks):
    known = getattr(mask, "_tessera_packing", None)
    shape = (q.shape[1], k.shape[1], "window" in masks)
    if known is None or known[0] != shape:
        known = (shape, _Packing(mask, *shape))
        mask._tessera_packing = known  # for the next layers
    packing = known[1]
    if packing.prefix is not None:
        return _with_sinks(attention(q, k[:, : packing.prefix], v[:, : packing.prefix], **masks), sinks)
    if packing.holes and "window" in masks:
        raise Error(_HOLES, "unsupported")
    out = attention(
        _packed_rows(q, packing.queries), _packed_rows(k, packing.keys), _packed_rows(v, packing.keys),
        cu_seqlens_q=packing.cu_q, cu_seqlens_k=packing.cu_k,
        max_seqlen_q=packing.max_q, max_seqlen_k=packing.max_k, **masks,
    )  # fmt: skip
    out = _with_sinks(out, sinks)
    whole = out.new_zeros(q.shape[0] * q.shape[1], *out.shape[1:])
    return whole.index_copy(0, packing.queries, out).view(*q.shape[:2], *out.shape[1:])


def _masked_in_a_graph(q, k, v, mask, masks, sinks):
    """The same with shapes that do not depend on the mask's values: real rows are sorted to the front."""
    queries, keys = _sequences(mask, q.shape[1], k.shape[1], "window" in masks)
    if "window" in masks:
        _assert(~_has_holes(keys), f"tessera: {_HOLES}")
    real_q, real_k = queries >= 0, keys >= 0
    order_q, order_k = (torch.argsort(~real.flatten(), stable=True) for real in (real_q, real_k))
    cu_q, cu_k = (torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int() for real in (real_q, real_k))
    out = attention(
        _packed_rows(q, order_q), _packed_rows(k, order_k), _packed_rows(v, order_k),
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1], **masks,
    )  # fmt: skip
    out = _with_sinks(out, sinks)
    # attention returns zero for rows that belong to no sequence.
    return torch.zeros_like(out).index_copy(0, order_q, out).view(*q.shape[:2], *out.shape[1:])


def _with_sinks(result, sinks):
    """A sink is an additional logit per head that takes weight but has no value."""
    if sinks is None:
        return result
    out, lse = result  # lse: [B, H, S], packed [H, total]
    kept = torch.sigmoid(lse.transpose(-1, -2) - sinks.float())[..., None]
    return (out * kept).to(out.dtype)


# ---- Experts ----

_ACTIVATIONS = {
    **dict.fromkeys(("SiLU", "SiLUActivation"), "silu"),
    **dict.fromkeys(("GELU", "GELUActivation"), "gelu"),
    **dict.fromkeys(("GELUTanh", "PytorchGELUTanh", "NewGELUActivation"), "gelu_tanh"),
    "ReLU": "relu",
}


def experts(module, hidden_states, top_k_index, top_k_weights):
    """The experts of a mixture: what transformers calls with the router's choice."""
    act_fn = getattr(module, "act_fn", None)
    function = type(act_fn).__name__
    tanh = function == "GELU" and getattr(act_fn, "approximate", None) == "tanh"
    activation = "gelu_tanh" if tanh else _ACTIVATIONS.get(function)
    gated = hasattr(module, "gate_up_proj")
    gate_function = getattr(type(module), "_apply_gate", None)
    reasons = {
        "biases": module.has_bias,
        "transposed weights": module.is_transposed,
        "interleaved weights": gated and not getattr(module, "is_concatenated", True),
        "a norm after each expert": getattr(module, "has_post_expert_norm", False),
        "a gate of its own": gated and getattr(gate_function, "__module__", None) != "transformers.integrations.moe",
        f"the activation {function}": activation is None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise Error(f"{type(module).__name__} has {reason}, which tessera.moe does not support", "unsupported")
    gate, up = module.gate_up_proj.chunk(2, dim=1) if gated else (None, module.up_proj)
    x = hidden_states.to(up.dtype)
    out = moe(x, None, up, module.down_proj, gate, experts=top_k_index, weights=top_k_weights, activation=activation)
    return out.to(hidden_states.dtype)


# ---- Which layers run on Tessera ----


def report(model, length=2048):
    """Prints a line for every attention layer and how many run on Tessera; returns that number.

    The kernel shown is that of the forward for one sequence of `length` tokens.
    """
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Attention") and hasattr(getattr(module, "config", None), "_attn_implementation")
    ]
    parameter = next(model.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    dtype = getattr(model, "dtype", torch.float32)
    switched = 0
    for name, module in layers:
        config = module.config
        heads = _first(module, config, "num_heads", "num_attention_heads")
        kv_heads = _first(module, config, "num_key_value_heads") or heads
        dim = _first(module, config, "head_dim") or config.hidden_size // heads
        shape = f"{heads} heads, {kv_heads} kv heads, head dim {dim}, {'GQA' if kv_heads != heads else 'MHA'}"
        implementation = config._attn_implementation
        if implementation in _registered:
            switched += 1
            kernel = _kernel(heads, kv_heads, dim, length, dtype, device)
            print(f"{name}: {shape}, {kernel}")
        else:
            print(f"{name}: {shape}, not on tessera ({implementation})")
    print(f"{switched} of {len(layers)} attention layers run on tessera")
    return switched


def _first(module, config, *names):
    for owner in (module, config):
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    return None


def _kernel(heads, kv_heads, dim, length, dtype, device):
    place = device if device.type == "cuda" else torch.device("meta")
    q = torch.empty((1, 1, heads, dim), dtype=dtype, device=place).expand(1, length, heads, dim)
    k = torch.empty((1, 1, kv_heads, dim), dtype=dtype, device=place).expand(1, length, kv_heads, dim)
    try:
        answer = explain(q, k, k, causal=True, arch=None if device.type == "cuda" else "cpu", format="json")
    except Error as error:
        return f"refused: {error}"
    if answer["chosen"] is not None:
        return f"kernel {answer['chosen']['kernel']}"
    return "no kernel: " + "; ".join(f"{each['kernel']}: {each['reason']}" for each in answer["refused"])
