#!/usr/bin/env python3
"""What fp8 attention costs a language model: perplexity on held-out text, trained and evaluated in bf16 and in fp8.

    python examples/fp8_perplexity.py                 # under a minute on a Hopper GPU
    python examples/fp8_perplexity.py --steps 2 --layers 1 --width 128 --seq 64 --batch 2     # a try on the CPU

A small model of LLaMA's shape (RMSNorm, rotary embedding, gated MLP, causal attention with half as many key heads) learns
the bytes of Python's own library. Attention is tessera's; the rest is PyTorch's, in bf16.
"""

import argparse
import pathlib
import sysconfig
import time

import torch
import torch.nn.functional as F

import tessera


def corpus(limit=20_000_000):
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    files += sorted(pathlib.Path(torch.__file__).parent.glob("nn/**/*.py"))
    data = b"".join(path.read_bytes() for path in files)[:limit]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.key_heads, self.dim = heads, max(1, heads // 2), width // heads
        hidden = width * 8 // 3 // 64 * 64
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, (self.heads + 2 * self.key_heads) * self.dim, bias=False)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.up, self.down = torch.nn.Linear(width, 2 * hidden, bias=False), torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin, precision):
        batch, seq, width = x.shape
        h, k = self.heads, self.key_heads
        q, k, v = self.qkv(self.norms[0](x)).view(batch, seq, -1, self.dim).split((h, k, k), 2)
        q, k = (rotate(t, cos, sin) for t in (q, k))
        x = x + self.out(tessera.attention(q, k, v, causal=True, precision=precision).reshape(batch, seq, width))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def rotate(t, cos, sin):
    a, b = t.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Model(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed = torch.nn.Embedding(256, args.width)
        self.blocks = torch.nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm = torch.nn.RMSNorm(args.width)
        self.head = torch.nn.Linear(args.width, 256, bias=False)
        dim = args.width // args.heads
        angle = torch.arange(args.seq)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("cos", angle.cos()[:, None])
        self.register_buffer("sin", angle.sin()[:, None])
        for p in self.parameters():
            if p.dim() == 2:
                torch.nn.init.normal_(p, std=0.02)

    def loss(self, tokens, precision):
        x = self.embed(tokens[:, :-1].long())
        for block in self.blocks:
            x = block(x, self.cos, self.sin, precision)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens[:, 1:].long().flatten())


def batches(data, args, seed):
    random = torch.Generator().manual_seed(seed)
    while True:
        first = torch.randint(len(data) - args.seq - 1, (args.batch,), generator=random)
        yield torch.stack([data[i : i + args.seq + 1] for i in first.tolist()])


def train(data, args, precision, device):
    torch.manual_seed(args.seed)
    model = Model(args).to(device, torch.bfloat16)
    weights = [p.detach().float() for p in model.parameters()]  # what the optimizer changes
    optimizer = torch.optim.AdamW(weights, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    start = time.perf_counter()
    for step, tokens in zip(range(args.steps), batches(data, args, args.seed)):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 50) * (1 - 0.9 * step / args.steps)
        model.loss(tokens.to(device), precision).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for w, p in zip(weights, model.parameters()):
            w.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for w, p in zip(weights, model.parameters()):
                p.copy_(w)
    return model, time.perf_counter() - start


@torch.no_grad()
def perplexity(model, data, args, precision, device, count=8):
    losses = [model.loss(t.to(device), precision) for _, t in zip(range(count), batches(data, args, 1 << 30))]
    return torch.stack(losses).mean().exp().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(steps=400, layers=6, width=512, heads=4, seq=1024, batch=16, seed=1).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precisions", nargs="*", default=["fp8", "fp8_rotated", "fp8_residual"])
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = corpus()
    held_out, data = data[: len(data) // 20], data[len(data) // 20 :]
    models = {}
    for precision in (None, "fp8"):
        models[precision], seconds = train(data, args, precision, device)
        print(f"trained in {precision or 'bf16'}: {args.steps} steps in {seconds:.1f} s", flush=True)
    base = perplexity(models[None], held_out, args, None, device)
    print(f"trained in bf16, evaluated in bf16: {base:.4f}")
    for precision in args.precisions:
        here = perplexity(models[None], held_out, args, precision, device)
        print(f"trained in bf16, evaluated in {precision}: {here:.4f} ({(here / base - 1) * 100:+.2f} %)")
    for precision in (None, "fp8"):
        here = perplexity(models["fp8"], held_out, args, precision, device)
        print(f"trained in fp8, evaluated in {precision or 'bf16'}: {here:.4f} ({(here / base - 1) * 100:+.2f} %)")


if __name__ == "__main__":
    main()
