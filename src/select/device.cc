#include "select/device.h"

#include <fmt/format.h>

namespace tessera::select {
namespace {

struct Arch {
  const char* name;
  int compute;
  std::size_t shared_memory_per_block;
};

constexpr std::size_t kKiB = 1024;
constexpr Arch kArchs[] = {
    {"sm_75", 75, 64 * kKiB}, {"sm_80", 80, 163 * kKiB}, {"sm_86", 86, 99 * kKiB},
    {"sm_89", 89, 99 * kKiB}, {"sm_90", 90, 227 * kKiB}, {"sm_90a", 90, 227 * kKiB},
};

}  // namespace

Device cpu_device(int threads) {
  Device device;
  device.kind = Device::Kind::kCpu;
  device.name = fmt::format("cpu, {} thread{}", threads, threads == 1 ? "" : "s");
  device.threads = threads;
  return device;
}

Result<Device> cuda_device(std::string_view arch) {
  for (const Arch& known : kArchs) {
    if (arch != known.name) continue;
    Device device;
    device.kind = Device::Kind::kCuda;
    device.name = known.name;
    device.compute = known.compute;
    device.shared_memory_per_block = known.shared_memory_per_block;
    return device;
  }
  return Status(TESSERA_INVALID_ARGUMENT,
                fmt::format("arch is '{}'; cpu, sm_75, sm_80, sm_86, sm_89, sm_90 and sm_90a are known", arch));
}

}  // namespace tessera::select
