// Config and Params of bench/mma_peak.cuh and bench/wgmma_peak.cuh.
#pragma once

#include "tile/types.h"

namespace tessera {

struct MmaPeakConfig {
  DType dtype;
};

template <class Visitor>
constexpr void visit_fields(const MmaPeakConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
}

struct MmaPeakParams {
  float* out;  // one value; never written, but the compiler cannot prove it
  int iterations;
  unsigned pattern;
};

constexpr int kMmaPeakThreads = 256;
constexpr int kMmaPeakChains = 8;  // independent products in flight per warp
constexpr int kMmaPeakWarps = kMmaPeakThreads / 32;
// Multiplications and additions of one CTA in one iteration.
constexpr double kMmaPeakFlops = 2.0 * 16 * 8 * 16 * kMmaPeakChains * kMmaPeakWarps;

constexpr int kWgmmaPeakWarpgroups = 2;
constexpr int kWgmmaPeakThreads = 128 * kWgmmaPeakWarpgroups;
constexpr int kWgmmaPeakTileBytes = 64 * 64 * 2;  // of A; B has four times as many
constexpr int kWgmmaPeakSharedBytes = (kWgmmaPeakWarpgroups + 4) * kWgmmaPeakTileBytes;
constexpr double kWgmmaPeakFlops = 2.0 * 64 * 256 * 64 * kWgmmaPeakWarpgroups;  // as above

}  // namespace tessera
