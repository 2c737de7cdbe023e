#!/usr/bin/env python3
"""What rounding q, k and v to e4m3 does to attention, on the CPU, whose forward does not round P: the table of docs/contract.md.

Relative Frobenius error against fp64 of the inputs, mean over heads: scales of the tensor, of heads and of blocks of 128 rows;
rotated; the mean of each head's keys taken from them first; and with the rests of the largest key channels kept.

    python bench/fp8_rounding.py
"""

import argparse

import torch

import tessera
from tessera._fp8 import dequantize_fp8

TOKENS, HEADS, DIM, CHANNEL = 1024, 4, 128, 5


def exact(q, k, v):
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / DIM**0.5
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double())


def rounded(block, *tensors):
    return exact(*(dequantize_fp8(*tessera.quantize_fp8(t, block=block), t.dtype, block=block) for t in tensors))


def inputs():
    """(name, q, k, v)"""
    def changed(name, change):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, TOKENS, HEADS, DIM) for _ in range(3))
        change(q, k, v)
        return name, *(t.bfloat16() for t in (q, k, v))

    def powers():
        return 2.0 ** torch.randint(0, 5, (1, TOKENS, 1, 1))

    heads = torch.tensor([1.0, 1e2, 1e3, 1e4]).view(1, 1, HEADS, 1)
    yield changed("normal", lambda q, k, v: None)
    yield changed("key channel 30 times larger", lambda q, k, v: k[..., CHANNEL].mul_(30))
    yield changed("key channel around 90", lambda q, k, v: k[..., CHANNEL].add_(90))
    yield changed("key and query channel 10 times larger", lambda q, k, v: (k[..., CHANNEL].mul_(10), q[..., CHANNEL].mul_(10)))
    yield changed("query channel 30 times larger", lambda q, k, v: q[..., CHANNEL].mul_(30))
    yield changed("rows of k and v 1 to 16 times larger", lambda q, k, v: (k.mul_(powers()), v.mul_(powers())))
    yield changed("heads 1 to 10,000 times larger", lambda q, k, v: (v.mul_(heads), k.mul_(heads), q.div_(heads)))


def main():
    print("| inputs | per tensor | per head | blocks of 128 | rotated | keys' mean | residual |\n" + "|---" * 7 + "|")
    for name, q, k, v in inputs():
        wanted = exact(q, k, v)
        without_mean = (k.float() - k.float().mean(1, keepdim=True)).bfloat16()
        found = [rounded(block, q, k, v) for block in ("tensor", "head", 128)]
        found += [tessera.attention(q, k, v, precision="fp8_rotated"), rounded("head", q, without_mean, v),
                  tessera.attention(q, k, v, precision="fp8_residual")]
        errors = [((out - wanted).norm(dim=(1, 3)) / wanted.norm(dim=(1, 3))).mean().item() for out in found]
        print(f"| {name} | " + " | ".join(f"{e:.3f}" for e in errors) + " |", flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
