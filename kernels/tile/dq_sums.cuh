// The fp32 sums of dQ in global memory (layout: attention/backward_config.h), and a warp's part of dQ += dS K.
#pragma once

#include "attention/backward_config.h"
#include "ptx/mma.cuh"
#include "tile/shared_tile.cuh"

namespace tessera {

// Index of a lane's value i within a 16 x 8 tile. A warp's instruction adds 128 contiguous bytes, or 512 if it takes
// four values per lane.
__forceinline__ int sum_index(int lane, int i) {
#if __CUDA_ARCH__ >= 900
  return lane * 4 + i;
#else
  return i * 32 + lane;
#endif
}

__forceinline__ void add_to_sums(float* tile, const float (&d)[4], int lane) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(tile + sum_index(lane, 0)), "f"(d[0]),
               "f"(d[1]), "f"(d[2]), "f"(d[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(tile + sum_index(lane, i)), "f"(d[i]) : "memory");
  }
#endif
}

__forceinline__ void load_sums(float (&d)[4], const float* tile, int lane) {
#if __CUDA_ARCH__ >= 900
  const Words4 words = load_streaming_16(tile + sum_index(lane, 0), true);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = float_from_bits(words.word[i]);
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = load_read_only(tile + sum_index(lane, i), true);
#endif
}

// The sums of row 0 of a sequence.
__forceinline__ float* dq_sums_of(const DqSums& sums, const int* cu_seqlens, int batch, int head, int heads,
                                  int block_q, int dim) {
  const Index row = cu_seqlens ? head * sums.rows + padded_start(cu_seqlens[batch], batch, block_q)
                               : (static_cast<Index>(batch) * heads + head) * sums.rows;
  return sums.data + row * dim;
}

// How the warps of a CTA divide [block_q, dim]: into groups of rows and, if those are fewer than the warps, groups of
// columns. The choice minimises the products of the busiest warp, then the loads.
struct DqSplit {
  int row_tiles;   // per warp
  int row_groups;  // of warps
  int columns;     // tiles of 8 columns per warp
  int at_once;     // of these, as many as fit in registers
};

constexpr DqSplit split_dq(int block_q, int dim, int warps) {
  DqSplit best = {};
  int best_cost = 1 << 30;
  for (const int row_tiles : {2, 1}) {
    const int row_groups = block_q / (16 * row_tiles);
    if (block_q % (16 * row_tiles) != 0 || row_groups > warps) continue;
    const int column_groups = warps / row_groups;
    const int columns = (dim / 8 + column_groups - 1) / column_groups;
    const int cost = row_tiles * columns * 8 + row_tiles + columns;
    if (cost >= best_cost) continue;
    best_cost = cost;
    const int passes = (row_tiles * columns + 7) / 8;
    best = {row_tiles, row_groups, columns, (columns + passes - 1) / passes};
  }
  return best;
}

// d = dS K for `columns` tiles of columns, added to the sums in global memory. ds: [keys, queries].
// exact: every warp has the full number of columns.
template <DType dtype, int row_tiles, int columns, bool exact, int unroll, class TileDs, class TileK>
__forceinline__ void add_dq_columns(const TileDs& ds, const TileK& k, float* sums, int row_tile, int first, int lane) {
  constexpr int kAll = TileK::kChunks;
  float d[row_tiles][columns][4] = {};
#pragma unroll unroll
  for (int step = 0; step < TileDs::kRows / 16; ++step) {
    unsigned a[row_tiles][4];
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      ldmatrix_x4_trans(
          a[m], ds.address(lane % 8 + lane / 16 * 8, (row_tile + m) * 2 + lane / 8 % 2) + step * 16 * TileDs::kPitch);
    }
#pragma unroll
    for (int n = 0; n < columns; n += 2) {
      const bool last = n + 1 == columns;
      const int wanted = first + n + (last ? 0 : lane / 16);
      const int column = exact ? wanted : min(wanted, kAll - 1);  // beyond the last column, any valid address will do
      const unsigned from = k.address(lane % 16, column) + step * 16 * TileK::kPitch;
      if (last) {
        unsigned b[2];
        ldmatrix_x2_trans(b, from);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) mma_k16<dtype>(d[m][n], a[m], b[0], b[1]);
      } else {
        unsigned b[4];
        ldmatrix_x4_trans(b, from);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          mma_k16<dtype>(d[m][n], a[m], b[0], b[1]);
          mma_k16<dtype>(d[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int n = 0; n < columns; ++n) {
      if (exact || first + n < kAll) {
        add_to_sums(sums + ((row_tile + m) * kAll + first + n) * 128, d[m][n], lane);
      }
    }
  }
}

// A warp's part of dQ. sums: of row 0 of the tile.
template <DType dtype, int block_q, int warps, int unroll, class TileDs, class TileK>
__forceinline__ void add_dq(const TileDs& ds, const TileK& k, float* sums, int warp, int lane) {
  constexpr DqSplit kSplit = split_dq(block_q, TileK::kDim, warps);
  constexpr bool kExact = kSplit.columns * (warps / kSplit.row_groups) == TileK::kChunks;
  constexpr int kRest = kSplit.columns % kSplit.at_once;
  static_assert(kSplit.row_tiles > 0 && warps % kSplit.row_groups == 0);
  const int row_tile = warp % kSplit.row_groups * kSplit.row_tiles;
  const int begin = warp / kSplit.row_groups * kSplit.columns;
#pragma unroll
  for (int n = 0; n < kSplit.columns; n += kSplit.at_once) {
    if (!kExact && begin + n >= TileK::kChunks) return;
    if (n + kSplit.at_once <= kSplit.columns) {
      add_dq_columns<dtype, kSplit.row_tiles, kSplit.at_once, kExact, unroll>(ds, k, sums, row_tile, begin + n, lane);
    } else if constexpr (kRest > 0) {
      add_dq_columns<dtype, kSplit.row_tiles, kRest, kExact, unroll>(ds, k, sums, row_tile, begin + n, lane);
    }
  }
}

}  // namespace tessera
