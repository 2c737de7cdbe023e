#!/usr/bin/env python3
"""delayed_sources.py DIR: writes a copy of kernels/ in which warps are late at random after every synchronisation.

A missing barrier or a stage that is released too early often gives right results, because on an idle GPU the warps that
should wait are late anyway. In the copy, each barrier, arrival and wait is followed by a sleep of up to 8 us for one warp
in two, so that the others overtake it. Kernels whose synchronisation is complete give the same results, only later:

    scripts/delayed_sources.py /tmp/delayed
    TESSERA_KERNEL_SOURCES=/tmp/delayed build/bin/tessera verify --device cuda --suite quick
"""

import pathlib
import re
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

DELAY = """#pragma once

namespace tessera {

__forceinline__ void delay_warp() {
  unsigned hash = (threadIdx.x / 32 + 1) * 0x9e3779b9u ^ (blockIdx.x + 1) * 0x85ebca6bu ^ clock() * 0xc2b2ae35u;
  hash ^= hash >> 15;
  hash *= 0x2c1b3c6du;
  hash ^= hash >> 12;
  if (hash & 1) __nanosleep(hash >> 19);
}

}  // namespace tessera
"""

# Functions of ptx/ after whose end a warp may be late, and __syncthreads wherever it is called.
FUNCTIONS = {"ptx/barrier.cuh": ("named_barrier_arrive", "named_barrier_sync"),
             "ptx/cluster.cuh": ("mbarrier_arrive_at",),
             "ptx/mbarrier.cuh": ("mbarrier_arrive", "mbarrier_arrive_expect_tx", "mbarrier_wait_parity")}


class Misfit(Exception):
    """A function is not there any more."""


def delay(folder):
    """Changes the sources below `folder`; returns how many places were."""
    folder = pathlib.Path(folder)
    places = 0
    for file in sorted(folder.rglob("*.cuh")):
        text = file.read_text()
        changed, found = re.subn(r"(?<!//)\b__syncthreads\(\);", "(__syncthreads(), delay_warp());", text)
        for function in FUNCTIONS.get(file.relative_to(folder).as_posix(), ()):
            changed, once = re.subn(rf"(?ms)^(__forceinline__ void {function}\(.*?)^}}$", r"\1  delay_warp();\n}", changed)
            if once != 1:
                raise Misfit(f"{file}: {function} is there {once} times, not once")
            found += once
        if found:
            file.write_text(changed.replace("#pragma once\n", '#pragma once\n\n#include "ptx/delay.cuh"\n', 1))
            places += found
    (folder / "ptx/delay.cuh").write_text(DELAY)
    return places


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        shutil.copytree(ROOT / "kernels", sys.argv[1])
        print(f"{delay(sys.argv[1])} places where warps are late")
    except (Misfit, OSError) as problem:
        sys.exit(f"error: {problem}")
