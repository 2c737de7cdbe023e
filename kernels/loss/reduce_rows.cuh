// The sum of rows' losses, or the mean over those whose target is a class (0 if there are none), in a fixed order, by one CTA.
// Entry point: loss_reduce_rows, below.
#pragma once

#include "loss/cross_entropy_config.h"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <LossReduceRowsConfig config>
__forceinline__ void loss_reduce_rows(const LossReduceRowsParams& p) {
  constexpr int kWarps = config.threads / 32;
  __shared__ float sums[kWarps];
  __shared__ int counts[kWarps];
  pdl_wait_and_launch_dependents();
  float sum = 0;
  int count = 0;
#pragma unroll 4
  for (Index row = threadIdx.x; row < p.rows; row += config.threads) {
    sum += p.losses[row];
    count += p.target[row] >= 0 && p.target[row] < p.classes ? 1 : 0;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(~0u, sum, step);
    count += __shfl_xor_sync(~0u, count, step);
  }
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = sum;
    counts[threadIdx.x / 32] = count;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int i = 1; i < kWarps; ++i) {
    sum += sums[i];
    count += counts[i];
  }
  p.out[0] = p.mean ? sum / static_cast<float>(max(count, 1)) : sum;
}

}  // namespace tessera
