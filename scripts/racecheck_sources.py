#!/usr/bin/env python3
"""racecheck_sources.py DIR: writes a copy of kernels/ whose synchronisation compute-sanitizer's racecheck understands.

racecheck reports hazards that are none for two ways to synchronise warps (tests/sanitizer/handover.cu shows both). The
copy replaces them by ways that the tool understands, and that order no less:

- bar.arrive by some warps and bar.sync by others, in the portable backward: all of them use bar.sync. Every warp
  reaches these barriers in the same order, so there is no deadlock. The dV warps then also wait for the dK warps, which
  orders their later accesses to a tile after the dK warps' earlier ones: a race between just these is not found, all
  others are. Likewise for the turns of the narrow MLP's consumers, within a row tile: after it, they wait for each other
  anyway.
- One lane that arrives at an mbarrier for its warp, in the Hopper backwards: every lane arrives, at every CTA of a
  cluster. A word that all lanes of a warp write alike, each before it reads it, is written by one of them.

Also, no grid starts before the preceding one has ended (PDL): the tool sometimes lost track of launches, and hung.
"""

import pathlib
import shutil
import sys

from break_kernels import ROOT, Misfit, apply
from mutations import (BACKWARD, NARROW, SM90_BACKWARD, SM90_DETERMINISTIC, WIDE_BACKWARD,
                       Mutation)

STAGE = "shared + barriers + place<stages>(step).stage * kMbarrierBytes"

CHANGES = (
    Mutation("grids do not overlap", "ptx/griddepcontrol.cuh",
             (('  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");\n', "\n"),), BACKWARD),
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
    Mutation("one lane writes for its warp", "attention/backward_sm90_dq.cuh",
             (("    store_shared_8(shared + kAt.dq_rows + warp * 8, {static_cast<unsigned>(rows), "
               "static_cast<unsigned>(rows >> 32)});\n",
               "    if (lane == 0) store_shared_8(shared + kAt.dq_rows + warp * 8, {static_cast<unsigned>(rows), "
               "static_cast<unsigned>(rows >> 32)}); __syncwarp();\n"),), SM90_DETERMINISTIC),
    Mutation("every lane arrives", "attention/backward_wide_sm90_consumer.cuh",
             (("    if (is_first) mbarrier_arrive(shared + barriers", "    mbarrier_arrive(shared + barriers"),
              ("      if (own_lane < config.cluster) {\n", "      for (unsigned to = 0; to < config.cluster; ++to) {\n"),
              ("mbarrier_arrive_at(" + STAGE + ", own_lane);",
               "to == blockIdx.x % 2 ? mbarrier_arrive(" + STAGE + ") : mbarrier_arrive_at(" + STAGE + ", to);"),
              ("      if (this->is_first) {\n        const unsigned full",
               "      if (!this->is_first) this->template arrive<config.ds_stages>(kAt.ds_full, at); else {\n"
               "        const unsigned full")), WIDE_BACKWARD),
    Mutation("every lane arrives", "attention/backward_wide_sm90_dq.cuh",
             (("if (lane == 0) mbarrier_arrive(", "mbarrier_arrive("),
              ("if (lane < config.cluster) mbarrier_arrive_at(empty, lane);",
               "for (unsigned to = 0; to < config.cluster; ++to) "
               "to == blockIdx.x % 2 ? mbarrier_arrive(empty) : mbarrier_arrive_at(empty, to);")), WIDE_BACKWARD),
    Mutation("mbarriers expect every lane", "attention/backward_wide_sm90.cuh",
             (("constexpr unsigned kArrivals = 1;", "constexpr unsigned kArrivals = 32;"),), WIDE_BACKWARD),
    Mutation("bar.arrive is bar.sync", "mlp/narrow_sm90.cuh",
             (("  unsigned x_parity = 0, down_parity = 0;\n",
               "  unsigned x_parity = 0, down_parity = 0; mutable int turns = 0;  // of the row tile\n"),
              ("    named_barrier_sync(kTurn + consumer, 256);\n",
               "    if (turns++ > 0) named_barrier_sync(kTurn + consumer, 256);\n"),
              ("    named_barrier_arrive(kTurn + 1 - consumer, 256);\n",
               "    if (turns < p.hidden_tiles) named_barrier_sync(kTurn + 1 - consumer, 256);\n"),
              ("  __forceinline__ void exchange() const {\n", "  __forceinline__ void exchange() const { turns = 0;\n"),
              ("    if (consumer == 1) named_barrier_arrive(kTurn, 256);", "    "),
              ("    pipe.parity ^= stages / config.stages & 1;\n",
               "    ++turns; pipe.parity ^= stages / config.stages & 1;\n")), NARROW),
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
        main(pathlib.Path(sys.argv[1]))
    except (Misfit, OSError) as problem:
        sys.exit(f"error: {problem}")
