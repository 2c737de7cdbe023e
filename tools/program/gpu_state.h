// Clocks, power and temperature of a GPU, from NVML: figures without them cannot be compared.
#pragma once

#include <optional>

#include "program/console.h"

namespace tessera::tools {

struct GpuState {
  unsigned sm_mhz = 0, memory_mhz = 0;
  double watts = 0;
  unsigned celsius = 0;
};

// Nothing if NVML is not present or does not answer. index: NVML's own order.
std::optional<GpuState> gpu_state(int index);
Json json_of(const GpuState& state);

}  // namespace tessera::tools
