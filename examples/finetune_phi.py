"""Trains a Phi-2-shaped model (32 heads x 80) with LoRA on Tessera's attention: progress, tokens/s, memory, loss.

    python examples/finetune_phi.py                                              # a toy, on the CPU, under a minute
    python examples/finetune_phi.py --device cuda --size phi-2 --seq 131072 --checkpointing --steps 5
    python examples/finetune_phi.py --device cuda --size phi-2 --layers 8 --seq 16384 --checkpointing --attention sdpa

Weights are random and nothing is downloaded: the text is the source of the Python standard library, byte by byte. Only
the LoRA matrices are trained. With --four-bit, the frozen weights are quantised to 4 bits by bitsandbytes, which must be
installed.
"""

import argparse
import math
import os
import pathlib
import resource
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import PhiConfig, PhiForCausalLM

import tessera.transformers

SIZES = {
    "toy": dict(vocab_size=256, hidden_size=160, intermediate_size=640, num_attention_heads=2),
    "phi-2": dict(vocab_size=51200, hidden_size=2560, intermediate_size=10240, num_attention_heads=32),
}
DEFAULTS = {
    "toy": dict(layers=2, seq=256, batch=4, steps=60, lr=3e-3),
    "phi-2": dict(layers=32, seq=2048, batch=1, steps=20, lr=2e-4),
}
ADAPTED = ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2")
LOSS_ROWS = 2048  # the logits of a long sequence do not fit into memory; this many rows do


class Lora(torch.nn.Module):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        place = dict(device=base.weight.device, dtype=torch.float32)
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features, **place) / math.sqrt(base.in_features))
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank, **place))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


def four_bit(linear, dtype):
    import bitsandbytes as bnb

    quantised = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=dtype, quant_type="nf4"
    )
    quantised.load_state_dict(linear.state_dict())
    return quantised.to(linear.weight.device)


def adapt(model, rank, quantise, dtype):
    """Freezes the model and adds LoRA to every linear layer of its blocks; returns how many."""
    model.requires_grad_(False)
    count = 0
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ADAPTED and isinstance(child, torch.nn.Linear):
                setattr(module, name, Lora(four_bit(child, dtype) if quantise else child, rank))
                count += 1
    return count


def text(length):
    """At least `length` bytes of real text, as tokens."""
    pieces, size = [], 0
    for path in sorted(pathlib.Path(os.__file__).parent.glob("*.py")):
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
        if size > 4 * length + (1 << 20):
            break
    return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8).long()


def loss_of(model, ids):
    """Next-token loss, with the logits computed and discarded a few rows at a time."""
    hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()

    def part(rows, wanted):
        return F.cross_entropy(model.lm_head(rows).float(), wanted, reduction="sum")

    total = 0.0
    for start in range(0, len(targets), LOSS_ROWS):
        rows, wanted = hidden[start : start + LOSS_ROWS], targets[start : start + LOSS_ROWS]
        total = total + checkpoint(part, rows, wanted, use_reentrant=False)
    return total / len(targets)


def memory(device):
    """Peak memory in GiB: allocated on the GPU, or the process's on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq", type=int, help="tokens per sequence")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--rank", type=int, default=16, help="of the LoRA update")
    parser.add_argument("--checkpointing", action="store_true", help="recompute each layer in the backward pass")
    parser.add_argument("--four-bit", action="store_true", help="4-bit frozen weights, with bitsandbytes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on a GPU")
    parser.add_argument("--attention", default="tessera", help="tessera, sdpa or eager")
    options = parser.parse_args()
    for name, value in DEFAULTS[options.size].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))

    torch.manual_seed(0)
    tessera.transformers.register()
    config = PhiConfig(
        **SIZES[options.size], num_hidden_layers=options.layers, max_position_embeddings=options.seq,
        partial_rotary_factor=0.4, embd_pdrop=0.0, resid_pdrop=0.0, attention_dropout=0.0,
        attn_implementation=options.attention, dtype=dtype,
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    with device:
        model = PhiForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    adapted = adapt(model, options.rank, options.four_bit, dtype)
    if options.checkpointing:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    tessera.transformers.report(model, options.seq)
    trained = [p for p in model.parameters() if p.requires_grad]
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, "
        f"{sum(p.numel() for p in trained) / 1e6:.2f} M trained (LoRA of rank {options.rank} on {adapted} layers), "
        f"{'4-bit' if options.four_bit else dtype} weights, {options.attention} attention"
    )

    tokens = text(options.seq)
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    seconds, losses = [], []
    progress = tqdm(range(options.steps), unit="step", file=sys.stdout)
    for _ in progress:
        starts = torch.randint(0, len(tokens) - options.seq, (options.batch,)).tolist()
        ids = torch.stack([tokens[s : s + options.seq] for s in starts]).to(device)
        begin = time.perf_counter()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
        rate = ids.numel() / seconds[-1]
        progress.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s, {memory(device):.2f} GiB")
    # The first step compiles kernels and fills the allocator.
    steady = sorted(seconds[1:] or seconds)
    rate = options.batch * options.seq / steady[len(steady) // 2]
    few = max(1, min(5, len(losses) // 2))
    print(
        f"loss {sum(losses[:few]) / few:.3f} -> {sum(losses[-few:]) / few:.3f} in {len(losses)} steps of "
        f"{options.batch} x {options.seq} tokens; {rate:,.0f} tokens/s (median step); peak memory {memory(device):.2f} GiB"
    )


if __name__ == "__main__":
    main()
