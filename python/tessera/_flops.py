"""What torch.utils.flop_counter.FlopCounterMode counts for the operators, which it would take to cost nothing.

Two for each multiply-add of a matrix product, as for PyTorch's own operators; for attention, of every query with every key
of its sequence, whatever the mask. A backward recomputes the scores.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from tessera._gemm import B_TRANSPOSED

_ops = torch.ops.tessera


def _is_known(tensor):
    """Whether it has values: a fake tensor is of another class."""
    return type(tensor) is torch.Tensor and tensor.device.type != "meta"


def _pairs(q, k, cu_seqlens_q, cu_seqlens_k, options):
    """Pairs of a query and a key, all sequences together; without their lengths, as if each were the longest."""
    if q.dim() == 4:
        return q.shape[0] * q.shape[1] * k.shape[1]
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return q.shape[0] * k.shape[0]
    if _is_known(cu_seqlens_q) and _is_known(cu_seqlens_k):
        return int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()).sum())
    max_seqlen_q, max_seqlen_k = options[6:8]  # 0: not given
    return (cu_seqlens_q.shape[0] - 1) * (max_seqlen_q or q.shape[0]) * (max_seqlen_k or k.shape[0])


@register_flop_formula(_ops.attention, get_raw=True)
def _attention(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, *options, out_val=None):
    pairs = _pairs(q, k, cu_seqlens_q, cu_seqlens_k, options)
    return 2 * pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1])


@register_flop_formula(_ops.attention_backward, get_raw=True)
def _attention_backward(q, k, v, alibi, cu_seqlens_q, cu_seqlens_k, *options, out_val=None):
    pairs = _pairs(q, k, cu_seqlens_q, cu_seqlens_k, options)
    return 2 * pairs * q.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


def _cached_flops(q, k, v, cache_seqlens, page_table, cu_seqlens_q, new):
    """Without the lengths, as if the cache were full. new: keys that are appended to each sequence's."""
    if cache_seqlens is not None and _is_known(cache_seqlens):
        lengths = cache_seqlens.long() + new
        pairs = int((lengths * (q.shape[1] if cu_seqlens_q is None else cu_seqlens_q.diff())).sum())
    else:
        capacity = k.shape[1] * (1 if page_table is None else page_table.shape[1])
        pairs = capacity * q.shape[0] * (q.shape[1] if q.dim() == 4 else 1)
    return 2 * pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1])


@register_flop_formula(_ops.decode, get_raw=True)
def _decode(q, k, v, alibi, cache_seqlens, page_table, cache_batch_idx, leftpad_k, cu_seqlens_q, *_, out_val=None):
    return _cached_flops(q, k, v, cache_seqlens, page_table, cu_seqlens_q, 0)


@register_flop_formula(_ops.decode_append, get_raw=True)
def _decode_append(
    q, k, v, alibi, cache_seqlens, page_table, cache_batch_idx, leftpad_k, cu_seqlens_q, k_scale, v_scale, k_new, *_,
    out_val=None,
):  # fmt: skip
    return _cached_flops(q, k, v, cache_seqlens, page_table, cu_seqlens_q, 0 if k_new is None else k_new.shape[1])


def _columns(b, flags):
    """Columns of a product with b."""
    return b.shape[-1] if flags & B_TRANSPOSED else b.shape[-2]


def _multiply_adds(a, b, gate, flags):
    return a.numel() * _columns(b, flags) * (1 if gate is None else 2)


@register_flop_formula(_ops.gemm, get_raw=True)
def _gemm(a, b, bias, gate, gate_bias, saved, residual, activation, flags, *_, out_val=None):
    return 2 * _multiply_adds(a, b, gate, flags)


@register_flop_formula(_ops.grouped_gemm, get_raw=True)
def _grouped_gemm(a, b, offsets, bias, gate, gate_bias, saved, residual, activation, flags, *_, out_val=None):
    groups = b.shape[0] if offsets is None and a.dim() == 2 else 1  # one a for all groups; else each has its rows of it
    return 2 * groups * _multiply_adds(a, b, gate, flags)


@register_flop_formula([_ops.linear, _ops.grouped_linear], get_raw=True)
def _linear(x, weight, *_, out_val=None):
    return 2 * x.numel() * weight.shape[-2]


def _layers(up, down, gate):
    """Multiply-adds of one row with the up, gate and down weights of an MLP."""
    one = up.shape[-2] * up.shape[-1]
    return one, 0 if gate is None else one, down.shape[-2] * down.shape[-1]


@register_flop_formula(_ops.mlp, get_raw=True)
def _mlp(x, up, down, gate, *_, out_val=None):
    return 2 * x.shape[0] * sum(_layers(up, down, gate))


@register_flop_formula(_ops.moe, get_raw=True)
def _moe(x, logits, up, down, gate, experts, weights, top_k, *_, out_val=None):
    chosen = top_k if experts is None else experts.shape[-1]
    return 2 * x.shape[0] * chosen * sum(_layers(up, down, gate))


def _mlp_gradients(rows, up, down, gate, recomputes, needs_x, needs_weights):
    first, second, last = _layers(up, down, gate)
    hidden = first + second
    return 2 * rows * (last + hidden * (recomputes + needs_x) + (hidden + last) * needs_weights)


@register_flop_formula(_ops.mlp_backward, get_raw=True)
def _mlp_backward(
    dout, x, up, down, gate, up_bias, gate_bias, hidden, before, before_gate, activation, needs_x, needs_weights, out_val=None
):
    return _mlp_gradients(x.shape[0], up, down, gate, before.numel() == 0, needs_x, needs_weights)


@register_flop_formula(_ops.moe_backward, get_raw=True)
def _moe_backward(
    dout, dbalance_loss, x, logits, up, down, gate, experts, weights, positions, offsets, before, before_gate, x_rows,
    activation, scoring, flags, needs_x, needs_router, needs_weights, out_val=None,
):  # fmt: skip
    return _mlp_gradients(experts.numel(), up, down, gate, before.numel() == 0, needs_x, needs_weights)


@register_flop_formula(_ops.linear_cross_entropy, get_raw=True)
def _linear_cross_entropy(hidden, weight, target, reduction, needs_hidden, needs_weight, out_val=None):
    return 2 * hidden.numel() * weight.shape[0] * (1 + needs_hidden + needs_weight)


@register_flop_formula(_ops.linear_cross_entropy_backward, get_raw=True)
def _linear_cross_entropy_backward(dout, hidden, weight, target, needs_hidden, needs_weight, out_val=None):
    return 2 * hidden.numel() * weight.shape[0] * (1 + needs_hidden + needs_weight)
