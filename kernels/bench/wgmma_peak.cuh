// The peak rate of wgmma when the SM does nothing else: products of 64 x 256 x 16 on operands that stay in shared memory, two
// warpgroups per CTA. `tessera bench` compares Hopper's kernels with it; operands are those of bench/mma_peak.cuh.
#pragma once

#include "bench/mma_peak_config.h"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace tessera {

template <MmaPeakConfig config>
__forceinline__ void wgmma_peak(const MmaPeakParams& params) {
  extern __shared__ __align__(1024) unsigned words[];  // A [2][64, 64], B [256, 64]: rows of 128 bytes, swizzled
  constexpr unsigned kExponent = config.dtype == DType::kFloat16 ? 0x1c001c00u : 0x3b803b80u;
  constexpr unsigned kFraction = config.dtype == DType::kFloat16 ? 0x83ff83ffu : 0x807f807fu;
  for (unsigned i = threadIdx.x; i < kWgmmaPeakSharedBytes / 4; i += kWgmmaPeakThreads) {
    const unsigned state = (params.pattern + i * 0x9e3779b9u) * 1664525u + 1013904223u;
    words[i] = kExponent | ((state ^ (state >> 16)) & kFraction);
  }
  fence_proxy_async();
  __syncthreads();
  const unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(words));
  const MatrixDescriptor a = matrix_descriptor<64>(shared + threadIdx.x / 128 * kWgmmaPeakTileBytes, 0);
  const MatrixDescriptor b = matrix_descriptor<64>(shared + kWgmmaPeakThreads / 128 * kWgmmaPeakTileBytes, 0);
  float d[128] = {};
  for (int n = 0; n < params.iterations; ++n) {
    wgmma_fence();
#pragma unroll
    for (unsigned step = 0; step < 4; ++step) {
      Wgmma<256>::shared_shared<config.dtype, false>(d, a.at(step * 32), b.at(step * 32), true);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();
  }
  wgmma_wait_group<0>();
  wgmma_fence_operand(d);
  float sum = 0;
#pragma unroll
  for (const float value : d) sum += value;
  if (sum == 1.0e30f) *params.out = sum;
}

}  // namespace tessera
