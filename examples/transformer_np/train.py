#!/usr/bin/env python3
"""Trains a transformer neural process on draws from a Gaussian process, beside the exact answer.

    python examples/transformer_np/train.py                  # a minute on the CPU; on a GPU, the full model in bf16
    python examples/transformer_np/train.py --graph          # the whole step as a CUDA graph
    python examples/transformer_np/train.py --attention sdpa-cudnn --mlp pytorch --mixture pytorch --norms pytorch
    python examples/transformer_np/train.py --out run            # and after Ctrl-C: --out run --resume

The loss is the negative log-likelihood of the targets, in nats. Since the process is known, so is the lowest loss that any
model could have on the same points; what matters is the difference. --out keeps curve.svg, curve.csv and checkpoint.pt.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from model import ATTENTION, PIECES, Size, Switches, TransformerNP  # noqa: E402
from step import Step  # noqa: E402
from task import Task  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# What a plain call trains: the full model on a GPU, and what learns in a minute on two CPU cores.
DEFAULTS = {
    "cuda": dict(layers=12, heads=8, width=512, hidden=1365, batch=64, context=64, target=64, steps=1500, lr=5e-4,
                 dtype="bf16"),
    "cpu": dict(layers=4, heads=4, width=64, hidden=170, batch=16, context=32, target=32, steps=600, lr=3e-3,
                dtype="fp32"),
}  # fmt: skip
# The data of step s is drawn with seed (--seed << STEP_BITS) + s; seeds from HELD_OUT on are not trained on. All are below
# 1 << 32, since PyTorch's generator on the CPU ignores the bits above.
STEP_BITS, HELD_OUT = 23, 1 << 31


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and of the data")
    for name, said in (("layers", ""), ("heads", ""), ("width", "of the residual stream"), ("hidden", "of the MLPs"),
                       ("batch", "functions per step"), ("context", "M, points with a value"),
                       ("target", "N, points to predict"), ("steps", "in all, those before --resume included")):
        parser.add_argument(f"--{name}", type=int, help=said)
    parser.add_argument("--lr", type=float, help="at its highest; it rises for 100 steps and falls along a cosine")
    parser.add_argument("--clip", type=float, default=1.0, help="the most that the gradient's norm may be")
    parser.add_argument("--attention", choices=ATTENTION, default="tessera")
    for name, said in (("mlp", ""), ("mixture", "its MLPs and its likelihood"), ("norms", "with the residual")):
        parser.add_argument(f"--{name}", choices=PIECES, default="tessera", help=said)
    parser.add_argument("--checkpointing", action="store_true", help="recompute each block in the backward pass")
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks")
    parser.add_argument("--graph", action="store_true", help="replay the whole step from a CUDA graph")
    parser.add_argument("--dtype", choices=DTYPES, help="of activations; fp16 scales the loss. Default: fp32 on the CPU, "
                        "bf16 on a GPU")
    parser.add_argument("--out", type=pathlib.Path, metavar="FOLDER", help="for the curve and the checkpoint")
    parser.add_argument("--save-every", type=int, default=1000, metavar="N", help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from FOLDER/checkpoint.pt")
    options = parser.parse_args(arguments)
    for name, value in DEFAULTS["cuda" if options.device.startswith("cuda") else "cpu"].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name, bound in (("seed", HELD_OUT >> STEP_BITS), ("steps", (1 << STEP_BITS) + 1)):
        if not 0 <= getattr(options, name) < bound:
            parser.error(f"--{name} is {getattr(options, name)}; 0 to {bound - 1} are accepted")
    if options.resume and not options.out:
        parser.error("--resume needs --out")
    if options.graph and not options.device.startswith("cuda"):
        parser.error("--graph needs a CUDA device")
    if options.width % options.heads or options.width // options.heads % 8:
        parser.error(f"--width is {options.width}; a multiple of 8 times --heads ({options.heads}) is accepted")
    return options


def rate_at(step, options):
    """The learning rate of a step, by its number, --lr and --steps: a run that is resumed with these has the same."""
    return options.lr * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / options.steps))


class Curve:
    """Losses and gradient norms by step. They are kept on the device and read in groups, so training does not wait."""

    def __init__(self, rows=()):
        self.rows, self.pending = list(rows), []

    def add(self, step, loss, norm):
        self.pending.append((step, loss, norm))

    def read(self):
        if self.pending:
            steps = [p[0] for p in self.pending]
            values = torch.stack([torch.stack(p[1:]).float() for p in self.pending]).tolist()
            self.rows += [(step, *pair) for step, pair in zip(steps, values)]
            self.pending = []
        return self.rows

    def mean(self, count):
        last = [loss for _, loss, _ in self.read()[-count:]]
        return sum(last) / len(last) if last else math.nan

    def csv(self):
        return "step,loss,gradient_norm\n" + "".join(f"{s},{loss:.6g},{norm:.6g}\n" for s, loss, norm in self.read())

    def svg(self, exact):
        """The losses, of which there is one at least, as a picture: each point is the mean of a few steps, the dashed
        line the exact loss."""
        width, height, left, top, right, bottom = 720, 360, 60, 40, 700, 320
        rows = self.read()
        few = max(1, len(rows) // 200)
        points = [(group[-1][0] + 1, sum(r[1] for r in group) / len(group))
                  for group in (rows[i : i + few] for i in range(0, len(rows), few))]
        low = min([exact] + [p[1] for p in points]) - 0.1
        high = max([exact] + [p[1] for p in points]) + 0.1
        end = max(p[0] for p in points)
        across = lambda step: left + (right - left) * step / end  # noqa: E731
        down = lambda loss: bottom - (bottom - top) * (loss - low) / (high - low)  # noqa: E731
        line = " ".join(f"{across(s):.1f},{down(loss):.1f}" for s, loss in points)
        ticks = ""
        for i in range(5):
            loss, step = low + (high - low) * i / 4, round(end * i / 4)
            ticks += (f'<line x1="{left}" y1="{down(loss):.1f}" x2="{right}" y2="{down(loss):.1f}" stroke="#8884"/>'
                      f'<text x="{left - 6}" y="{down(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>'
                      f'<text x="{across(step):.1f}" y="{bottom + 18}" text-anchor="middle">{step}</text>')
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
                f'font-size="12" fill="#777"><text x="{left}" y="22">loss by step, nats; dashed: exact {exact:.3f}</text>'
                f'{ticks}<line x1="{left}" y1="{down(exact):.1f}" x2="{right}" y2="{down(exact):.1f}" stroke="#c50" '
                f'stroke-dasharray="5 4"/><polyline points="{line}" fill="none" stroke="#07c" stroke-width="1.5"/></svg>\n')


def progress(done, options, begin, first, curve):
    """A line that replaces itself, with what has been learnt so far."""
    seconds = time.monotonic() - begin
    tokens = (done - first) * options.batch * (options.context + options.target) / max(seconds, 1e-9)
    left = seconds / max(done - first, 1) * (options.steps - done)
    bar = "#" * (24 * done // options.steps)
    norm = curve.read()[-1][2]
    text = (f"[{bar:<24}] {done}/{options.steps}  loss {curve.mean(50):7.4f}  gradient norm {norm:.3f}  "
            f"{tokens:,.0f} tokens/s  {left:.0f} s left")
    print(f"\r{text:<110}" if sys.stdout.isatty() else text, end="" if sys.stdout.isatty() else "\n", flush=True)


def held_out(step, task, options):
    """(the model's loss, the exact one) on functions that were not trained on, the same for every seed."""
    losses, exact = [], []
    for i in range(8):
        x, y = task.batch(options.batch, HELD_OUT + i, options.device)
        losses.append(step.loss(x, y, task.context))
        exact.append(task.exact_nll(x, y))
    return torch.stack(losses).float().mean().item(), sum(exact) / len(exact)


def main(arguments=None):
    options = parse(arguments)
    torch.manual_seed(options.seed)
    task = Task(options.context, options.target)
    size = Size(options.layers, options.heads, options.width, options.hidden)
    switches = Switches(options.attention, options.mlp, options.mixture, options.norms, options.checkpointing,
                        options.compile)
    step = Step(TransformerNP(size, switches), options.device, DTYPES[options.dtype], options.lr, options.clip,
                options.graph)
    curve, first = Curve(), 0
    if options.resume:
        saved = torch.load(options.out / "checkpoint.pt", map_location=options.device, weights_only=True)
        if saved["size"] != dataclasses.asdict(size):
            print(f"error: the checkpoint's model is {saved['size']}, not {dataclasses.asdict(size)}", file=sys.stderr)
            return 2
        step.load(saved["state"])
        curve, first = Curve(map(tuple, saved["curve"])), saved["step"]
    parameters = sum(p.numel() for p in step.masters)
    print(f"{parameters / 1e6:.2f} M parameters, {options.dtype} on {options.device}; per step {options.batch} functions of "
          f"{options.context} + {options.target} points; " + ", ".join(
              f"{name} {value}" for name, value in dataclasses.asdict(switches).items()))
    before, exact = held_out(step, task, options)
    print(f"held out, after {first} steps: loss {before:.3f}, exact {exact:.3f}")

    def save(done):
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            torch.save({"step": done, "size": dataclasses.asdict(size), "curve": curve.read(), "state": step.state()},
                       options.out / "checkpoint.tmp")
            (options.out / "checkpoint.tmp").replace(options.out / "checkpoint.pt")
            (options.out / "curve.csv").write_text(curve.csv())
            if curve.rows:
                (options.out / "curve.svg").write_text(curve.svg(exact))

    begin = shown = time.monotonic()
    done = first
    try:
        for at in range(first, options.steps):
            # Each step's data depends on --seed and its number alone.
            x, y = task.batch(options.batch, (options.seed << STEP_BITS) + at, options.device)
            curve.add(at, *step(x, y, task.context, rate_at(at, options)))
            done = at + 1
            if time.monotonic() - shown > (1 if sys.stdout.isatty() else 10) or done == options.steps:
                progress(done, options, begin, first, curve)
                shown = time.monotonic()
            if done % options.save_every == 0:
                save(done)
    except KeyboardInterrupt:
        save(done)
        print(f"\ninterrupted after step {done}" + (f"; --out {options.out} --resume goes on" if options.out else ""))
        return 130
    if sys.stdout.isatty():
        print()
    save(options.steps)
    after, exact = held_out(step, task, options)
    print(f"held out: loss {before:.3f} -> {after:.3f} in {time.monotonic() - begin:.0f} s; exact {exact:.3f}, "
          f"the model is {after - exact:.3f} nats above it"
          + (f"; curve in {options.out}/curve.svg" if options.out and curve.rows else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
