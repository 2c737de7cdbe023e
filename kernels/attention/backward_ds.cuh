// dS^T in shared memory, [keys, 64 queries], as the Hopper backwards' dQ warpgroups read it.
#pragma once

#include "ptx/shared.cuh"
#include "tile/tensor_map.h"

namespace tessera {

// dS of a warp's 16 queries and the first 16 `steps` keys, as wgmma's A operand. In shared memory its rows are keys, so each
// 8 x 8 is transposed: matrix 1 of the operand is queries 8 to 15, matrix 2 is keys 8 to 15.
template <int steps>
__forceinline__ void keep_ds(unsigned (&kept)[steps][4], unsigned tile, int lane, int warp) {
  const int key = lane % 8 + lane / 16 * 8;
  const int chunk = warp * 2 + lane / 8 % 2;
  const unsigned from = tile + key * kAtomRowBytes + ((chunk ^ (key % 8)) * 16);
#pragma unroll
  for (int step = 0; step < steps; ++step) ldmatrix_x4_trans(kept[step], from + step * 16 * kAtomRowBytes);
}

}  // namespace tessera
