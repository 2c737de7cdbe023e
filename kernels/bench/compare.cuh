// How an output differs from one that the oracle has judged, element by element. `tessera bench --evidence` runs it after
// every timed call: the output never leaves the device, and is NaN again before the next call.
#pragma once

#include "bench/compare_config.h"
#include "ptx/convert.cuh"

namespace tessera {

template <DType dtype>
struct Compared {
  using Bits = Bits16;
  static __forceinline__ float value(Bits bits) { return to_float<dtype>(bits); }
};
template <>
struct Compared<DType::kFloat32> {
  using Bits = unsigned;
  static __forceinline__ float value(Bits bits) { return float_from_bits(bits); }
};

template <CompareConfig config>
__forceinline__ void compare(const CompareParams& params) {
  using Element = Compared<config.dtype>;
  using Bits = typename Element::Bits;
  auto* const got = static_cast<Bits*>(params.got);
  const auto* const wanted = static_cast<const Bits*>(params.wanted);
  unsigned long long differing = 0;
  float largest = 0;
  for (long long i = blockIdx.x * static_cast<long long>(kCompareThreads) + threadIdx.x; i < params.elements;
       i += static_cast<long long>(gridDim.x) * kCompareThreads) {
    const Bits a = got[i], b = wanted[i];
    got[i] = static_cast<Bits>(~Bits{0});
    if (a == b) continue;
    ++differing;
    const float difference = fabsf(Element::value(a) - Element::value(b));
    largest = difference <= largest ? largest : difference == difference ? difference : infinity();
  }
  if (differing == 0) return;
  atomicAdd(&params.tally->differing, differing);
  atomicMax(&params.tally->largest, bits_from_float(largest));
}

}  // namespace tessera
