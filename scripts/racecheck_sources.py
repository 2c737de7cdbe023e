#!/usr/bin/env python3
"""racecheck_sources.py DIR [synccheck]: writes a copy of kernels/ whose synchronisation compute-sanitizer's racecheck, or
synccheck, understands.

racecheck reports hazards that are none for two ways to synchronise warps (tests/sanitizer/handover.cu shows both), and
synccheck errors that are none for a third. The copy replaces them by ways that the tool understands, and that order no
less:

- bar.arrive by some warps and bar.sync by others, in the portable backward: all of them use bar.sync. Every warp
  reaches these barriers in the same order, so there is no deadlock. The dV warps then also wait for the dK warps, which
  orders their later accesses to a tile after the dK warps' earlier ones: a race between just these is not found, all
  others are.
- One lane that arrives at an mbarrier for its warp, in the Hopper backwards: every lane arrives. A word that all lanes of
  a warp write alike, each before it reads it, is written by one of them.
- bar.sync of one barrier at two places of the code, each for whole warps, in the narrow MLP: at one place, in a function
  that both call. This alone is in synccheck's copy.
"""

import pathlib
import shutil
import sys

from break_kernels import ROOT, Misfit, apply
from mutations import BACKWARD, NARROW, SM90_BACKWARD, SM90_DETERMINISTIC, WIDE_BACKWARD, Mutation

EXCHANGE = "    named_barrier_sync(kExchange, 256);\n"

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
    Mutation("one lane writes for its warp", "attention/backward_sm90_dq.cuh",
             (("    store_shared_8(shared + kAt.dq_rows + warp * 8, {static_cast<unsigned>(rows), "
               "static_cast<unsigned>(rows >> 32)});\n",
               "    if (lane == 0) store_shared_8(shared + kAt.dq_rows + warp * 8, {static_cast<unsigned>(rows), "
               "static_cast<unsigned>(rows >> 32)}); __syncwarp();\n"),), SM90_DETERMINISTIC),
    Mutation("every lane arrives", "attention/backward_wide_sm90_consumer.cuh",
             (("    if (is_first) mbarrier_arrive(shared + barriers", "    mbarrier_arrive(shared + barriers"),),
             WIDE_BACKWARD),
    Mutation("every lane arrives", "attention/backward_wide_sm90_dq.cuh",
             (("if (lane == 0) mbarrier_arrive(", "mbarrier_arrive("),), WIDE_BACKWARD),
    Mutation("mbarriers expect every lane", "attention/backward_wide_sm90.cuh",
             (("constexpr unsigned kArrivals = 1;", "constexpr unsigned kArrivals = 32;"),), WIDE_BACKWARD),
)
ONE_PLACE = Mutation("bar.sync at one place", "mlp/narrow_sm90.cuh",
                     (("template <MlpNarrowSm90Config config>\nstruct MlpNarrowSm90Consumer {\n",
                       "__noinline__ void exchange_barrier() { named_barrier_sync(3, 256); } "
                       "template <MlpNarrowSm90Config config>\nstruct MlpNarrowSm90Consumer {\n"),
                      ("(int tile) {\n" + EXCHANGE, "(int tile) {\n    exchange_barrier();\n"),
                      (EXCHANGE + "    const int row", "    exchange_barrier();\n    const int row")), NARROW)


def main(folder, tool="racecheck"):
    shutil.copytree(ROOT / "kernels", folder)
    for change in (*(CHANGES if tool == "racecheck" else ()), ONE_PLACE):
        apply(change, folder)
        print(f"{change.file}: {change.name}")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["synccheck"]):
        sys.exit(__doc__)
    try:
        main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
    except (Misfit, OSError) as problem:
        sys.exit(f"error: {problem}")
