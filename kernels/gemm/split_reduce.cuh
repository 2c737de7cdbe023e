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

template <GemmSplitReduceConfig config>
__forceinline__ void gemm_split_reduce(const GemmSplitReduceParams& p) {
  constexpr unsigned kUnroll = 4;
  pdl_wait_and_launch_dependents();
  const unsigned long long index = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int rows[2] = {static_cast<int>(index / p.column_pairs) * 2, static_cast<int>(index / p.column_pairs) * 2 + 1};
  const int column = static_cast<int>(index % p.column_pairs) * 2;
  if (rows[0] >= p.m) return;
  const Index second = rows[1] < p.m ? p.partial_stride : 0;  // a row that does not exist is not stored
  const float* from = p.partial + rows[0] * p.partial_stride + column;
  const Index to_next = p.m * p.partial_stride;
  float sums[4] = {};
#pragma unroll kUnroll
  for (unsigned split = 0; split < p.splits; ++split) {
    const float2 top = *reinterpret_cast<const float2*>(from);
    const float2 bottom = *reinterpret_cast<const float2*>(from + second);
    sums[0] += top.x, sums[1] += top.y, sums[2] += bottom.x, sums[3] += bottom.y;
    from += to_next;
  }
  GemmEpilogue<epilogue_of(config)>{p.epilogue, p.m, p.n}.apply(sums, sums, rows, column);
}

}  // namespace tessera
