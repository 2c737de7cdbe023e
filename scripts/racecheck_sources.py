#!/usr/bin/env python3
"""racecheck_sources.py DIR: a copy of kernels/ that compute-sanitizer's racecheck can follow.

racecheck takes two ways of handing over for races, though they are none (tests/sanitizer/handover.cu shows both). In
the copy they are ways that it follows, and that order no less:

- bar.arrive and bar.sync, in the portable backward: those who would arrive and go on wait too. Every warp comes to
  these barriers in the same order, so none waits for ever. The dV warps then also wait for the dK warps, which orders
  their later accesses of a tile after the dK warps' earlier ones: a race of just these is not found, all others are.
- One lane that arrives at an mbarrier for its warp, in the Hopper backward: all lanes arrive.
"""

import shutil
import sys

from break_kernels import BACKWARD, ROOT, SM90_BACKWARD, Misfit, Mutation, apply

CHANGES = (
    Mutation("bar.arrive is bar.sync", "attention/backward.cuh",
             (("    barrier_arrive(1 + strip, kThreads);\n", "    barrier_wait(1 + strip, kThreads);\n"),), BACKWARD),
    Mutation("every lane arrives for itself", "attention/backward_sm90.cuh",
             (("    if (is_first) barrier_arrive(shared + barriers", "    barrier_arrive(shared + barriers"),
              ("barrier_init(shared + kAt.empty + i * kBarrierBytes, kWarps);",
               "barrier_init(shared + kAt.empty + i * kBarrierBytes, kWarps * 32);"),
              ("barrier_init(shared + kAt.ds_full + i * kBarrierBytes, kWarps);",
               "barrier_init(shared + kAt.ds_full + i * kBarrierBytes, kWarps * 32);")), SM90_BACKWARD),
)


def main(folder):
    shutil.copytree(ROOT / "kernels", folder)
    for change in CHANGES:
        apply(change, folder)
        print(f"{change.file}: {change.name}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except (Misfit, OSError) as problem:
        sys.exit(f"error: {problem}")
