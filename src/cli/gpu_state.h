// Clocks, power and temperature of a GPU, asked of NVML: a figure without them cannot be compared.
#pragma once

#include <optional>

#include "cli/console.h"

namespace tessera::cli {

struct GpuState {
  unsigned sm_mhz = 0, memory_mhz = 0;
  double watts = 0;
  unsigned celsius = 0;
};

// Nothing where NVML is not there or does not answer. index: NVML's own order.
std::optional<GpuState> gpu_state(int index);
Json json_of(const GpuState& state);

}  // namespace tessera::cli
