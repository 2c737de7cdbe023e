#include "engine/device.h"

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
  int compute = 0;
  const auto number = arch.starts_with("sm_") ? arch.substr(3) : std::string_view();
  const auto digits = number.ends_with('a') ? number.substr(0, number.size() - 1) : number;
  std::from_chars(digits.data(), digits.data() + digits.size(), compute);
  const ArchLimits limits = limits_of(compute);
  // The letter enables instructions that only this architecture has; of those known here, only sm_90 has it.
  const bool known = limits.arch != 0 && arch == format("sm_{}{}", compute, number == digits ? "" : "a") &&
                     (number == digits || compute == 90);
  if (!known) {
    return Status(TESSERA_INVALID_ARGUMENT,
                  format("arch is '{}'; cpu, sm_75, sm_80, sm_86, sm_89, sm_90 and sm_90a are known", arch));
  }
  Device device;
  device.kind = Device::Kind::kCuda;
  device.name = arch;
  device.compute = compute;
  device.specific = number != digits;
  device.shared_memory_per_block = static_cast<std::size_t>(limits.shared_memory_per_block);
  return device;
}

}  // namespace tessera::engine
