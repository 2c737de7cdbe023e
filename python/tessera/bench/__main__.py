"""`python -m tessera.bench`: Tessera's attention beside its peers, in one process, on the same tensors."""

import argparse
import datetime
import importlib.util
import json
import pathlib
import platform
import sys
import time

from . import accuracy, cells, entrants, library, measure, report

EXAMPLES = """examples:
  python -m tessera.bench --json bench.json           79 cells beside FlashAttention-2 and cuDNN
  python -m tessera.bench --filter d80 --rounds 50
  python -m tessera.bench --suite small --ops forward
  python -m tessera.bench --suite decode
  python -m tessera.bench --peers all --filter s2048
  python -m tessera.bench --compare first.json second.json
"""


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m tessera.bench", description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="libtessera.so; default: $TESSERA_LIBRARY, the package's, build/lib's")
    parser.add_argument("--suite", default="table,small,decode",
                        help="table (32 shapes), small (5), decode (5), toy; with commas; default: %(default)s")
    parser.add_argument("--ops", default="forward,backward,decode")
    parser.add_argument("--peers", default="fa2,cudnn", help=f"of {', '.join(entrants.PEERS)}; all; none")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    parser.add_argument("--filter", default="", help="only cells with this in their name")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each entrant and cell (%(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"),
                        help="cpu: to try the harness itself; its figures mean nothing")
    parser.add_argument("--json", help="write every figure and every sample to this file")
    parser.add_argument("--compare", nargs=2, metavar="FILE",
                        help=f"say how far two such files are apart, run nothing; exit code 1 beyond "
                        f"{report.AGREEMENT - 1:.0%}")
    return parser.parse_args(arguments)


def fail(sentence, code=2):
    print(f"error: {sentence}", file=sys.stderr)
    return code


def chosen_entrants(text):
    names = list(entrants.PEERS) if text == "all" else [] if text == "none" else text.split(",")
    unknown = [n for n in names if n not in entrants.PEERS]
    if unknown:
        raise ValueError(f"--peers has '{unknown[0]}'; {', '.join(entrants.PEERS)}, all and none are known")
    missing = [n for n in names if n in entrants.PACKAGES and importlib.util.find_spec(entrants.PACKAGES[n]) is None]
    return [n for n in names if n not in missing], missing


def chosen_cells(options):
    makers = {"table": cells.table_cells, "small": cells.small_cells, "decode": cells.decode_cells,
              "toy": cells.toy_cells}
    ops = set(options.ops.split(","))
    if not ops <= set(report.OPS):
        raise ValueError(f"--ops is '{options.ops}'; of {', '.join(report.OPS)}, with commas")
    chosen = []
    for suite in options.suite.split(","):
        if suite not in makers:
            raise ValueError(f"--suite has '{suite}'; {', '.join(makers)} are known")
        chosen += [c for c in makers[suite](options.dtype) if options.filter in c.name and ops & set(c.ops)]
    if not chosen:
        raise ValueError(f"no cell of {options.suite} for {options.ops} has '{options.filter}' in its name")
    return chosen


class Run:
    def __init__(self, options, lib):
        import torch

        self.torch, self.options, self.lib = torch, options, lib
        self.clock = measure.CudaClock() if options.device == "cuda" else measure.CpuClock()
        self.names, self.missing = chosen_entrants(options.peers)
        self.rows = []

    def make(self, name, cell, tensors):
        maker, _ = (entrants.OURS | entrants.PEERS)[name]
        return maker(cell, *tensors[:3], self.lib)

    def prepare(self, name, cell, op, tensors, reference):
        """((choose, call), the entrant's result so far): made, run once and judged. None where it is not timed."""
        try:
            one = self.make(name, cell, tensors)
            one.choose()
            if op != "backward":
                error, wrong = reference.judge(out=one.forward())
                call = one.forward
            else:
                one.start_backward(tensors[3])
                dq, dk, dv = one.backward()
                error, wrong = reference.judge(dq=dq, dk=dk, dv=dv)
                call = one.backward
        except library.Refused as refusal:
            return None, {"status": "refused", "detail": library.reason_of(refusal)}
        except Exception as problem:  # a peer that does not serve the shape says so in its own way
            if isinstance(problem, self.torch.cuda.OutOfMemoryError):
                self.torch.cuda.empty_cache()
            first = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            return None, {"status": "failed", "detail": first[:200]}
        if wrong:
            return None, {"status": "wrong", "detail": wrong, "error_over_allowed": error}
        result = {"status": "ok", "error_over_allowed": error}
        if hasattr(one, "explanation"):
            chosen = [line for line in one.explanation.splitlines() if line.startswith("chosen")]
            result["kernel"] = chosen[0] if chosen else one.explanation
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
                   for shape in (cell.q_shape, cell.k_shape, cell.k_shape, cell.q_shape)]
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
            # No gradient is asked for in what is timed: a backward has its graph already.
            with torch.no_grad():
                self.clock.round_robin(list(calls.values()), 2)  # warm
                samples = self.clock.round_robin(list(calls.values()), self.options.rounds, hide_host=not cell.small)
                for name, taken in zip(calls, samples):
                    results[name].update(measure.summary(taken))
                    if cell.small:
                        self.small_figures(name, cell, op, tensors, calls[name], results[name])
            self.rows.append({"op": op, "cell": cell.name, "small": cell.small, "dtype": cell.dtype,
                              "batch": cell.batch, "seq": cell.seq, "heads": cell.heads,
                              "heads_kv": cell.key_heads, "dim": cell.dim, "causal": cell.causal,
                              "flops": cell.flops(op), "bytes": cell.bytes(op),
                              "unfused_bytes": cell.unfused_bytes(op), "entrants": results})


def environment(torch, options, lib):
    found = {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
             "python": platform.python_version(), "torch": torch.__version__, "tessera": lib.version(),
             "cuda": torch.version.cuda}
    if options.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["capability"] = "{}.{}".format(*torch.cuda.get_device_capability())
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def main(arguments=None):
    options = parse(arguments)
    if options.compare:
        first, second = (json.loads(pathlib.Path(name).read_text()) for name in options.compare)
        text, apart = report.compare(first, second)
        print(text)
        return fail(apart, 1) if apart else 0
    try:
        import torch
    except ImportError:
        return fail("PyTorch is not installed in this Python; the peers are its", 3)
    if options.device == "cuda" and not torch.cuda.is_available():
        return fail("PyTorch sees no CUDA device here; the comparison needs an NVIDIA GPU", 3)
    path = library.find_library(options.library)
    if path is None or not path.is_file():
        return fail(f"no libtessera.so{f' at {path}' if path else ''}: build it, or say where with --library", 3)
    try:
        chosen = chosen_cells(options)
        run = Run(options, library.Library(path))
    except (ValueError, OSError) as problem:
        return fail(problem)

    begin = time.monotonic()
    record = {"environment": environment(torch, options, run.lib), "rounds": options.rounds,
              "entrants": list(entrants.OURS) + run.names, "not_installed": run.missing,
              "gpu_before": measure.gpu_state()}
    print(", ".join(f"{key} {value}" for key, value in record["environment"].items()), flush=True)
    if run.missing:
        print(f"not installed here: {', '.join(run.missing)}")
    for number, cell in enumerate(chosen, 1):
        print(f"\r{number}/{len(chosen)} {cell.name:<40}", end="", file=sys.stderr, flush=True)
        run.cell(cell)
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
    wrong = [f"{row['op']} {row['cell']} {name}" for row in run.rows for name in entrants.OURS
             if row["entrants"].get(name, {}).get("status") in ("wrong", "failed")]
    if wrong:
        return fail("wrong or failed: " + ", ".join(wrong), 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
