// The sum of what the CTAs of a loss have summed, in a fixed order, by one CTA. Entry point: loss_sum_partials, below.
#pragma once

#include "loss/gmm_nll_config.h"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <LossSumPartialsConfig config>
__forceinline__ void loss_sum_partials(const LossSumPartialsParams& p) {
  constexpr int kWarps = config.threads / 32;
  __shared__ float sums[kWarps];
  pdl_wait_and_launch_dependents();
  float sum = 0;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < p.count; i += config.threads) sum += p.partial[i];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int i = 1; i < kWarps; ++i) sum += sums[i];
  p.out[0] = sum;
}

}  // namespace tessera
