"""Host time of an eager call on a tiny problem: Tessera against F.scaled_dot_product_attention, in one run.

    python bench/host_time.py [--device cuda] [--calls 2000] [--rounds 15]

Host time is the time until the call returns. On a GPU the kernel runs asynchronously (the queue is kept short, so that
waiting for a free slot is not measured); on the CPU it includes the computation, so the smallest shape is the most
telling. Rounds alternate between the candidates; the median over rounds is shown, and the fastest round.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

import tessera

SHAPES = [(1, 1, 1, 8), (1, 16, 2, 64), (1, 128, 8, 64)]  # B, S, H, D


def candidates(shape, dtype, device, grad):
    batch, rows, heads, dim = shape
    ours = [torch.randn(batch, rows, heads, dim, dtype=dtype, device=device, requires_grad=grad) for _ in range(3)]
    theirs = [t.detach().transpose(1, 2).contiguous().requires_grad_(grad) for t in ours]
    return {
        "sdpa": lambda: F.scaled_dot_product_attention(*theirs, is_causal=True),
        "tessera.attention": lambda: tessera.attention(*ours, causal=True),
        "tessera.sdpa": lambda: tessera.sdpa(*theirs, is_causal=True),
    }


def time_calls(call, calls, device):
    """Seconds per call, in bursts that fit into a GPU's queue."""
    total, done, burst = 0.0, 0, 50
    while done < calls:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(burst):
            call()
        total += time.perf_counter() - start
        done += burst
    return total / done


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    device = options.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_num_threads(1)
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu, 1 thread"
    print(f"torch {torch.__version__}, tessera {tessera.__version__}, {where}, {dtype}")
    print(f"{'B, S, H, D':>16} {'gradients':>9} {'call':>18} {'us, median':>11} {'fastest':>8} {'of sdpa':>8}")
    for grad in (False, True):
        for shape in SHAPES:
            calls = candidates(shape, dtype, device, grad)
            rounds = {name: [] for name in calls}
            for call in calls.values():
                for _ in range(20):
                    call()
            for _ in range(options.rounds):
                for name, call in calls.items():
                    rounds[name].append(1e6 * time_calls(call, options.calls // options.rounds + 1, device))
            base = statistics.median(rounds["sdpa"])
            for name, times in rounds.items():
                median = statistics.median(times)
                print(
                    f"{', '.join(map(str, shape)):>16} {'yes' if grad else 'no':>9} {name:>18} {median:11.2f} "
                    f"{min(times):8.2f} {median / base:8.2f}"
                )


if __name__ == "__main__":
    main()
