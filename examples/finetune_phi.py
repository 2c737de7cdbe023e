"""Trains a Phi-2-shaped model (32 heads x 80) with LoRA on Tessera's attention, rotary embedding and loss. Prints progress,
tokens/s, memory and loss.

    python examples/finetune_phi.py                                              # a toy, on the CPU, under a minute
    python examples/finetune_phi.py --check kernel integration trainer           # self-checks; add --device cuda
    python examples/finetune_phi.py --device cuda --size phi-2 --seq 131072 --checkpointing --steps 5
    python examples/finetune_phi.py --device cuda --size phi-2 --seq 262144 --checkpointing --offload --steps 3
    python examples/finetune_phi.py --device cuda --model ~/phi-2 --load-in-4bit --seq 16384 --checkpointing --state lora.pt
    python examples/finetune_phi.py --device cuda --size phi-2 --layers 8 --seq 16384 --checkpointing --attention sdpa

Nothing is downloaded: weights are random or come from --model, and the text is the source of the Python standard library,
byte by byte or through the model's tokenizer. Only the LoRA matrices are trained. A GPU trains in bfloat16 if it has that
and else, before Ampere, in float16 with a scaled loss.
"""

import argparse
import contextlib
import json
import math
import os
import pathlib
import resource
import sys
import time
import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PhiConfig, PhiForCausalLM
from transformers.activations import NewGELUActivation
from transformers.models.phi.modeling_phi import PhiAttention

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
        rows = x.flatten(0, -2)
        low, up = F.linear(rows, self.down.to(x.dtype)), self.up.to(x.dtype)
        if type(self.base) is torch.nn.Linear:
            # The wide product comes last, so that what is recomputed for the backward ends before the layer's last one, and
            # adds in place.
            out = F.linear(low, up, self.base.bias).addmm_(rows, self.base.weight.T)
        else:  # of 4-bit weights
            out = self.base(rows).addmm_(low, up.T)
        return out.unflatten(0, x.shape[:-1])


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


def text(length, folder=None):
    """At least `length` bytes of real text, as tokens: its bytes, or those of the tokenizer in `folder`."""
    pieces, size = [], 0
    for path in sorted(pathlib.Path(os.__file__).parent.glob("*.py")):
        pieces.append(path.read_bytes())
        size += len(pieces[-1])
        if size > 4 * length + (1 << 20):
            break
    read = b"".join(pieces)
    if folder and any((pathlib.Path(folder) / name).exists() for name in ("tokenizer.json", "vocab.json", "tokenizer.model")):
        return torch.tensor(AutoTokenizer.from_pretrained(folder)(read.decode(errors="replace"))["input_ids"])
    return torch.frombuffer(bytearray(read), dtype=torch.uint8).long()


def loss_of(model, ids, options):
    """Next-token loss, with the logits computed and discarded a few rows at a time."""
    # What is saved for the backward, with checkpointing one tensor per layer, goes to the host.
    kept = torch.autograd.graph.save_on_cpu(pin_memory=ids.is_cuda) if options.offload else contextlib.nullcontext()
    with kept:
        hidden = model.model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()
    if options.attention == "tessera":
        weight = model.lm_head.weight
        if model.lm_head.bias is not None:  # one more column of the weight, times a one; rows stay aligned with eight
            weight = torch.cat([weight, F.pad(model.lm_head.bias[:, None], (0, 7))], 1)
            hidden = F.pad(hidden, (0, 8), value=1)
        if hidden.dtype == torch.float16:  # gradients of a mean would be rounded before they are multiplied by the loss's scale
            return tessera.linear_cross_entropy(hidden, weight, targets, reduction="sum") / len(targets)
        return tessera.linear_cross_entropy(hidden, weight, targets)

    def part(rows, wanted):
        return F.cross_entropy(model.lm_head(rows).float(), wanted, reduction="sum")

    total = 0.0
    for rows, wanted in zip(hidden.split(LOSS_ROWS), targets.split(LOSS_ROWS)):
        total = total + checkpoint(part, rows, wanted, use_reentrant=False)
    return total / len(targets)


def memory(device):
    """Peak memory in GiB: allocated on the GPU, or the process's on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def dtype_for(device):
    """bfloat16 on a GPU whose code has it (TESSERA_CODE_ARCH=sm_75 tries Turing's on a newer one), else float16."""
    if device.type != "cuda":
        return torch.float32
    turing = os.environ.get("TESSERA_CODE_ARCH") == "sm_75" or torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if turing else torch.bfloat16


def attention_forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
    """PhiAttention's, for training, with Tessera's rotary embedding: one kernel rotates a part of each head and copies the
    rest, where Transformers slices, rotates and concatenates."""
    if past_key_values is not None:
        return PhiAttention.forward(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (project(hidden_states).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
    cos, sin = (table[0, :, : self.rotary_ndims // 2] for table in position_embeddings)  # both halves are the same
    q, k = tessera.rotary(q, cos, sin), tessera.rotary(k, cos, sin)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, _ = tessera.transformers.forward(self, q, k, v, attention_mask, scaling=self.scaling,
                                          dropout=self.attention_dropout if self.training else 0.0, **kwargs)
    return self.dense(out.flatten(-2)), None


def with_fewer_kernels(model, attention):
    """The model with PyTorch's GELU, one kernel instead of the eight of Transformers' NewGELUActivation, and, on Tessera, with the
    above."""
    for module in model.modules():
        if isinstance(getattr(module, "activation_fn", None), NewGELUActivation):
            module.activation_fn = torch.nn.GELU(approximate="tanh")
        if attention == "tessera" and isinstance(module, PhiAttention) and not module.qk_layernorm:
            module.forward = types.MethodType(attention_forward, module)
    return model


def keeping_attention():
    """A context_fn for torch.utils.checkpoint that saves attention's results: in long sequences they are the costliest to
    recompute."""
    aten = torch.ops.aten
    return create_selective_checkpoint_contexts([
        torch.ops.tessera.attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ])


def make_model(options, device, dtype):
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation=options.attention)
        model.config.max_position_embeddings = max(model.config.max_position_embeddings, options.seq)
        return with_fewer_kernels(model, options.attention).to(device).train()
    config = PhiConfig(
        **SIZES[options.size], num_hidden_layers=options.layers, max_position_embeddings=options.seq,
        partial_rotary_factor=0.4, embd_pdrop=0.0, resid_pdrop=0.0, attention_dropout=0.0,
        attn_implementation=options.attention, dtype=dtype,
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    with device:
        model = PhiForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    return with_fewer_kernels(model, options.attention)


class Trainer:
    """LoRA's parameters, their optimizer and, in float16, the scale of the loss."""

    def __init__(self, model, options, dtype):
        self.model, self.options = model, options
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=options.lr)
        self.scaler = torch.amp.GradScaler(options.device.split(":")[0], enabled=dtype == torch.float16, init_scale=2.0**12)
        self.step_count = 0

    def step(self, ids):
        """Returns the loss and the norm of the gradient, which is clipped at 1."""
        loss = loss_of(self.model, ids, self.options)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.scaler.step(self.optimizer)  # leaves the parameters as they are if float16 overflowed
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step_count += 1
        return loss.item(), norm.item()

    def warm_up(self, ids):
        """Compiles kernels and fills the allocator with the model's first layer, so that the first step is like the next ones."""
        layers = self.model.model.layers
        self.model.model.layers = layers[:1]
        try:
            loss_of(self.model, ids, self.options).backward()
        finally:
            self.model.model.layers = layers
        self.optimizer.zero_grad()
        if ids.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def save(self, file):
        with torch.no_grad():
            lora = {name: p.cpu() for name, p in self.trained.items()}
        torch.save(dict(step=self.step_count, lora=lora, optimizer=self.optimizer.state_dict(),
                        scaler=self.scaler.state_dict()), file)

    def load(self, file):
        state = torch.load(file, map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, p in self.trained.items():
                p.copy_(state["lora"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.step_count = state["step"]


def batch_at(step, tokens, options, device):
    """The same tokens for a step, whether the training was interrupted before it or not."""
    starts = torch.randint(0, len(tokens) - options.seq, (options.batch,), generator=torch.Generator().manual_seed(step))
    return torch.stack([tokens[s : s + options.seq] for s in starts.tolist()]).to(device)


def check_kernel(options, device, dtype):
    """Attention at Phi's head dim, forward and backward, against float64."""
    q, k, v = (torch.randn(2, 130, 4, 80, device=device).to(dtype).requires_grad_() for _ in range(3))
    upstream = torch.randn(2, 130, 4, 80, device=device)
    got = tessera.attention(q, k, v, causal=True)
    exact_of = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in exact_of), is_causal=True).transpose(1, 2)
    worst = 0.0
    for a, b in zip((got, *torch.autograd.grad(got, (q, k, v), upstream.to(dtype))),
                    (exact, *torch.autograd.grad(exact, exact_of, upstream.double()))):
        worst = max(worst, ((a.double() - b).norm() / b.norm()).item())
    return worst < 4 * torch.finfo(dtype).eps + 1e-6, f"relative error {worst:.2g}"


def check_integration(options, device, dtype):
    """The model's hidden states, its loss and a gradient on Tessera and as Transformers and PyTorch compute them."""
    found = {}
    for options.attention in ("eager", "tessera"):
        torch.manual_seed(0)
        ids = torch.randint(0, 256, (2, 100), generator=torch.Generator().manual_seed(1)).to(device)
        model = make_model(options, device, dtype)
        torch.nn.init.normal_(model.lm_head.bias)  # else 0
        loss = loss_of(model, ids, options)
        gradient, = torch.autograd.grad(loss, model.model.final_layernorm.weight)
        found[options.attention] = model.model(ids, use_cache=False).last_hidden_state, gradient, loss
    states, gradient, loss = (((one.double() - other).norm() / other.double().norm()).item()
                              for one, other in zip(found["tessera"], found["eager"]))
    eps = torch.finfo(dtype).eps
    said = f"relative differences: hidden states {states:.2g}, gradient {gradient:.2g}, loss {loss:.2g}"
    return max(states, gradient) < 20 * eps and loss < 2 * eps, said


def check_trainer(options, device, dtype):
    """A few steps: the loss falls, gradients are finite, and a training that was interrupted goes on where it was."""
    torch.manual_seed(0)
    model = make_model(options, device, dtype)
    adapt(model, options.rank, options.four_bit, dtype)
    trainer, tokens, file = Trainer(model, options, dtype), text(options.seq), pathlib.Path(f"/tmp/lora-{os.getpid()}.pt")
    steps = [trainer.step(batch_at(0, tokens, options, device)) for _ in range(8)]
    trainer.save(file)
    after = trainer.step(batch_at(8, tokens, options, device))
    trainer.load(file)
    file.unlink()
    again = trainer.step(batch_at(8, tokens, options, device))
    losses, norms = zip(*steps)
    good = losses[-1] < losses[0] and all(map(math.isfinite, norms)) and math.isclose(after[0], again[0], rel_tol=1e-3)
    return good, f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, gradient norm {norms[-1]:.3f}, after a restart {again[0]:.4f}"


CHECKS = {"kernel": check_kernel, "integration": check_integration, "trainer": check_trainer}


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
    parser.add_argument("--keep-attention", action="store_true",
                        help="with --checkpointing and --attention tessera or sdpa: recompute everything in a layer except "
                             "attention, whose results stay in memory")
    parser.add_argument("--offload", action="store_true", help="with --checkpointing: keep the layers' inputs on the host")
    parser.add_argument("--load-in-4bit", "--four-bit", dest="four_bit", action="store_true",
                        help="4-bit frozen weights, with bitsandbytes")
    parser.add_argument("--model", metavar="PATH", help="a folder with config.json and safetensors, sharded or not")
    parser.add_argument("--state", metavar="FILE", help="LoRA and optimizer: loaded if the file exists, saved at the end")
    parser.add_argument("--json", metavar="FILE", help="write each step's loss, gradient norm and seconds, and peak memory")
    parser.add_argument("--check", nargs="+", choices=CHECKS, help="run these self-checks on the toy and train nothing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: what the device has")
    parser.add_argument("--attention", default="tessera", help="tessera, sdpa or eager")
    options = parser.parse_args()
    for name, value in DEFAULTS[options.size].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype) if options.dtype else dtype_for(device)
    if options.offload and not options.checkpointing:
        parser.error("--offload needs --checkpointing: without, all activations would go to the host")
    if options.keep_attention and (options.offload or not options.checkpointing):
        parser.error("--keep-attention needs --checkpointing, without --offload")
    if options.keep_attention and options.attention not in ("tessera", "sdpa"):
        parser.error(f"--keep-attention works with --attention tessera or sdpa, not {options.attention}")

    torch.manual_seed(0)
    tessera.transformers.register()
    if options.check:
        failed = 0
        for name in options.check:
            good, said = CHECKS[name](options, device, dtype)
            failed += not good
            print(f"{'ok' if good else 'FAILED':<7} {name}: {said}, {str(dtype)[6:]} on {device}")
        return 1 if failed else 0
    model = make_model(options, device, dtype)
    adapted = adapt(model, options.rank, options.four_bit, dtype)
    if options.checkpointing:
        # Only the reentrant kind saves the layers' inputs where save_on_cpu sees them.
        how = dict(use_reentrant=options.offload)
        if options.keep_attention:
            how["context_fn"] = keeping_attention
        model.gradient_checkpointing_enable(how)
        if options.offload:
            model.enable_input_require_grads()
    tessera.transformers.report(model, options.seq)
    trained = [p for p in model.parameters() if p.requires_grad]
    print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, "
        f"{sum(p.numel() for p in trained) / 1e6:.2f} M trained (LoRA of rank {options.rank} on {adapted} layers), "
        f"{'4-bit' if options.four_bit else dtype} weights, {options.attention} attention"
    )

    tokens = text(options.seq, options.model)
    trainer = Trainer(model, options, dtype)
    if options.state and os.path.exists(options.state):
        trainer.load(options.state)
        print(f"goes on after step {trainer.step_count} of {options.state}")
    trainer.warm_up(batch_at(trainer.step_count, tokens, options, device))
    seconds, losses, norms = [], [], []
    progress = tqdm(range(options.steps), unit="step", file=sys.stdout)
    for _ in progress:
        ids = batch_at(trainer.step_count, tokens, options, device)
        begin = time.perf_counter()
        loss, norm = trainer.step(ids)
        losses.append(loss)
        norms.append(norm)
        seconds.append(time.perf_counter() - begin)
        rate = ids.numel() / seconds[-1]
        progress.set_postfix_str(
            f"loss {loss:.3f}, gradient norm {norm:.3f}, {rate:,.0f} tokens/s, {memory(device):.2f} GiB")
    if options.state:
        trainer.save(options.state)
    rate = options.batch * options.seq / sorted(seconds)[len(seconds) // 2]
    if options.json:
        said = dict(attention=options.attention, layers=model.config.num_hidden_layers, dtype=str(dtype)[6:],
                    four_bit=options.four_bit, batch=options.batch, seq=options.seq, checkpointing=options.checkpointing,
                    keep_attention=options.keep_attention, offload=options.offload, tokens_per_s=rate, peak_GiB=memory(device),
                    seconds=seconds, losses=losses, gradient_norms=norms)
        pathlib.Path(options.json).write_text(json.dumps(said, indent=1) + "\n")
    few = max(1, min(5, len(losses) // 2))
    print(
        f"loss {sum(losses[:few]) / few:.3f} -> {sum(losses[-few:]) / few:.3f} in {len(losses)} steps of "
        f"{options.batch} x {options.seq} tokens; {rate:,.0f} tokens/s (median step); peak memory {memory(device):.2f} GiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
