// The second step of a split-K GEMM: sums the partial results in the order of the splits and applies the epilogue. Entry
// point: gemm_split_reduce, below.
//
// A thread computes two adjacent columns of two adjacent rows. The partial sums were just written and are mostly in L2;
// the loads of several splits are in flight at a time.
#pragma once

#include "gemm/epilogue.cuh"
#include "gemm/split_reduce_config.h"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

// Of the transposed product. Lanes read columns of it, which are rows of out, and write columns of out: a tile is turned in
// shared memory.
template <GemmSplitReduceConfig config>
__forceinline__ void gemm_split_reduce_transposed(const GemmSplitReduceParams& p) {
  constexpr int kTile = kReduceTile, kWarps = kReduceThreads / 32, kEach = kTile / kWarps;
  static_assert(kTile == 32 && kReduceThreads * 4 == kTile * kTile);
  __shared__ float tile[kTile][kTile + 1];  // [column][row]
  pdl_wait_and_launch_dependents();
  const int first_row = static_cast<int>(blockIdx.x / p.column_pairs) * kTile;
  const int first_column = static_cast<int>(blockIdx.x % p.column_pairs) * kTile;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  // What does not exist is not stored; it is read as what does.
  const int row = min(first_row + lane, p.m - 1);
  float sums[kEach] = {};
#pragma unroll 3
  for (unsigned split = 0; split < p.splits; ++split) {
    const float* from = p.partial + p.first[split] + row;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      sums[i] += from[min(first_column + warp + i * kWarps, p.n - 1) * p.partial_stride];
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) tile[warp + i * kWarps][lane] = sums[i];
  __syncthreads();
  const int x = static_cast<int>(threadIdx.x) % (kTile / 2) * 2, y = static_cast<int>(threadIdx.x) / (kTile / 2) * 2;
  float values[4] = {tile[x][y], tile[x + 1][y], tile[x][y + 1], tile[x + 1][y + 1]};
  const int rows[2] = {first_row + y, first_row + y + 1};
  GemmEpilogue<epilogue_of(config)>{p.epilogue, p.m, p.n}.apply(values, values, rows, first_column + x);
}

template <GemmSplitReduceConfig config>
__forceinline__ void gemm_split_reduce(const GemmSplitReduceParams& p) {
  constexpr unsigned kUnroll = 6;
  if constexpr (config.transposed) {
    gemm_split_reduce_transposed<config>(p);
    return;
  }
  pdl_wait_and_launch_dependents();
  const unsigned long long index = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int rows[2] = {static_cast<int>(index / p.column_pairs) * 2, static_cast<int>(index / p.column_pairs) * 2 + 1};
  const int column = static_cast<int>(index % p.column_pairs) * 2;
  if (rows[0] >= p.m) return;
  const Index second = rows[1] < p.m ? p.partial_stride : 0;  // a row that does not exist is not stored
  const float* own = p.partial + rows[0] * p.partial_stride + column;
  float sums[4] = {};
#pragma unroll kUnroll
  for (unsigned split = 0; split < p.splits; ++split) {
    const float* from = own + p.first[split];
    if constexpr (config.shifted) {
      sums[0] += from[0], sums[1] += from[1], sums[2] += from[second], sums[3] += from[second + 1];
    } else {
      const float2 top = *reinterpret_cast<const float2*>(from);
      const float2 bottom = *reinterpret_cast<const float2*>(from + second);
      sums[0] += top.x, sums[1] += top.y, sums[2] += bottom.x, sums[3] += bottom.y;
    }
  }
  GemmEpilogue<epilogue_of(config)>{p.epilogue, p.m, p.n}.apply(sums, sums, rows, column);
}

}  // namespace tessera
