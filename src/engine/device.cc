#include "engine/device.h"

#include <algorithm>
#include <charconv>

#include "base/arch.h"
#include "base/format.h"

namespace tessera::engine {

Device cpu_device(int threads) {
  Device device;
  device.kind = Device::Kind::kCpu;
  device.name = format("cpu, {} thread{}", threads, threads == 1 ? "" : "s");
  device.threads = threads;
  return device;
}

Result<Device> cuda_device(std::string_view arch) {
  const std::vector<std::string> known = arch_names();
  if (std::find(known.begin(), known.end(), arch) == known.end()) {
    return Status(TESSERA_INVALID_ARGUMENT, format("arch is '{}'; cpu, {} are known", arch, join(known, ", ")));
  }
  Device device;
  device.kind = Device::Kind::kCuda;
  device.name = arch;
  std::from_chars(arch.data() + 3, arch.data() + arch.size(), device.compute);
  device.specific = arch.ends_with('a');
  device.shared_memory_per_block = static_cast<std::size_t>(limits_of(device.compute).shared_memory_per_block);
  return device;
}

}  // namespace tessera::engine
