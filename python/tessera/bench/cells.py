"""The shapes that are compared, and what each asks for. Nothing here needs torch."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Cell:
    batch: int
    seq: int
    heads: int
    dim: int
    causal: bool
    dtype: str = "bf16"
    small: bool = False  # so short that the host's part counts: graph replay and host time are measured too
    decode: bool = False  # one query a sequence, against `seq` keys
    heads_kv: int = 0  # 0: as many as heads

    @property
    def ops(self):
        return ("decode",) if self.decode else ("forward", "backward")

    @property
    def queries(self):
        return 1 if self.decode else self.seq

    @property
    def key_heads(self):
        return self.heads_kv or self.heads

    @property
    def q_shape(self):
        return (self.batch, self.queries, self.heads, self.dim)

    @property
    def k_shape(self):
        return (self.batch, self.seq, self.key_heads, self.dim)

    @property
    def name(self):
        mask = "/causal" if self.causal else ""
        heads = f"{self.heads}:{self.heads_kv}" if self.heads_kv else f"{self.heads}"
        return f"{self.dtype}/b{self.batch}_s{self.seq}_h{heads}_d{self.dim}{mask}"

    def flops(self, op):
        """Useful work, as the field counts it: 4 B H S S D forward, half of that under a causal mask; backward 2.5x."""
        forward = 4 * self.batch * self.heads * self.queries * self.seq * self.dim / (2 if self.causal else 1)
        return forward * (2.5 if op == "backward" else 1)

    def bytes(self, op):
        """Each tensor once: q k v o, and for the backward q k v o do dq dk dv, with the fp32 LSE; decode has none."""
        tensors = 2 * (math.prod(self.q_shape) + math.prod(self.k_shape)) * 2
        lse = 0 if op == "decode" else self.batch * self.queries * self.heads * 4
        return (2 if op == "backward" else 1) * tensors + lse

    def unfused_bytes(self, op):
        """With scores going through memory: S and P written and read; backward P twice, dP and dS written and read."""
        scores = self.batch * self.heads * self.queries * self.seq * 2
        return self.bytes(op) + (7 if op == "backward" else 4) * scores


def table_cells(dtype="bf16"):
    """16,384 tokens of width 2,048 (2,000 for D = 80): the 32 shapes of the published tables."""
    return [Cell(16384 // s, s, 2048 // d, d, causal, dtype)
            for d in (64, 80, 128, 256) for s in (512, 2048, 8192, 16384) for causal in (False, True)]


def small_cells(dtype="bf16"):
    shapes = [(32, 8, 128, 64), (32, 8, 512, 64), (2, 8, 512, 64), (1, 8, 512, 64), (1, 32, 2048, 128)]
    return [Cell(b, s, h, d, True, dtype, small=True) for b, h, s, d in shapes]


def decode_cells(dtype="bf16"):
    """A step of generation with the heads of an 8-billion model, from one short sequence to a full cache."""
    shapes = [(1, 1024), (1, 8192), (1, 131072), (16, 8192), (64, 4096)]
    return [Cell(b, s, 32, 128, False, dtype, small=True, decode=True, heads_kv=8) for b, s in shapes]


def toy_cells(dtype="bf16"):
    """To try the harness itself where there is no GPU."""
    return [Cell(1, 64, 2, 64, False, dtype), Cell(2, 96, 2, 80, True, dtype, small=True),
            Cell(2, 150, 4, 64, False, dtype, small=True, decode=True, heads_kv=2)]
