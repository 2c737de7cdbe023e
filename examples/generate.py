"""Generates tokens with a Hugging Face model on Tessera's attention, beside SDPA.

    python examples/generate.py                              # on the CPU: small models, tokens compared with SDPA's
    python examples/generate.py --device cuda                # the same in bf16
    python examples/generate.py --device cuda --time         # a LLaMA-7B-shaped model: ms per token, compiled

Weights are random and nothing is downloaded. The small models (LLaMA, Mistral with a sliding window, Phi with head dim 80
and partial rotary embedding) are trained for a moment on the Python standard library, byte by byte, so that no two
tokens are equally likely; tokens may still differ where the two best logits are equal within bf16's rounding.
"""

import argparse
import os
import pathlib
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

import tessera.transformers

SMALL = dict(vocab_size=256, intermediate_size=512, num_hidden_layers=2, max_position_embeddings=1024)
LLAMA_7B = dict(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_attention_heads=32)
WINDOW = 48


def small_model(kind):
    if kind == "phi":
        config = transformers.PhiConfig(**SMALL, hidden_size=320, num_attention_heads=4, partial_rotary_factor=0.4)
        return transformers.PhiForCausalLM(config)
    shape = dict(SMALL, hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    if kind == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**shape, sliding_window=WINDOW))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


def text(length):
    pieces, size = [], 0
    for path in sorted(pathlib.Path(os.__file__).parent.glob("*.py")):
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
        if size >= length:
            break
    return torch.frombuffer(bytearray(b"".join(pieces)[:length]), dtype=torch.uint8).long()


def trained(kind, device, steps):
    torch.manual_seed(0)
    with torch.device(device):
        model = small_model(kind).train()
    model.set_attn_implementation("sdpa")
    tokens = text(20_000).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - 129, (16,)).tolist()
        batch = torch.stack([tokens[s : s + 128] for s in starts])
        loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prompts = torch.stack([tokens[s : s + 64] for s in (0, 3_000, 9_000)])
    return model.eval(), prompts, loss.item()


def prepare(model):
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None


def compare(kind, device, dtype, new, steps):
    """Tokens of both implementations; returns whether they agree."""
    model, prompts, loss = trained(kind, device, steps)
    model = model.to(dtype)
    prepare(model)
    mask = torch.ones_like(prompts)
    mask[1, :9] = 0  # padding on the left
    agree = True
    for cache in ("dynamic", "static"):
        results = {}
        for implementation in ("sdpa", "tessera"):
            model.set_attn_implementation(implementation)
            results[implementation] = model.generate(
                prompts, attention_mask=mask, max_new_tokens=new, do_sample=False, cache_implementation=cache,
                disable_compile=True, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        theirs, ours = (results[name].sequences[:, prompts.shape[1] :] for name in ("sdpa", "tessera"))
        best = torch.stack(results["sdpa"].logits, 1).float().topk(2).values
        rounding = torch.finfo(dtype).eps * best[..., 0].abs()
        lines = []
        for row in range(len(prompts)):
            different = (theirs[row] != ours[row]).nonzero().flatten()
            if not len(different):
                continue
            at = int(different[0])
            gap = float(best[row, at, 0] - best[row, at, 1])
            tie = gap <= 2 * float(rounding[row, at])
            agree &= tie
            lines.append(f"row {row} differs from token {at} on, logits {gap:.3g} apart: {'a tie' if tie else 'NO TIE'}")
        shown = "; ".join(lines) or f"all {theirs.numel()} tokens equal"
        print(f"{kind}, {cache} cache, {str(dtype)[6:]}, loss {loss:.2f}: {shown}", flush=True)
    return agree


class Clock:
    """A streamer that notes when each token arrives."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


def ms_per_token(model, context, new, device, compiled):
    """The median over `new` tokens of generate() with a static cache, after a run that compiles."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    prompt = torch.randint(0, model.config.vocab_size, (1, context), device=device)
    options = dict(do_sample=False, cache_implementation="static", max_new_tokens=new, disable_compile=not compiled)
    if compiled:
        options["compile_config"] = transformers.CompileConfig(fullgraph=True)
    start = time.perf_counter()
    for _ in range(2):
        clock = Clock()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **options)
        first = time.perf_counter() - start if _ == 0 else first
    steps = [b - a for a, b in zip(clock.times[2:], clock.times[3:])]
    return statistics.median(steps) * 1e3, counters["stats"]["unique_graphs"], first


def measure(args):
    config = transformers.LlamaConfig(**LLAMA_7B, num_hidden_layers=args.layers, max_position_embeddings=8192)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        model = transformers.LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    prepare(model)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters / 1e9:.2f} G parameters, {args.layers} layers, bf16, batch 1, static cache")
    for context in args.context:
        for implementation in args.attention:
            model.set_attn_implementation(implementation)
            ms, graphs, first = ms_per_token(model, context, args.new, args.device, not args.eager)
            how = "eager" if args.eager else f"compiled, {graphs} graph{'s' * (graphs != 1)}, first run {first:.0f} s"
            print(f"context {context:5}, {implementation:8} {ms:7.3f} ms/token  ({how})", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=["llama", "mistral", "phi"])
    parser.add_argument("--new", type=int, help="tokens to generate; default 256, and 64 with --time")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--time", action="store_true", help="a LLaMA-7B-shaped model's time per token")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--attention", nargs="+", default=["sdpa", "tessera"])
    parser.add_argument("--eager", action="store_true", help="with --time: do not compile")
    args = parser.parse_args()
    tessera.transformers.register()
    if args.time:
        args.new = args.new or 64
        return measure(args)
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    agree = [compare(kind, args.device, dtype, args.new or 256, args.steps) for kind in args.models]
    if not all(agree):
        raise SystemExit("tokens differ")


if __name__ == "__main__":
    main()
