#!/usr/bin/env python3
"""racecheck_sources.py DIR: writes a copy of kernels/ whose synchronisation compute-sanitizer's racecheck understands.

racecheck reports hazards that are none for two ways to synchronise warps (tests/sanitizer/handover.cu shows both). The
copy replaces them by ways that racecheck understands, and that order no less:

- bar.arrive by some warps and bar.sync by others, in the portable backward: all of them use bar.sync. Every warp
  reaches these barriers in the same order, so there is no deadlock. The dV warps then also wait for the dK warps, which
  orders their later accesses to a tile after the dK warps' earlier ones: a race between just these is not found, all
  others are.
- One lane that arrives at an mbarrier for its warp, in the Hopper backwards: every lane arrives.
"""

import shutil
import sys

from break_kernels import ROOT, Misfit, apply
from mutations import BACKWARD, SM90_BACKWARD, WIDE_BACKWARD, Mutation

CHANGES = (
    Mutation("bar.arrive is bar.sync", "attention/backward.cuh",
             (("    named_barrier_arrive(1 + strip, kThreads);\n", "    named_barrier_sync(1 + strip, kThreads);\n"),),
             BACKWARD),
    Mutation("every lane arrives", "attention/backward_sm90_consumer.cuh",
             (("    if (elect_one()) mbarrier_arrive(shared + barriers", "    mbarrier_arrive(shared + barriers"),),
             SM90_BACKWARD),
    Mutation("mbarriers expect every lane", "attention/backward_sm90.cuh",
             (("mbarrier_init(shared + kAt.empty + i * kMbarrierBytes, kWarps);",
               "mbarrier_init(shared + kAt.empty + i * kMbarrierBytes, kWarps * 32);"),
              ("mbarrier_init(shared + kAt.ds_full + i * kMbarrierBytes, kWarps);",
               "mbarrier_init(shared + kAt.ds_full + i * kMbarrierBytes, kWarps * 32);")), SM90_BACKWARD),
    Mutation("every lane arrives", "attention/backward_wide_sm90_consumer.cuh",
             (("    if (is_first) mbarrier_arrive(shared + barriers", "    mbarrier_arrive(shared + barriers"),),
             WIDE_BACKWARD),
    Mutation("every lane arrives", "attention/backward_wide_sm90_dq.cuh",
             (("if (lane == 0) mbarrier_arrive(", "mbarrier_arrive("),), WIDE_BACKWARD),
    Mutation("mbarriers expect every lane", "attention/backward_wide_sm90.cuh",
             (("constexpr unsigned kArrivals = 1;", "constexpr unsigned kArrivals = 32;"),), WIDE_BACKWARD),
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
