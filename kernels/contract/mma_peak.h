// Arguments of bench/mma_peak.cuh.
#pragma once

#include "contract/types.h"

namespace tessera {

struct MmaPeakConfig {
  DType dtype;
};

template <class Visitor>
constexpr void visit_fields(const MmaPeakConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
}

struct MmaPeakParams {
  float* out;  // one value; never written, but the compiler cannot know
  int iterations;
  unsigned pattern;
};

constexpr int kMmaPeakThreads = 256;
constexpr int kMmaPeakChains = 8;  // products in flight in a warp, none waiting for another
constexpr int kMmaPeakWarps = kMmaPeakThreads / 32;
// Multiplications and additions of one block's warps in one iteration.
constexpr double kMmaPeakFlops = 2.0 * 16 * 8 * 16 * kMmaPeakChains * kMmaPeakWarps;

}  // namespace tessera
