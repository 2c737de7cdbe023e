#!/usr/bin/env python3
"""racecheck_sources.py DIR: a copy of kernels/ for compute-sanitizer's racecheck, which does not follow bar.arrive.

racecheck takes what is handed over by bar.arrive and bar.sync for a race (tests/sanitizer/handover.cu shows it). In the
copy, those who would arrive and go on wait too: bar.sync. Every warp of the portable backward comes to these barriers in
the same order, so none waits for ever. The dV warps then also wait for the dK warps, which orders their later accesses
of a tile after the dK warps' earlier ones: a race of just these is not found, all others are.
"""

import shutil
import sys

from break_kernels import BACKWARD, ROOT, Misfit, Mutation, apply

WAITS = Mutation("backward_waits_where_it_arrives", "attention/backward.cuh",
                 (("    barrier_arrive(1 + strip, kThreads);\n", "    barrier_wait(1 + strip, kThreads);\n"),), BACKWARD)


def main(folder):
    shutil.copytree(ROOT / "kernels", folder)
    apply(WAITS, folder)
    print(f"{WAITS.file}: bar.arrive is bar.sync")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1])
    except (Misfit, OSError) as problem:
        sys.exit(f"error: {problem}")
