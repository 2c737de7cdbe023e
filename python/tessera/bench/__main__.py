"""Benchmark Tessera's attention against its peers, in one process and on the same tensors."""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys
import time

from . import accuracy, cells, entrants, library, measure, product_peers, products, report, transformer_np

DEFAULT_PEERS = "fa2,cudnn,fa3,fa4"

EXAMPLES = """examples:
  python -m tessera.bench --json peers.json           against FlashAttention-2, 3 and 4 and cuDNN
  python -m tessera.bench --filter d80 --rounds 50
  python -m tessera.bench --suite small --ops forward
  python -m tessera.bench --suite decode
  python -m tessera.bench --peers all --filter s2048
  python -m tessera.bench --suite np --json np.json    training steps of examples/transformer_np
  python -m tessera.bench --suite np --filter small/all,mid/all
  python -m tessera.bench --suite products --json products.json    GEMM, MLPs, experts, losses and norms
  python -m tessera.bench --suite products --device cpu --dtype fp32
  python -m tessera.bench --table results/h200/products.json docs/products.md    the page's table, from what --suite products wrote
  python -m tessera.bench --compare first.json second.json
"""


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m tessera.bench", description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", metavar="FILE",
                        help="the library to load; default: $TESSERA_LIBRARY, else the package's own, else the one in "
                        "build/lib")
    parser.add_argument("--suite", default="table,small,decode",
                        help=f"comma-separated list of {', '.join(cells.SUITES)} (default: %(default)s); or np: training "
                        "steps of a transformer neural process; or products: GEMM, MLPs, experts, losses and norms")
    parser.add_argument("--ops", default=",".join(report.OPS), help="comma-separated list (default: %(default)s)")
    parser.add_argument("--peers",
                        help=f"comma-separated list of {', '.join(entrants.PEERS)}; or all, or none (default: "
                        f"{DEFAULT_PEERS}); with --suite products, of {', '.join(product_peers.PEERS)} (default on a GPU: all "
                        "that are installed; on a CPU: none)")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"),
                        help="default: %(default)s; fp32 is for --suite products on the CPU")
    parser.add_argument("--filter", default="", metavar="TEXT", help="run only cells whose name contains TEXT")
    parser.add_argument("--rounds", type=int, default=20, metavar="N",
                        help="time each entrant N times per cell (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"),
                        help="cpu is for --suite products, and to try the harness of the others, whose figures then mean nothing "
                        "(default: %(default)s)")
    parser.add_argument("--example", metavar="FOLDER", help="of --suite np: where its model is; default: "
                        "examples/transformer_np of the checkout")
    parser.add_argument("--json", metavar="FILE",
                        help="write all figures and samples to FILE; if stopped, attention's are in FILE.partial")
    parser.add_argument("--resume", action="store_true",
                        help="with --suite products: keep the rows that the file of --json has from the same library, "
                        "machine and peers, and go on with the others")
    parser.add_argument("--compare", nargs=2, metavar="FILE",
                        help=f"compare two such files and run nothing; exit with 1 if they differ by more than "
                        f"{report.AGREEMENT - 1:.0%}".replace("%", "%%"))
    parser.add_argument("--table", nargs=2, metavar="FILE",
                        help="replace the table of a page by that of what --suite products wrote, and run nothing")
    return parser.parse_args(arguments)


def fail(message, code=2):
    print(f"error: {message}", file=sys.stderr)
    return code


def chosen_cells(options):
    ops = set(options.ops.split(","))
    if not ops <= set(report.OPS):
        raise ValueError(f"--ops is '{options.ops}'; a comma-separated list of {', '.join(report.OPS)} is accepted")
    chosen = []
    for suite in options.suite.split(","):
        if suite not in cells.SUITES:
            raise ValueError(f"--suite has '{suite}'; {', '.join(cells.SUITES)} are accepted")
        chosen += [c for c in cells.suite(suite, options.dtype) if options.filter in c.name and ops & set(c.ops)]
    if not chosen:
        raise ValueError(f"no cell of {options.suite} for {options.ops} has '{options.filter}' in its name")
    return chosen


class Run:
    def __init__(self, options, lib):
        import torch

        self.torch, self.options, self.lib = torch, options, lib
        self.clock = measure.CudaClock() if options.device == "cuda" else measure.CpuClock()
        self.names, self.missing = entrants.chosen_of(options.peers or DEFAULT_PEERS, entrants.PEERS, entrants.installed)
        self.rows = []

    def make(self, name, cell, tensors):
        maker, _ = (entrants.OURS | entrants.PEERS)[name]
        return maker(cell, *tensors[:3], self.lib)

    def prepare(self, name, cell, op, tensors, reference):
        """((choose, call), the entrant's result so far): made, run once and checked. None in place of the pair if the
        entrant is not timed."""
        try:
            one = self.make(name, cell, tensors)
            one.choose()
            if op != "backward":
                error, wrong, relative = reference.judge(out=one.forward())
                call = one.forward
            else:
                one.start_backward(tensors[3])
                dq, dk, dv = one.backward()
                error, wrong, relative = reference.judge(dq=dq, dk=dk, dv=dv)
                call = one.backward
        except library.Refused as refusal:
            return None, {"status": "refused", "detail": refusal.reason}
        except Exception as problem:  # every peer has its own way to refuse a shape
            if isinstance(problem, self.torch.cuda.OutOfMemoryError):
                self.torch.cuda.empty_cache()
            first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            return None, {"status": "failed", "detail": first[:200]}
        if wrong:
            return None, {"status": "wrong", "detail": wrong, "error_over_allowed": error, "relative_errors": relative}
        result = {"status": "ok", "error_over_allowed": error, "relative_errors": relative}
        if hasattr(one, "explanation"):
            chosen = one.explanation["chosen"]
            result |= {name: chosen[name] for name in ("kernel", "config", "tuned")}
        if hasattr(one, "through"):
            result["through"] = one.through
            result["decode_refused"] = getattr(one, "refusal", "")
        return (one.choose, call), result

    def small_figures(self, name, cell, op, tensors, choose_and_call, result):
        result["host_s"] = measure.summary(self.clock.host(*choose_and_call))["median_s"]

        def make_call():
            one = self.make(name, cell, tensors)
            one.choose()
            if op != "backward":
                return one.forward
            one.start_backward(tensors[3])
            return one.backward

        try:
            samples = self.clock.graph(make_call)
        except Exception as problem:  # not every peer can be captured
            result["graph_failure"] = str(problem).strip().splitlines()[0][:200]
            return
        if samples:
            result["graph_s"] = measure.summary(samples)["median_s"]

    def cell(self, cell):
        torch = self.torch
        torch.manual_seed(1)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[cell.dtype]
        tensors = [torch.randn(shape, device=self.options.device, dtype=dtype)  # q k v do
                   for shape in (cell.q_shape, cell.k_shape, cell.v_shape, cell.out_shape)]
        reference = accuracy.Reference(cell, *tensors)
        for op in cell.ops:
            if op not in self.options.ops.split(","):
                continue
            ours = list(entrants.OURS) if op == "backward" else ["tessera"]
            results, calls = {}, {}
            peers = [name for name in self.names if op == "backward" or not name.endswith("-det")]
            for name in ours + peers:
                call, results[name] = self.prepare(name, cell, op, tensors, reference)
                if call is not None:
                    calls[name] = call
            # Nothing that is timed records a graph: a backward's graph already exists.
            with torch.no_grad():
                self.clock.round_robin(list(calls.values()), 2)  # warm-up
                samples = self.clock.round_robin(list(calls.values()), self.options.rounds, hide_host=not cell.small)
                for name, taken in zip(calls, samples):
                    results[name].update(measure.summary(taken))
                    if cell.small:
                        self.small_figures(name, cell, op, tensors, calls[name], results[name])
            self.rows.append({"op": op, "cell": cell.name, "fields": cell.fields, "tags": list(cell.tags),
                              **dataclasses.asdict(cell.work[op]), "entrants": results})


def environment(torch, options, version):
    found = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
             "python": platform.python_version(), "torch": torch.__version__, "tessera": version,
             "cuda": torch.version.cuda}
    if options.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["capability"] = "{}.{}".format(*torch.cuda.get_device_capability())
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def main(arguments=None):
    options = parse(arguments)
    if options.json and not os.access(os.path.dirname(options.json) or ".", os.W_OK):
        return fail(f"cannot write {options.json}")
    if options.compare:
        try:
            records = [report.read(name) for name in options.compare]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            return fail(f"cannot read what --json wrote: {problem}")
        text, apart = report.compare(*records)
        print(text)
        return fail(apart, 1) if apart else 0
    if options.table:
        record, page = (pathlib.Path(name) for name in options.table)
        try:
            page.write_text(products.with_table(page.read_text(), json.loads(record.read_text())["cases"]))
        except (OSError, ValueError, KeyError, TypeError) as problem:
            return fail(f"cannot renew {page}: {problem}")
        return 0
    try:
        import torch
    except ImportError:
        return fail("PyTorch is not installed in this Python; the benchmark needs it", 3)
    if options.device == "cuda" and not torch.cuda.is_available():
        return fail("PyTorch finds no CUDA device; the benchmark needs an NVIDIA GPU", 3)
    if options.resume and (options.suite != "products" or not options.json):
        return fail("--resume is for --suite products with --json FILE")
    if options.rounds < 1:
        return fail(f"--rounds is {options.rounds}; 1 and more are accepted")
    if options.dtype == "fp32" and (options.suite, options.device) != ("products", "cpu"):
        return fail("--dtype fp32 is for --suite products --device cpu")
    if options.suite in ("np", "products"):
        import tessera

        suite = {"np": transformer_np, "products": products}[options.suite]
        return suite.main(options, environment(torch, options, tessera.__version__), measure.gpu_state)
    path = library.find_library(options.library)
    if path is None or not path.is_file():
        return fail(f"no libtessera.so{f' at {path}' if path else ''}: build it, or name it with --library", 3)
    try:
        chosen = chosen_cells(options)
        run = Run(options, library.Library(path))
    except (ValueError, OSError) as problem:
        return fail(problem)

    begin = time.monotonic()
    record = {"environment": environment(torch, options, run.lib.version()), "rounds": options.rounds,
              "entrants": list(entrants.OURS) + run.names, "not_installed": run.missing,
              "gpu_before": measure.gpu_state()}
    print(", ".join(f"{key} {value}" for key, value in record["environment"].items()), flush=True)
    if run.missing:
        print(f"not installed: {', '.join(run.missing)}")
    partial = pathlib.Path(f"{options.json}.partial")  # what a run that is stopped has measured
    for number, cell in enumerate(chosen, 1):
        print(f"\r{number}/{len(chosen)} {cell.name:<40}", end="", file=sys.stderr, flush=True)
        run.cell(cell)
        if options.json:
            partial.write_text(json.dumps(record | {"rows": run.rows}, indent=1) + "\n")
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    record["rows"] = run.rows
    record["gpu_after"] = measure.gpu_state()
    record["seconds"] = time.monotonic() - begin
    print(report.text_of(record))
    for when in ("before", "after"):
        if record[f"gpu_{when}"]:
            print(f"GPU {when}: " + ", ".join(f"{key} {value}" for key, value in record[f"gpu_{when}"].items()))
    print(f"{len(run.rows)} rows in {record['seconds']:.0f} s")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
        partial.unlink(missing_ok=True)
    wrong = [f"{row['op']} {row['cell']} {name}" for row in run.rows for name in entrants.OURS
             if row["entrants"].get(name, {}).get("status") in ("wrong", "failed")]
    if wrong:
        return fail("wrong or failed: " + ", ".join(wrong), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
