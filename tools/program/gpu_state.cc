#include "program/gpu_state.h"

#include <dlfcn.h>

namespace tessera::tools {
namespace {

// The part of nvml.h that is used; the library comes with the driver.
using Handle = struct NvmlDeviceTag*;
enum Clock { kSmClock = 1, kMemoryClock = 2 };

struct Nvml {
  int (*init)() = nullptr;
  int (*device)(unsigned, Handle*) = nullptr;
  int (*clock)(Handle, int, unsigned*) = nullptr;
  int (*power)(Handle, unsigned*) = nullptr;  // milliwatts
  int (*temperature)(Handle, int, unsigned*) = nullptr;
  bool usable = false;

  Nvml() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    usable = find("nvmlInit_v2", init) && find("nvmlDeviceGetHandleByIndex_v2", device) &&
             find("nvmlDeviceGetClockInfo", clock) && find("nvmlDeviceGetPowerUsage", power) &&
             find("nvmlDeviceGetTemperature", temperature) && init() == 0;
  }
};

}  // namespace

std::optional<GpuState> gpu_state(int index) {
  static const Nvml nvml;
  Handle handle = nullptr;
  if (!nvml.usable || nvml.device(static_cast<unsigned>(index), &handle) != 0) return std::nullopt;
  GpuState state;
  unsigned milliwatts = 0;
  if (nvml.clock(handle, kSmClock, &state.sm_mhz) != 0) return std::nullopt;
  nvml.clock(handle, kMemoryClock, &state.memory_mhz);
  if (nvml.power(handle, &milliwatts) == 0) state.watts = milliwatts / 1000.0;
  nvml.temperature(handle, 0, &state.celsius);
  return state;
}

Json json_of(const GpuState& state) {
  return {
      {"sm_mhz", state.sm_mhz}, {"memory_mhz", state.memory_mhz}, {"watts", state.watts}, {"celsius", state.celsius}};
}

}  // namespace tessera::tools
