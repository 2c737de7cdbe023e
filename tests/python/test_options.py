"""An eager call keeps the options of the last calls, by their arguments: it must never use those of another call."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import tessera
from tessera import _attention, _native, _ops

# More than are kept. Each differs from the first in one argument, some in a value's type alone.
OPTIONS = [
    {},
    {"causal": True},
    {"causal": 1},
    {"causal": "top_left"},
    {"causal": True, "alignment": "bottom_right"},
    {"window": (3, 0)},
    {"window": (0, 3)},
    {"window": (3, None)},
    {"window": (True, 0)},
    {"window": [3, 1]},
    {"softcap": 1},
    {"softcap": 1.5},
    {"scale": 1},
    {"scale": True},
    {"scale": -1.0},
    {"attention_chunk": 2},
    {"attention_chunk": 3},
    {"precision": "fp8"},
]
q, k, v = (torch.randn(1, 7, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


def uncached(causal=None, alignment=None, window=None, softcap=0.0, scale=None, attention_chunk=0, precision=None):
    options = _attention._options(causal, alignment, window, softcap, scale, None, None, None, attention_chunk, precision)
    return _native.forward(q, k, v, None, None, None, options, False, False)


EXPECTED = [uncached(**options) for options in OPTIONS]


def calls(seed):
    """Every pair of options one after the other, and single ones repeated, in any order."""
    pairs = [*itertools.permutations(range(len(OPTIONS)), 2), *((i, i) for i in range(len(OPTIONS)))]
    random.Random(seed).shuffle(pairs)
    return itertools.chain.from_iterable(pairs)


def check(i):
    assert torch.equal(tessera.attention(q, k, v, **OPTIONS[i]), EXPECTED[i]), OPTIONS[i]


def test_each_call_has_its_own_options():
    for i in calls(seed=0):
        check(i)


def test_each_call_has_its_own_options_in_many_threads():
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(lambda seed: [check(i) for i in calls(seed)], range(4)):
            pass


def test_the_options_of_sdpa_are_its_own():
    rows = [t.transpose(1, 2) for t in (q, k, v)]
    for i in calls(seed=1):
        check(i)
        causal = i % 2 == 0
        want = EXPECTED[1] if causal else EXPECTED[0]
        assert torch.equal(tessera.sdpa(*rows, is_causal=causal).transpose(1, 2), want)


class Side:
    """A side of a window that changes."""

    __hash__ = None

    def __init__(self, rows):
        self.rows = rows

    def __index__(self):
        return self.rows


def test_a_value_that_changes_is_read_again():
    sides, left, right = [3, 0], Side(3), Side(0)
    windows = sides, (left, right)
    for window in windows * 2:
        assert torch.equal(tessera.attention(q, k, v, window=window), uncached(window=(3, 0)))
    sides[:] = left.rows, right.rows = 0, 3
    for window in windows:
        assert torch.equal(tessera.attention(q, k, v, window=window), uncached(window=(0, 3)))


def test_a_length_given_as_a_tensor_is_read_again():
    lengths, longest = torch.tensor([0, 7], dtype=torch.int32), torch.tensor(7)
    packed = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=longest, max_seqlen_k=longest)
    tessera.attention(q[0], k[0], v[0], **packed)
    longest.fill_(6)
    with pytest.raises(tessera.Error, match="max_seqlen_q"):
        tessera.attention(q[0], k[0], v[0], **packed)


def test_options_that_are_refused_are_refused_again():
    for name, wrong in (("window", (1, 2, 3)), ("window", (1, 2**70)), ("alignment", "left"), ("scale", 0), ("softcap", "a")):
        for _ in range(3):
            with pytest.raises(tessera.Error, match=name):
                tessera.attention(q, k, v, **{name: wrong})
            check(0)


def test_deterministic_algorithms_are_asked_for_in_each_call(monkeypatch):
    flags = []
    monkeypatch.setattr(_attention, "_apply", lambda q, k, v, rest: flags.append(rest[3][2]))
    try:
        for on in (False, True, False):
            torch.use_deterministic_algorithms(on)
            tessera.attention(q.clone().requires_grad_(), k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [flag & _ops.DETERMINISTIC for flag in flags] == [0, _ops.DETERMINISTIC, 0]
