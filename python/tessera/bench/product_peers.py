"""Other libraries' products, MLPs, experts, losses and norms, where they have them. Each is imported when it is first called: what
is not installed, or refuses a shape, is left out of its row, which says why."""

import functools
import importlib.util

PEERS = {"compiled": "torch", "quack": "quack", "liger": "liger_kernel"}  # name -> the package that must be installed


def installed(name):
    return importlib.util.find_spec(PEERS[name]) is not None


def peer_of(entrant):
    """The peer whose code an entrant ("pytorch compiled", "quack 1376", ...) runs; None: Tessera's, eager PyTorch's, a copy."""
    return next((name for name in PEERS if name in entrant.split()), None)


def compiled(function):
    """PyTorch's function as torch.compile makes it when it is first called, with all that it searches."""
    made = []

    def call(*arguments):
        if not made:
            import torch
            from torch._functorch import config

            config.donated_buffer = False  # gradients are computed repeatedly from one forward
            # CUDA graphs are left out for all entrants alike.
            made.append(torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False))
        return made[0](*arguments)

    return call


# quack-kernels: kernels in CuTe DSL, which search their tiles when a shape is first used.


def quack_gemm(a, b, **options):
    """a [M, K] b [K, N]; with cu_seqlens_m, of groups: b [G, K, N]."""
    from quack.gemm_interface import gemm

    return gemm(a, b, **options)


def quack_gemm_split(a, b):
    """For products of few tiles and many terms: each tile is computed by four blocks."""
    return quack_gemm(a, b, split_k=4)


def quack_mlp(x, up, down):
    """The hidden columns must be a multiple of 8."""
    from quack.mlp import mlp_func

    return mlp_func(x, up, down, "silu")


def quack_gated_mlp(x, gate_and_up, down):
    """gate_and_up: one matrix above the other."""
    from quack.mlp import mlp_func

    return mlp_func(x, gate_and_up, down, "swiglu", concat_layout=True)


def quack_linear_cross_entropy(x, weight, target):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    # It refuses chunks of as many rows as x has columns: it tells one from the other by their number.
    return chunked_linear_cross_entropy(x, weight, target, chunk_size=4096 if x.shape[1] != 4096 else 2048)


def quack_rms_norm(x, weight, residual=None):
    """The norm; with a residual, and the sum."""
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, residual=residual, prenorm=residual is not None)


def quack_rotary(x, cos, sin):
    from quack.rotary import apply_rotary

    return apply_rotary(x, cos, sin)


# Liger: kernels in Triton.


def liger_gated_mlp(x, up, down, gate):
    from liger_kernel.ops import LigerSiLUMulFunction
    from torch.nn.functional import linear

    return linear(LigerSiLUMulFunction.apply(linear(x, gate), linear(x, up)), down)


def is_for_many_rows(config):
    sizes = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_H": 512}
    return config.num_stages < 5 and all(config.kwargs.get(name, size) == size for name, size in sizes.items())


@functools.cache
def prepare_liger_experts():
    """Of the tiles that each of its kernels tries, leaves those for many rows, if there are any: it compiles one after the
    other, and all of them take ten minutes."""
    from liger_kernel.ops import fused_moe_kernels

    for kernel in vars(fused_moe_kernels).values():
        if isinstance(getattr(kernel, "configs", None), list):
            kernel.configs = [each for each in kernel.configs if is_for_many_rows(each)] or kernel.configs


def liger_experts(x, gate_and_up, down, chosen, weights):
    """chosen, weights [tokens, top_k]; gate_and_up [experts, 2 hidden, width], one matrix above the other."""
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    prepare_liger_experts()
    return LigerFusedMoEFunction.apply(x, gate_and_up, down, chosen, weights)


def liger_linear_cross_entropy(x, weight, target):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(x, weight, target)


def liger_rms_norm(x, weight, residual=None):
    from liger_kernel.transformers import functional

    if residual is None:
        return functional.liger_rms_norm(x, weight, 1e-6, in_place=False)
    return functional.liger_fused_add_rms_norm(x, residual, weight, 1e-6, in_place=False)


def liger_layer_norm(x, weight, bias):
    from liger_kernel.transformers.functional import liger_layer_norm as layer_norm

    return layer_norm(x, weight, bias, 1e-5)
