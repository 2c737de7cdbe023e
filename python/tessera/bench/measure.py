"""Timing that exposes all entrants to the same drift of clocks and temperature: one call of each in turn, round after
round, with the L2 cache flushed before each call and events around it. Every sample is kept."""

import shutil
import statistics
import subprocess
import time

FLUSH_BYTES = 256 << 20
HEAD_START_CYCLES = 2_000_000  # about 1 ms, longer than the host takes for a layer forward and backward
GPU_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")


def gpu_state():
    """SM and memory clock (MHz), power (W) and temperature (C) from nvidia-smi; {} if that is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "-i", "0", "--query-gpu=" + ",".join(GPU_FIELDS + ("driver_version",)),
               "--format=csv,noheader,nounits"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    values = [text.strip() for text in line.split(",")]
    state = {"driver": values[-1]}
    for field, text in zip(GPU_FIELDS, values):
        try:
            state[field] = float(text)
        except ValueError:
            state[field] = text
    return state


def summary(samples):
    """Seconds: median, 5th and 95th percentile, minimum and maximum of the samples, and the samples themselves."""
    ordered = sorted(samples)

    def at(part):
        return ordered[round(part * (len(ordered) - 1))]

    return {"median_s": statistics.median(ordered), "p05_s": at(0.05), "p95_s": at(0.95), "min_s": ordered[0],
            "max_s": ordered[-1], "samples_s": samples}


def seconds_of(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class CpuClock:
    """OpenMP's threads spin for tens of milliseconds after their work and would take a core from the next entrant. So each
    turn starts with a pause, after which an entrant's own threads take some milliseconds to wake: calls are not timed until
    then."""

    PAUSE, WAKING = 0.05, 0.015  # seconds

    def round_robin(self, entrants, rounds, hide_host=True):
        samples = [[] for _ in entrants]
        for _ in range(rounds):
            for (choose, call), kept in zip(entrants, samples):
                choose()
                time.sleep(self.PAUSE)
                awake = time.perf_counter() + self.WAKING
                while time.perf_counter() < awake:
                    took = seconds_of(call)
                # In a call as long as this, the time to wake is lost, and it need not be made again.
                kept.append(took if took > self.PAUSE else seconds_of(call))
        return samples

    def host(self, choose, call, repeats=20):
        return self.round_robin([(choose, call)], repeats)[0]

    def graph(self, make_call, repeats=20):
        return None


class CudaClock:
    def __init__(self):
        import torch

        self.torch = torch
        self.cache = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def round_robin(self, entrants, rounds, hide_host=True):
        """entrants: (choose, call) each. hide_host: the GPU is kept busy before the first event, so that the host's
        work for a launch is not in the time; otherwise it is, as far as it takes longer than the flush."""
        torch = self.torch
        events = [[] for _ in entrants]
        for _ in range(rounds):
            for (choose, call), kept in zip(entrants, events):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                choose()
                self.cache.zero_()
                if hide_host:
                    self.keep_busy()
                begin.record()
                call()
                end.record()
                kept.append((begin, end))
            # Synchronizing every round keeps the queue short, so that no call waits for a free slot.
            torch.cuda.synchronize()
        return [[begin.elapsed_time(end) * 1e-3 for begin, end in kept] for kept in events]

    def keep_busy(self):
        sleep = getattr(self.torch.cuda, "_sleep", None)  # private
        if sleep is not None:
            sleep(HEAD_START_CYCLES)
        else:
            self.cache.zero_()
            self.cache.zero_()

    def host(self, choose, call, repeats=50):
        """Seconds of host time per call, with the GPU idle before each."""
        samples = []
        choose()
        for _ in range(repeats):
            self.torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begin)
        self.torch.cuda.synchronize()
        return samples

    def graph(self, make_call, repeats=20, per_replay=20):
        """Seconds of a call replayed from a CUDA graph, without a flush and without the host's work. make_call makes
        the call on the stream that is captured, since autograd runs a backward on the stream of its forward."""
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call = make_call()
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(per_replay):
                call()
        graph.replay()
        torch.cuda.synchronize()
        samples = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) * 1e-3 / per_replay)
        return samples
