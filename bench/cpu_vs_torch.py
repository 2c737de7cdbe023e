#!/usr/bin/env python3
"""Tessera's CPU attention against PyTorch's scaled_dot_product_attention: same process, same threads, same tensors.

Forward and backward of B=1 H=8, D=64 and 80, S=512, 2048, 4096, causal and not, fp32 and bf16. Each result is first
checked against fp64 arithmetic; then the two are timed in turn, round after round, so that other load on the machine
affects both alike. The table shows medians. Measure on an idle machine: with more running threads than cores, the times
of short calls are multiples of the scheduler's time slice.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROBE = "import torch; a = torch.randn(64, 64, dtype=torch.bfloat16); print((a @ a).sum().item())"
ISA_LIMIT = "AVX512_CORE_BF16"

sys.path.insert(0, str(ROOT / "python" / "tessera" / "bench"))  # the package itself need not be installed
import library  # noqa: E402


def plan(lib, op, causal, **tensors):
    """A plan on tensors of [B, H, S, D], which the library sees as [B, S, H, D] through their strides."""
    rows_first = {name: t.transpose(1, 2) if t.dim() == 4 else t for name, t in tensors.items()}
    return library.Plan(lib, op, causal, **rows_first)


def reference(q, k, v, do, causal):
    """fp64 forward and gradients, one head at a time."""
    import torch

    results = [torch.empty_like(x, dtype=torch.float64) for x in (q, q, k, v)]
    for head in range(q.shape[1]):
        q1, k1, v1 = (x[:, head].double().requires_grad_() for x in (q, k, v))
        scores = q1 @ k1.transpose(1, 2) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
        out = torch.softmax(scores, -1) @ v1
        out.backward(do[:, head].double())
        for to, value in zip(results, (out.detach(), q1.grad, k1.grad, v1.grad)):
            to[:, head] = value
    return results


def relative_error(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


def measure(candidates, budget, least):
    """Median milliseconds of each callable, taken in turn.

    OpenMP's workers spin for tens of milliseconds after their work and would take a core from the next candidate. So
    each turn starts with a pause, and a short call is timed after an untimed one: each candidate runs with its own
    threads awake and the other's asleep.
    """
    times = {name: [] for name in candidates}
    start = time.perf_counter()
    while True:
        for name, run in candidates.items():
            time.sleep(0.05)
            begin = time.perf_counter()
            run()
            if time.perf_counter() - begin < 0.05:
                begin = time.perf_counter()
                run()
            times[name].append(time.perf_counter() - begin)
        rounds = len(next(iter(times.values())))
        if rounds >= least and time.perf_counter() - start > budget:
            return {name: 1e3 * statistics.median(values) for name, values in times.items()}, rounds


def run_cell(lib, dtype, dim, seq, causal, args):
    import torch
    import torch.nn.functional as functional

    torch.manual_seed(seq + dim)
    shape = (1, args.heads, seq, dim)
    q, k, v, do = (torch.randn(shape).to(dtype) for _ in range(4))
    out, dq, dk, dv = (torch.empty_like(q) for _ in range(4))
    lse = torch.empty(shape[:3])
    forward = plan(lib, library.FORWARD, causal, q=q, k=k, v=v, out=out, lse=lse)
    backward = plan(lib, library.BACKWARD, causal, q=q, k=k, v=v, out=out, lse=lse, dout=do, dq=dq, dk=dk, dv=dv)
    forward()
    backward()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch_out = functional.scaled_dot_product_attention(*leaves, is_causal=causal)

    def torch_forward():
        with torch.no_grad():
            functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def torch_backward():
        torch.autograd.grad(torch_out, leaves, do, retain_graph=True)

    errors = {}
    if seq <= args.check_up_to:
        torch_results = [torch_out.detach(), *torch.autograd.grad(torch_out, leaves, do, retain_graph=True)]
        for name, ours, theirs, want in zip(("out", "dq", "dk", "dv"), (out, dq, dk, dv), torch_results,
                                            reference(q, k, v, do, causal)):
            errors[name] = (relative_error(ours, want), relative_error(theirs, want))
            limit = max(2 * errors[name][1], 1e-6 if dtype == torch.float32 else 1e-2)
            if not errors[name][0] <= limit:
                raise RuntimeError(f"{name} is off by {errors[name][0]:.2e} (PyTorch by {errors[name][1]:.2e})")

    pairs = seq * (seq + 1) // 2 if causal else seq * seq
    cells = []
    for op, ours, theirs, products in (("forward", forward, torch_forward, 2),
                                       ("backward", backward, torch_backward, 5)):
        times, rounds = measure({"tessera": ours, "torch": theirs}, args.seconds, args.rounds)
        flops = 2 * products * pairs * dim * args.heads
        cells.append({
            "op": op, "dtype": str(dtype).split(".")[-1], "D": dim, "S": seq, "causal": causal, "rounds": rounds,
            "tessera_ms": times["tessera"], "torch_ms": times["torch"],
            "tessera_gflops": flops / times["tessera"] / 1e6, "torch_gflops": flops / times["torch"] / 1e6,
            "ratio": times["torch"] / times["tessera"], "errors": errors,
        })
    return cells


HEADER = ("op", "dtype", "D", "S", "mask", "Tessera ms", "PyTorch ms", "Tessera GFLOP/s", "PyTorch GFLOP/s", "ratio")


def as_row(cell):
    return (cell["op"], cell["dtype"], str(cell["D"]), str(cell["S"]), "causal" if cell["causal"] else "none",
            f"{cell['tessera_ms']:.2f}", f"{cell['torch_ms']:.2f}", f"{cell['tessera_gflops']:.0f}",
            f"{cell['torch_gflops']:.0f}", f"{cell['ratio']:.2f}")


def describe(facts):
    lines = [
        f"CPU: {facts['cpu']}; {facts['threads']} threads; {facts['date']}.",
        f"Tessera {facts['tessera']}; PyTorch {facts['torch']}.",
        f"B=1, H={facts['heads']}, tensors [B, H, S, D] contiguous. Medians of interleaved runs. "
        "GFLOP/s count visible pairs only: 2 products forward, 5 backward. ratio = PyTorch ms / Tessera ms.",
    ]
    if facts["onednn_limited"]:
        lines.append(f"PyTorch's bf16 matmul crashes with an illegal instruction on this machine; it runs with "
                     f"ONEDNN_MAX_CPU_ISA={ISA_LIMIT}.")
    return lines


def as_markdown(facts, cells):
    lines = ["# CPU attention against PyTorch", "", "Written by `bench/cpu_vs_torch.py --markdown`.", ""]
    lines += describe(facts) + ["", "| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(as_row(cell)) + " |" for cell in cells]
    return "\n".join(lines) + "\n"


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default=str(ROOT / "build/lib/libtessera.so"), help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="for both (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 80])
    parser.add_argument("--seqs", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--seconds", type=float, default=2.0, help="minimum time per cell (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="minimum rounds per cell (default: %(default)s)")
    parser.add_argument("--check-up-to", type=int, default=2048, help="longest S to check against fp64 (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="S=512 and 2048 only, few rounds")
    parser.add_argument("--json", metavar="FILE", help="write the cells to FILE")
    parser.add_argument("--markdown", metavar="FILE", help="write the table to FILE")
    args = parser.parse_args()
    if args.quick:
        args.seqs, args.seconds, args.rounds = [512, 2048], 0.3, 3
    if not pathlib.Path(args.library).exists():
        sys.exit(f"no library at {args.library}: build Tessera first, or name it with --library")

    limited = False
    if "bf16" in args.dtypes and "ONEDNN_MAX_CPU_ISA" not in os.environ:
        probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True)
        if probe.returncode < 0:  # killed by a signal
            os.environ["ONEDNN_MAX_CPU_ISA"] = ISA_LIMIT
            limited = True
    import torch

    torch.set_num_threads(args.threads)
    lib = library.Library(args.library)
    lib.set_num_threads(args.threads)
    facts = {
        "cpu": cpu_name(), "threads": args.threads, "date": datetime.date.today().isoformat(),
        "tessera": lib.version(), "torch": torch.__version__,
        "heads": args.heads, "onednn_limited": limited,
    }
    for line in describe(facts):
        print(line)
    widths = [max(len(title), 8) for title in HEADER]
    print("  ".join(title.rjust(width) for title, width in zip(HEADER, widths)))
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    todo = [(types[t], d, s, c) for t in args.dtypes for d in args.dims for s in args.seqs for c in (False, True)]
    cells = []
    for number, (dtype, dim, seq, causal) in enumerate(todo, 1):
        if sys.stderr.isatty():
            print(f"\r[{number}/{len(todo)}] {dtype} D={dim} S={seq}\033[K", end="", file=sys.stderr, flush=True)
        new = run_cell(lib, dtype, dim, seq, causal, args)
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        for cell in new:
            print("  ".join(text.rjust(width) for text, width in zip(as_row(cell), widths)), flush=True)
        cells += new
    ratios = [cell["ratio"] for cell in cells]
    slower = sum(ratio < 1 for ratio in ratios)
    print(f"{len(cells)} cells, Tessera slower in {slower}; ratio {min(ratios):.2f} to {max(ratios):.2f}, "
          f"median {statistics.median(ratios):.2f}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"facts": facts, "cells": cells}, indent=1) + "\n")
    if args.markdown:
        pathlib.Path(args.markdown).write_text(as_markdown(facts, cells))


if __name__ == "__main__":
    main()
