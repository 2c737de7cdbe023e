"""FlopCounterMode counts the operators as it counts PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import tessera


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def rows(*shape, grad=True):
    return torch.randn(*shape).requires_grad_(grad)


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_attention_counts_two_products_forward_and_five_backward(heads_kv):
    q, k, v = rows(2, 48, 4, 32), rows(2, 80, heads_kv, 32), rows(2, 80, heads_kv, 24)
    trained = flops(lambda: tessera.attention(q, k, v).sum().backward())
    forward = flops(lambda: tessera.attention(q.detach(), k.detach(), v.detach()))
    pairs = 2 * 4 * 48 * 80
    assert forward == 2 * pairs * (32 + 24)
    assert trained == forward + 2 * pairs * (3 * 32 + 2 * 24)


def test_packed_sequences_count_their_own_keys():
    x = rows(30, 2, 16, grad=False)
    ends = torch.tensor([0, 10, 10, 30], dtype=torch.int32)
    packed = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=20, max_seqlen_k=20)
    assert flops(lambda: tessera.attention(x, x, x, **packed)) == 4 * 2 * 16 * (10 * 10 + 20 * 20)


def test_decode_counts_the_keys_in_the_cache():
    q, cache = rows(2, 1, 4, 16, grad=False), rows(2, 64, 2, 16, grad=False)
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    assert flops(lambda: tessera.decode(q, cache, cache, cache_seqlens=lengths)) == 4 * 4 * 16 * (5 + 9)
    assert flops(lambda: tessera.decode(q, cache, cache)) == 4 * 4 * 16 * (64 + 64)


def test_an_append_counts_its_own_keys():
    q, new, cache = rows(2, 3, 4, 16, grad=False), rows(2, 3, 2, 16, grad=False), rows(2, 64, 2, 16, grad=False)
    lengths = torch.tensor([0, 9], dtype=torch.int32)
    call = lambda: tessera.decode(q, cache, cache.clone(), cache_seqlens=lengths, k_new=new, v_new=new)  # noqa: E731
    assert flops(call) == 4 * 4 * 16 * 3 * (3 + 12)


def test_packed_queries_count_the_keys_of_their_sequence():
    q, cache = rows(5, 4, 16, grad=False), rows(2, 64, 2, 16, grad=False)
    packed = dict(cache_seqlens=torch.tensor([8, 9], dtype=torch.int32), cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32))
    assert flops(lambda: tessera.decode(q, cache, cache, max_seqlen_q=3, **packed)) == 4 * 4 * 16 * (2 * 8 + 3 * 9)


def layers(x, up, down, gate=None):
    hidden = F.silu(F.linear(x, up if gate is None else gate))
    return F.linear(hidden if gate is None else hidden * F.linear(x, up), down)


@pytest.mark.parametrize("gated", [False, True])
def test_products_count_what_pytorch_s_count(gated):
    x, up, down = rows(24, 16), rows(40, 16), rows(8, 40)
    gate = rows(40, 16) if gated else None
    ours = flops(lambda: tessera.mlp(x, up, down, gate=gate, activation="silu").sum().backward())
    assert ours == flops(lambda: layers(x, up, down, gate).sum().backward())
    ours = flops(lambda: tessera.linear(x, up, activation="silu").sum().backward())
    assert ours == flops(lambda: F.silu(F.linear(x, up)).sum().backward())


def test_groups_count_their_rows():
    x, weight = rows(24, 16), rows(3, 40, 16)
    offsets = torch.tensor([0, 10, 10, 24], dtype=torch.int32)
    assert flops(lambda: tessera.grouped_linear(x, weight, offsets).sum().backward()) == 3 * 2 * 24 * 16 * 40
    each = rows(24, 3, 16)
    assert flops(lambda: tessera.grouped_linear(each, weight).sum().backward()) == 3 * 3 * 2 * 24 * 16 * 40


def test_experts_count_the_chosen_ones():
    x, logits = rows(24, 16), rows(24, 4)
    up, down = rows(4, 40, 16), rows(4, 16, 40)
    forward = 2 * 24 * 2 * 2 * 40 * 16
    assert flops(lambda: tessera.moe(x.detach(), logits.detach(), up.detach(), down.detach(), top_k=2)) == forward
    assert flops(lambda: tessera.moe(x, logits, up, down, top_k=2).sum().backward()) == 3 * forward


def test_linear_cross_entropy_counts_what_pytorch_s_counts():
    x, weight, target = rows(24, 16), rows(50, 16), torch.randint(50, (24,))
    ours = flops(lambda: tessera.linear_cross_entropy(x, weight, target).backward())
    assert ours == flops(lambda: F.cross_entropy(F.linear(x, weight), target).backward())
