"""python -m tessera.check: what this machine has, and whether Tessera works on it, for a bug report.

Finds the GPUs and the run-time compiler, compares a few results on each device with the definition in float64, and times
one shape beside PyTorch's own attention. It needs nothing but the wheel, and takes less than a minute.

Exit code: 0 if every check passed, 1 if not.
"""

import argparse
import ctypes
import json
import math
import os
import platform
import re
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import tessera


def reference(q, k, v, causal=False, window=None, softcap=0.0):
    """Attention by its definition, in the precision of q; q: [B, Sq, Hq, D], k and v: [B, Sk, Hkv, D]."""
    rows, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(keys)[None, :] - torch.arange(rows)[:, None] - (keys - rows)  # bottom right
    hidden = torch.zeros(rows, keys, dtype=torch.bool)
    if causal:
        hidden |= ahead > 0
    if window:
        hidden |= (ahead < -window[0]) | (ahead > window[1])
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype), v)


def gradients(function, tensors, upstream):
    tensors = [t.detach().requires_grad_() for t in tensors]
    out = function(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream.to(out))]


# Each returns (what Tessera computed, a function that computes the same in the precision of its arguments, these
# arguments).
def forward(make, device, sq=65, sk=130, dim=64, **options):
    q, k, v = make(2, sq, 4, dim), make(2, sk, 2, dim), make(2, sk, 2, dim)
    causal = "bottom_right" if options.get("causal") else None
    given = {**options, "causal": causal, "alignment": None if causal else "bottom_right"}
    out = tessera.attention(*(t.to(device) for t in (q, k, v)), **given)
    return [out], lambda *t: [reference(*t, **options)], (q, k, v)


def backward(make, device, dim=64, deterministic=False):
    q, k, v, upstream = make(2, 65, 4, dim), make(2, 65, 2, dim), make(2, 65, 2, dim), make(2, 65, 4, dim)
    on_device = lambda *t: tessera.attention(*t, causal=True, deterministic=deterministic)  # noqa: E731
    got = gradients(on_device, [t.to(device) for t in (q, k, v)], upstream)
    plain = lambda q, k, v, upstream: gradients(lambda *t: reference(*t, causal=True), (q, k, v), upstream)  # noqa: E731
    return got, plain, (q, k, v, upstream)


def packed(make, device):
    q, k, v = make(1, 100, 4, 64), make(1, 100, 2, 64), make(1, 100, 2, 64)
    ends = torch.tensor([0, 37, 37, 100], dtype=torch.int32, device=device)
    out = tessera.attention(*(t[0].to(device) for t in (q, k, v)), causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)

    def plain(q, k, v):
        return [torch.cat([reference(*(t[:, a:b] for t in (q, k, v)), causal=True)[0] for a, b in ((0, 37), (37, 100))])]

    return [out], plain, (q, k, v)


def decode(make, device):
    q, k, v = make(2, 1, 8, 64), make(2, 300, 2, 64), make(2, 300, 2, 64)
    lengths = torch.tensor([300, 77], dtype=torch.int32, device=device)
    out = tessera.decode(*(t.to(device) for t in (q, k, v)), cache_seqlens=lengths)

    def plain(q, k, v):
        return [torch.cat([reference(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n]) for b, n in ((0, 300), (1, 77))])]

    return [out], plain, (q, k, v)


def linear(make, device):
    x, weight, bias = make(70, 96), make(130, 96), make(130)
    out = tessera.linear(*(t.to(device) for t in (x, weight, bias)), activation="silu")
    return [out], lambda x, weight, bias: [F.silu(F.linear(x, weight, bias))], (x, weight, bias)


CHECKS = {
    "forward, causal": lambda *at: forward(*at, causal=True),
    "forward, head dim 128, window": lambda *at: forward(*at, dim=128, window=(40, 0)),
    "forward, head dim 80, softcap": lambda *at: forward(*at, dim=80, softcap=5.0),
    "forward, packed sequences": packed,
    "backward, causal": backward,
    "backward, head dim 128, deterministic": lambda *at: backward(*at, dim=128, deterministic=True),
    "decode against a KV cache": decode,
    "linear layer with SiLU": linear,
}


def check(case, device, dtype):
    """Error as a part of what is allowed: twice that of the plain computation in the same type, and a few roundings."""
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    results, plain, given = CHECKS[case](make, device)
    worst = 0.0
    for got, exact, same in zip(results, plain(*(t.double() for t in given)), plain(*given), strict=True):
        allowed = 2 * (same.double() - exact).abs().max() + 4 * torch.finfo(dtype).eps * exact.abs().max()
        error = (got.detach().cpu().double().reshape(exact.shape) - exact).abs().max() / allowed
        worst = max(worst, error.item() if error.isfinite() else math.inf)
    return worst


def seconds_of(call, device, budget=0.3):
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    call(), wait()
    samples, end = [], time.perf_counter() + budget
    while len(samples) < 5 or time.perf_counter() < end:
        begin = time.perf_counter()
        call(), wait()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def time_one_shape(device, dtype):
    b, s, h, d = (2, 2048, 16, 64) if device.type == "cuda" else (1, 512, 8, 64)
    q, k, v = (torch.randn(b, s, h, d, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    upstream = torch.randn_like(q)
    torch_attention = lambda q, k, v: F.scaled_dot_product_attention(  # noqa: E731
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
    entrants = {"tessera": lambda *t: tessera.attention(*t, causal=True), "SDPA": torch_attention}
    times = {}
    for name, call in entrants.items():
        times[name] = [seconds_of(lambda: call(q.detach(), k.detach(), v.detach()), device),
                       seconds_of(lambda: torch.autograd.grad(call(q, k, v), (q, k, v), upstream), device)]
    return f"{b} x {s} tokens, {h} heads of {d}, causal, {str(dtype)[6:]}", times


def compilers():
    """The libnvrtc files that this process has loaded: [(version, path)]."""
    found = []
    with open("/proc/self/maps") as maps:
        paths = sorted(set(re.findall(r"/\S*libnvrtc\.so\S*", maps.read())))
    for path in paths:
        major, minor = ctypes.c_int(), ctypes.c_int()
        ctypes.CDLL(path).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        found.append((f"{major.value}.{minor.value}", path))
    return found


def cpu_name():
    with open("/proc/cpuinfo") as info:
        return next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown")


def gpu_name(index):
    p = torch.cuda.get_device_properties(index)
    return f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB"


def devices_here():
    return [torch.device("cpu")] + [torch.device("cuda", n) for n in range(torch.cuda.device_count())]


def dtypes_of(device):
    if device.type == "cpu":
        return [torch.float32, torch.bfloat16]
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    return [torch.float16] + ([torch.bfloat16] if has_bf16 else [])


def device_named(text):
    """A device of this machine."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device == torch.device("cuda"):
        device = torch.device("cuda", 0)
    here = devices_here()
    if device not in here:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(map(str, here))}")
    return device


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tessera.check", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", action="append", type=device_named, metavar="DEVICE",
                        help="cpu, cuda:0, ...; may be repeated; default: all")
    parser.add_argument("--json", metavar="FILE", help="write the findings to this file")
    options = parser.parse_args(arguments)
    if options.json and not os.access(os.path.dirname(options.json) or ".", os.W_OK):
        parser.error(f"--json: cannot write {options.json}")
    begin = time.perf_counter()
    print(f"tessera {tessera.__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}, "
          f"{platform.platform()}")
    print(f"cpu     {cpu_name()}, {len(os.sched_getaffinity(0))} cores")
    gpus = [gpu_name(n) for n in range(torch.cuda.device_count())]
    for index, name in enumerate(gpus):
        print(f"cuda:{index}  {name}")
    if not gpus:
        print(f"cuda    PyTorch sees no GPU{'' if torch.version.cuda else '; this PyTorch is built without CUDA'}")
    record = {"version": tessera.__version__, "torch": torch.__version__, "gpus": gpus, "checks": [], "times": {}}

    failed = 0
    for device in options.device or devices_here():
        print(f"\non {device}")
        dtypes = dtypes_of(device)
        for case in CHECKS:
            for dtype in dtypes:
                row = {"device": str(device), "check": case, "dtype": str(dtype)[6:]}
                try:
                    row["error_over_allowed"] = error = check(case, device, dtype)
                    row["passed"] = error <= 1
                    said = f"error {error:.2f} of what is allowed"
                except Exception as problem:  # a bug report needs the others, too
                    row["passed"], row["problem"] = False, f"{type(problem).__name__}: {problem}"
                    said = row["problem"]
                failed += not row["passed"]
                record["checks"].append(row)
                print(f"  {'ok' if row['passed'] else 'FAILED':<7}{case + ', ' + row['dtype']:<48}{said}", flush=True)
        try:
            shape, times = time_one_shape(device, dtypes[-1])
            record["times"][str(device)] = {"shape": shape, "seconds": times}
            print(f"  time   {shape}")
            for name, (alone, both) in times.items():
                print(f"         {name:<8} forward {alone * 1e3:.3f} ms, forward and backward {both * 1e3:.3f} ms")
        except Exception as problem:
            failed += 1
            print(f"  FAILED timing: {type(problem).__name__}: {problem}")
    record["compilers"] = compilers()
    print()
    for version, path in record["compilers"]:
        print(f"nvrtc   {version}, {path}")
    if not record["compilers"]:
        print("nvrtc   not needed: nothing ran on a GPU")
    record["failed"], record["seconds"] = failed, time.perf_counter() - begin
    print(f"{len(record['checks']) - failed} of {len(record['checks'])} checks passed in {record['seconds']:.0f} s"
          if not failed else f"{failed} FAILED of {len(record['checks'])} checks, in {record['seconds']:.0f} s")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(record, file, indent=1)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
