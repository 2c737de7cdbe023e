// The peak rate of mma.sync when the SM does nothing else: products of 16 x 8 x 16 on registers, eight independent
// chains per warp. `tessera bench` compares the kernels that use mma.sync with it.
//
// Operands are not zero, since power, and with it the clock, depends on how many bits toggle; they are small enough for
// the sums to stay finite.
#pragma once

#include "bench/mma_peak_config.h"
#include "ptx/mma.cuh"

namespace tessera {

template <MmaPeakConfig config>
__forceinline__ void mma_peak(const MmaPeakParams& params) {
  // Two 16-bit numbers per word: sign and fraction from a hash, and an exponent that makes them about 2^-8.
  constexpr unsigned kExponent = config.dtype == DType::kFloat16 ? 0x1c001c00u : 0x3b803b80u;
  constexpr unsigned kFraction = config.dtype == DType::kFloat16 ? 0x83ff83ffu : 0x807f807fu;
  unsigned state = params.pattern + threadIdx.x * 0x9e3779b9u;
  unsigned words[6 + kMmaPeakChains];
#pragma unroll
  for (unsigned& word : words) {
    state = state * 1664525u + 1013904223u;
    word = kExponent | ((state ^ (state >> 16)) & kFraction);
  }
  const unsigned a[4] = {words[0], words[1], words[2], words[3]};
  float d[kMmaPeakChains][4] = {};
  for (int n = 0; n < params.iterations; ++n) {
#pragma unroll
    for (int chain = 0; chain < kMmaPeakChains; ++chain) {
      mma_k16<config.dtype>(d[chain], a, words[4 + chain % 2], words[6 + chain]);
    }
  }
  float sum = 0;
#pragma unroll
  for (int chain = 0; chain < kMmaPeakChains; ++chain) sum += d[chain][0] + d[chain][1] + d[chain][2] + d[chain][3];
  if (sum == 1.0e30f) *params.out = sum;
}

}  // namespace tessera
