"""The shapes that are compared and the work that each asks for, from cells.json. Nothing here needs torch.

`tessera cases --suite peers --json cells.json` writes that file: the program and this package share one list of shapes,
FLOPs and bytes. Its "cases" are one object per shape and op:

    name           the op and the shape's name: "forward/bf16/b8_s2048_h16_d128/causal"
    family, op     "attention", "attention_forward"
    fields         dtype, batch, seq_q, seq_k, heads_q, heads_kv, dim_qk, dim_v, causal
    tags           suites: "table", "odd", "small", "decode"; or "toy", with "small" or "decode" for how it is measured
    flops          useful work: 4 B H D for each visible (query, key) pair forward, 2.5x backward
    bytes          each tensor once, with the fp32 LSE, which decode does not have
    unfused_bytes  with the scores going through memory
"""

import dataclasses
import json
import pathlib

FILE = pathlib.Path(__file__).with_name("cells.json")
SUITES = ("table", "odd", "small", "decode", "toy")


@dataclasses.dataclass(frozen=True)
class Work:
    flops: float
    bytes: float
    unfused_bytes: float


@dataclasses.dataclass(frozen=True)
class Cell:
    """A shape, its ops and the work of each. The fields are attributes: cell.batch, cell.seq_q, ..."""

    name: str
    fields: dict
    tags: tuple = ()
    work: dict = dataclasses.field(default_factory=dict)  # op -> Work

    def __getattr__(self, name):
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def ops(self):
        return tuple(self.work)

    @property
    def decode(self):
        return "decode" in self.tags

    @property
    def small(self):
        """So short that host time counts: graph replay and host time are measured, too."""
        return is_small(self.tags)

    @property
    def q_shape(self):
        return (self.batch, self.seq_q, self.heads_q, self.dim_qk)

    @property
    def k_shape(self):
        return (self.batch, self.seq_k, self.heads_kv, self.dim_qk)

    @property
    def v_shape(self):
        return (self.batch, self.seq_k, self.heads_kv, self.dim_v)

    @property
    def out_shape(self):
        return (self.batch, self.seq_q, self.heads_q, self.dim_v)

    def of_dtype(self, dtype):
        """The same shape in another 16-bit type: the work is the same."""
        name = f"{dtype}/{self.name.removeprefix(f'{self.dtype}/')}"
        return dataclasses.replace(self, name=name, fields=self.fields | {"dtype": dtype})


def is_small(tags):
    return "small" in tags or "decode" in tags


def cells_of(cases):
    """Cells from the objects of "cases", in their order."""
    cells = {}
    for case in cases:
        tags = tuple(case["tags"])
        op = case["op"].removeprefix(f"{case['family']}_")
        name = case["name"].removeprefix(f"{op}/")
        cell = cells.setdefault((name, tags), Cell(name, case["fields"], tags))
        cell.work[op] = Work(case["flops"], case["bytes"], case["unfused_bytes"])
    return list(cells.values())


def suite(name, dtype="bf16", file=FILE):
    """The cells of one of SUITES. Toy cells are in no other."""
    cells = cells_of(json.loads(pathlib.Path(file).read_text())["cases"])
    return [c.of_dtype(dtype) for c in cells if name in c.tags and ("toy" in c.tags) == (name == "toy")]
