// A quad: four adjacent lanes, which share the rows of an accumulator tile.
#pragma once

namespace tessera {

// Moves word j of lane i of a quad to word i of lane j.
__forceinline__ void transpose_quad(unsigned (&word)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const unsigned exchanged = __shfl_xor_sync(0xffffffffu, upper ? word[i] : word[i + step], step);
      (upper ? word[i] : word[i + step]) = exchanged;
    }
  }
}

}  // namespace tessera
