"""Products, MLPs, experts, losses, norms and rotary embedding beside PyTorch, torch.compile, quack-kernels and Liger: one call
of each in turn, on the same tensors.

Results are compared with PyTorch's of the same size first: of several results the first, all of them for the gradients of norms
and of the likelihood. A row in which Tessera's differs has no times; another library that fails or differs is left out of its
row, with the reason. On a CPU the shapes are smaller and nothing is flushed. cuBLASLt, which the tuner may choose for Tessera's
products, is switched off.
"""

import gc
import hashlib
import json
import os
import pathlib
import sys
import time

from . import entrants, measure, product_peers
from .product_rows import SIZES, Rows

UNITS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "GB/s": 1e9}


class Bench(Rows):
    def __init__(self, device, dtype, sizes=None, peers=()):
        super().__init__(device, dtype, sizes or SIZES[device])
        self.peers = peers
        self.clock = measure.CudaClock() if device == "cuda" else measure.CpuClock()

    def distance(self, made, expected, compared=1):
        """The largest, of the first tensors of each."""
        made, expected = (t if isinstance(t, tuple) else (t,) for t in (made, expected))
        pairs = [(one.double(), other.double()) for one, other in zip(made[:compared], expected)]
        return self.torch.stack([(one - other).norm() / other.norm() for one, other in pairs]).max().item()

    def takes_part(self, entrant):
        peer = product_peers.peer_of(entrant)
        return peer is None or peer in self.peers

    def first_call(self, row, case, name, call, expected):
        """What is wrong with it, or None. Notes the memory that it takes beyond what is there and what it returns."""
        torch = self.torch
        if self.device == "cuda":
            first = storages_of(torch, call())  # what a library searches and keeps at its first call does not count
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        made = call()
        if self.device == "cuda":
            torch.cuda.synchronize()
            new = [storage for at, storage in storages_of(torch, made).items() if at not in first]
            case["memory"][name] = torch.cuda.max_memory_allocated() - before - sum(storage.nbytes() for storage in new)
        if expected is None:
            return None
        off = self.distance(made, expected, row.compared)
        return None if off <= row.agreement else f"differs from PyTorch's by {off:.3g} of its norm"

    def judged(self, row, case, calls):
        """The calls whose results agree. Raises what Tessera's or PyTorch's raise; of others, the case has the reason."""
        expected, kept = {}, {}
        for name, call in calls.items():
            reference = reference_of(name, calls)
            if reference and reference not in expected:
                expected[reference] = calls[reference]()
            try:
                wrong = self.first_call(row, case, name, call, expected.get(reference))
            except Exception as problem:
                if product_peers.peer_of(name) is None:
                    raise
                wrong = first_line(problem)
            if wrong and name.startswith("tessera"):
                case["wrong"] = f"{name}: the result {wrong}"
            elif wrong:
                case["left_out"][name] = wrong
            else:
                kept[name] = call
        return kept

    def measured(self, row, rounds):
        """One case of the record."""
        torch = self.torch
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        torch.manual_seed(1)
        case = {"name": row.name, "unit": row.unit, "work": row.work, "copied": row.copied, "entrants": {}, "memory": {},
                "left_out": {}}
        try:
            with torch.no_grad():
                calls = {name: call for name, call in row.make().items() if self.takes_part(name)}
                calls = self.judged(row, case, calls)
                if "wrong" in case:
                    return case
                if row.graph and self.device == "cuda":
                    samples = [self.clock.graph(lambda call=call: call) for call in calls.values()]
                else:
                    timed = [(lambda: None, call) for call in calls.values()]
                    self.clock.round_robin(timed, 1)  # warm-up
                    samples = self.clock.round_robin(timed, rounds)
        except Exception as problem:  # what does not fit or is not there is a row that says so
            case["refused"] = first_line(problem)
            return case
        case["entrants"] = {name: measure.summary(taken) for name, taken in zip(calls, samples)}
        return case

def reference_of(name, calls):
    """The entrant whose result this one's is compared with; None: nobody's. "quack 1376" computes what "pytorch 1376" does."""
    if name in ("copy", "tessera products"):
        return None
    size = [word for word in name.split() if word.isdigit()]
    reference = " ".join(["pytorch", *size])
    return reference if reference != name and reference in calls else None


def storages_of(torch, made):
    """{address: storage} of its tensors."""
    tensors = [t for t in (made if isinstance(made, tuple) else (made,)) if isinstance(t, torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}


def first_line(problem):
    name = type(problem).__name__
    return f"{name}: {(str(problem).strip().splitlines() or [name])[0][:160]}"


def figure(case, entrant):
    """In the row's unit."""
    seconds = case["entrants"][entrant]["median_s"]
    if case["unit"] == "us":
        return seconds * 1e6
    return case["copied" if entrant == "copy" else "work"] / seconds / UNITS[case["unit"]]


HEADING = "| | unit | Tessera | other entrants | Tessera over the best of the others |"


def table(cases):
    """The cases as Markdown: each entrant's figure, and Tessera's speed over the best peer's."""
    out = [HEADING, "|---|---|---|---|---|"]
    for case in cases:
        if not case["entrants"]:
            out.append(f"| {case['name']} | {case.get('refused') or case['wrong']} | | | |")
            continue
        own, times = figure(case, "tessera"), {n: e["median_s"] for n, e in case["entrants"].items()}
        others = [f"{name} {figure(case, name):.0f}" for name in times if name != "tessera"]
        others = ", ".join(others + [f"{name} left out" for name in case.get("left_out", {})])
        best = min(s for name, s in times.items() if not name.startswith(("tessera", "copy")))
        out.append(f"| {case['name']} | {case['unit']} | {own:.1f} | {others} | {best / times['tessera']:.2f} |")
    return "\n".join(out)


def with_table(page, cases):
    """A page whose first table of products is replaced by that of the cases."""
    before, found, rest = page.partition(HEADING)
    if not found:
        raise ValueError("the page has no table of products")
    return before + table(cases) + "\n\n" + rest.partition("\n\n")[2]


def library_hash():
    """Of the library with its kernels: rows of another one must not stand beside its rows."""
    from tessera import _native

    return hashlib.sha256(pathlib.Path(_native.__file__).read_bytes()).hexdigest()[:16]


def earlier_cases(file, record):
    """{name: case} of the rows in the file that an earlier run measured, if it was one like this: the same library, device, ..."""
    try:
        earlier = json.loads(pathlib.Path(file).read_text())
    except (OSError, ValueError):
        return {}
    like = [{**each, "environment": {**each.get("environment", {}), "date": None}} for each in (earlier, record)]
    same = all(like[0].get(name) == like[1][name] for name in ("environment", "library", "device", "dtype", "peers"))
    return {case["name"]: case for case in earlier["cases"] if same and case["entrants"]}


def main(options, environment, state):
    """Runs the rows whose name contains one of the filter's comma-separated texts; returns an exit code."""
    import torch

    try:
        peers, missing = entrants.chosen_of(options.peers or ("all" if options.device == "cuda" else "none"), product_peers.PEERS,
                                            product_peers.installed)
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if missing:
        print(f"not installed: {', '.join(missing)}", file=sys.stderr)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options.dtype]
    os.environ["TESSERA_NO_CUBLASLT"] = "1"
    bench = Bench(options.device, dtype, peers=peers)
    rows = list(bench.rows())
    chosen = [row for row in rows if any(part in row.name for part in options.filter.split(","))]
    if not chosen:
        print(f"error: no row has '{options.filter}' in its name", file=sys.stderr)
        return 2
    record = {"environment": environment, "library": library_hash(), "suite": "products", "device": options.device,
              "dtype": options.dtype, "cublaslt": False, "peers": peers, "not_installed": missing, "gpu_before": state(),
              "cases": []}
    done = earlier_cases(options.json, record) if options.resume else {}
    begin = time.monotonic()
    for row in chosen:
        if row.name not in done:
            done[row.name] = bench.measured(row, options.rounds) | {
                "date": environment.get("date"), "library_hash": record["library"], "torch": torch.__version__}
        print(f"{row.name:<48} [{time.monotonic() - begin:.0f} s]", file=sys.stderr, flush=True)
        record["cases"] = [done[each.name] for each in rows if each.name in done]
        if options.json:  # after each row, so that a run that is cut short leaves what it has
            pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    record["gpu_after"], record["seconds"] = state(), time.monotonic() - begin
    print(table(record["cases"]))
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 1 if any("wrong" in case for case in record["cases"]) else 0
