"""Bytes that attention moves through a GPU's memory, measured by Nsight Compute, beside the counted ones.

    python bench/dram_bytes.py [--json FILE]

Fused is tessera.attention; unfused is two matrix products and a softmax of PyTorch, and what autograd makes of them. Every kernel of a call counts. L2 holds something else before each call; what of the result is still in it at the end
(some tens of MB) is not measured. Counted is as by `tessera bench`: every tensor once, and unfused, S, P and their
gradients, written and read. The least of three calls is shown.
"""

import argparse
import csv
import datetime
import io
import json
import re
import subprocess
import sys

SHAPES = [(8, 1024, 32, 64), (8, 2048, 32, 64), (8, 4096, 32, 64), (2, 8192, 32, 64)]  # B, S, H, D; fp16
REPEATS = 3
METRICS = {"dram__bytes_read.sum": "read", "dram__bytes_write.sum": "written"}
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def runs():
    for shape in SHAPES:
        for op in ("forward", "backward"):
            for way in ("fused", "unfused"):
                yield shape, op, way


def counted(shape, op, way):
    batch, rows, heads, dim = shape
    tensor, row = 2 * batch * rows * heads * dim, 4 * batch * rows * heads
    scores = 2 * batch * heads * rows * rows
    if op == "forward":
        return 4 * tensor + (4 * scores if way == "unfused" else 0)
    return 8 * tensor + row + (7 * scores if way == "unfused" else 0)


def profiled():
    """Runs each call a few times, between kernels that only mark where it begins."""
    import torch

    import tessera

    def unfused(q, k, v):
        return (q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2)).softmax(-1) @ v

    flush = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    for shape, op, way in runs():
        q, k, v, dout = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(4))
        grad = op == "backward"
        forward = tessera.attention
        if way == "unfused":
            forward = unfused
            q, k, v, dout = (t.transpose(1, 2).contiguous() for t in (q, k, v, dout))
        for t in (q, k, v):
            t.requires_grad_(grad)
        out = forward(q, k, v)
        if grad:
            torch.autograd.grad(out, (q, k, v), dout)  # compiled, allocated
            out = forward(q, k, v)
        else:
            del out
        for _ in range(REPEATS):
            flush.fill_(1)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1)
            if grad:
                torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
            else:
                out = forward(q, k, v)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        del out, q, k, v, dout
        torch.cuda.empty_cache()


def rows_of(text):
    """One list of kernels per call: {"name", "read", "written"}."""
    text = text[text.index('"ID"'):]
    calls, kernels = [], {}
    for row in csv.DictReader(io.StringIO(text)):
        if re.search("spin_kernel", row["Kernel Name"]):
            if row["Metric Name"] == next(iter(METRICS)):
                calls.append([])
            continue
        if row["ID"] not in kernels:
            kernels[row["ID"]] = {"name": row["Kernel Name"]}
            calls[-1].append(kernels[row["ID"]])
        kernels[row["ID"]][METRICS[row["Metric Name"]]] = float(row["Metric Value"].replace(",", "")) * UNITS[
            row["Metric Unit"]]
    return calls


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.profiled:
        return profiled()
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv",
               "--metrics", ",".join(METRICS), sys.executable, __file__, "--profiled"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 or '"ID"' not in done.stdout:
        sys.exit(f"ncu exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    calls = rows_of(done.stdout)
    if len(calls) != REPEATS * len(list(runs())):
        sys.exit(f"{len(calls)} calls were seen, not {REPEATS * len(list(runs()))}")
    # What else ran on the GPU can only add to it.
    calls = [min(calls[n:n + REPEATS], key=lambda kernels: sum(k["read"] + k["written"] for k in kernels))
             for n in range(0, len(calls), REPEATS)]
    results = []
    print(f"{'B, S, H, D, fp16':>20} {'':>9} {'':>8} {'kernels':>8} {'read':>9} {'written':>9} {'counted':>9}  of counted")
    for (shape, op, way), kernels in zip(runs(), calls):
        read, written = (sum(kernel[which] for kernel in kernels) for which in ("read", "written"))
        expected = counted(shape, op, way)
        results.append({"batch": shape[0], "seq": shape[1], "heads": shape[2], "dim": shape[3], "dtype": "fp16",
                        "op": op, "way": way, "read": read, "written": written, "counted": expected,
                        "kernels": kernels})
        print(f"{', '.join(map(str, shape)):>20} {op:>9} {way:>8} {len(kernels):>8} {read / 1e9:>6.2f} GB "
              f"{written / 1e9:>6.2f} GB {expected / 1e9:>6.2f} GB  {(read + written) / expected:.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"date": datetime.date.today().isoformat(), "calls": results}, file, indent=1)


if __name__ == "__main__":
    main()
