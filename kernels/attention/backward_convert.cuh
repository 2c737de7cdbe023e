// dQ = scale * sums, from fp32 tiles in the order of mma's accumulators to rows of the tensor; dK and dV likewise if
// CTAs share them. Memory-bound: 6 bytes per element.
//
// A warp converts four adjacent tiles of 16 x 8. Each lane reads the values that it would hold as an mma accumulator,
// so that the warp reads full cache lines. The four lanes of a quad then hold two rows of all four tiles between them,
// and exchange values so that each lane has two rows of one tile, 16 bytes each, to write.
#pragma once

#include "attention/backward_convert_config.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/dq_sums.cuh"
#include "tile/quad.cuh"
#include "tile/sequence.cuh"

namespace tessera {

template <BackwardConvertConfig config>
__forceinline__ void backward_convert(const BackwardConvertParams& p) {
  pdl_wait_and_launch_dependents();
  const unsigned batch_head = blockIdx.x / p.blocks;
  const int head = batch_head % p.heads;
  const int batch = batch_head / p.heads;
  const int length = length_of(p.cu_seqlens, batch, p.seq);
  const int lane = threadIdx.x % 32;
  const unsigned groups = (p.chunks + kConvertTiles - 1) / kConvertTiles;  // of adjacent tiles in a row of tiles
  const unsigned item = blockIdx.x % p.blocks * (config.threads / 32) + threadIdx.x / 32;
  const int first_chunk = item % groups * kConvertTiles;
  const Index first_row = static_cast<Index>(item / groups) * 16;
  if (first_row >= length) return;

  const float* tiles = dq_sums_of(p.sums, p.cu_seqlens, batch, head, p.heads, p.block, p.chunks * 8) +
                       (first_row / 16 * p.chunks + first_chunk) * 128;
  float sums[kConvertTiles][4];
#pragma unroll
  for (int t = 0; t < kConvertTiles; ++t) {
    if (first_chunk + t < p.chunks) load_sums(sums[t], tiles + t * 128, lane);
  }
  unsigned rows[2][kConvertTiles];
#pragma unroll
  for (int t = 0; t < kConvertTiles; ++t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half][t] = pack<config.dtype>(sums[t][half * 2] * p.scale, sums[t][half * 2 + 1] * p.scale);
    }
  }
  const int chunk = first_chunk + lane % 4;
  Bits16* out = rows_of(p.out, p.strides, p.cu_seqlens, batch, head) + chunk * 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    transpose_quad(rows[half], lane);
    const Index row = first_row + half * 8 + lane / 4;
    if (row >= length || chunk >= p.chunks) continue;
    Bits16* to = out + row * p.strides.seq;
    if constexpr (config.vector == 8) {
      store_16(to, {rows[half][0], rows[half][1], rows[half][2], rows[half][3]});
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = static_cast<Bits16>(rows[half][i / 2] >> (i % 2 * 16));
    }
  }
}

}  // namespace tessera
