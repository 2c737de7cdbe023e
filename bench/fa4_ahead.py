#!/usr/bin/env python3
"""fa4_ahead.py CACHE: compiles FlashAttention-4's kernels for the shapes of `python -m tessera.bench`, without a GPU.

Its compiler takes seconds per kernel, and minutes for all of a comparison. Where GPU time is scarce, run this on another machine
with the same Python, flash-attn-4 and nvidia-cutlass-dsl (tried with 3.12, 4.0.0b36 and 4.8.1), copy CACHE to the one with the GPU,
and set there, before the comparison:

    FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=CACHE

It calls what the comparison calls, on fake tensors: forward, and backward in the fast and the deterministic mode. The cache is
found again if flash_attn's sources and both versions are the same; the number of its .o files then stays as it is.
"""

import argparse
import importlib.util
import os
import pathlib
import sys

CELLS = pathlib.Path(__file__).resolve().parents[1] / "python/tessera/bench/cells.py"


class Context:
    """Of autograd, whose engine does not run without a GPU."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def set_materialize_grads(self, _):
        pass


def cells_module():
    spec = importlib.util.spec_from_file_location("cells", CELLS)
    module = sys.modules["cells"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", help="folder for the compiled kernels")
    parser.add_argument("--suite", default="odd,table,small,decode", help="default: %(default)s")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"), help="default: %(default)s")
    options = parser.parse_args()
    os.environ.update(FLASH_ATTENTION_ARCH="sm_90", CUTE_DSL_ARCH="sm_90a", FLASH_ATTENTION_NUM_SMS="132", QUACK_ARCH="90",
                      FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="1",
                      FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=str(pathlib.Path(options.cache).resolve()))
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.cuda.current_device = lambda: 0  # the deterministic backward's counters are asked for it
    function = interface.FlashAttnFunc
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[options.dtype]

    class Recorder:
        @staticmethod
        def apply(*arguments):
            Recorder.context = Context()
            return function.forward(Recorder.context, *arguments)

    interface.FlashAttnFunc = Recorder

    def compile_forward(cell, grad, deterministic=False):
        tensors = [torch.empty(shape, device="cuda", dtype=dtype) for shape in (cell.q_shape, cell.k_shape, cell.v_shape)]
        if grad:
            tensors = [t.detach().requires_grad_() for t in tensors]
        with torch.set_grad_enabled(grad):
            interface.flash_attn_func(*tensors, causal=cell.causal, deterministic=deterministic)

    def compile_backward(cell, deterministic):
        compile_forward(cell, True, deterministic)
        with torch.no_grad():
            function.backward(Recorder.context, torch.empty(cell.out_shape, device="cuda", dtype=dtype), None)

    cells = cells_module()
    todo = [(cell, op) for suite in options.suite.split(",") for cell in cells.suite(suite, options.dtype) for op in cell.ops]
    failed = 0
    for done, (cell, op) in enumerate(todo, 1):
        print(f"{done}/{len(todo)} {op} {cell.name}", flush=True)
        for deterministic in (False, True) if op == "backward" else (False,):
            try:
                with FakeTensorMode():
                    compile_backward(cell, deterministic) if op == "backward" else compile_forward(cell, False)
            except Exception as error:  # whatever its compiler says: the others are still of use
                failed += 1
                print(f"  {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
    made = len(list(pathlib.Path(options.cache).rglob("*.o")))
    print(f"{made} kernels in {options.cache}" + (f", {failed} calls failed" if failed else ""))
    return 1 if failed or not made else 0


if __name__ == "__main__":
    sys.exit(main())
