#include "cuda/code_arch.h"

#include <algorithm>
#include <atomic>

#include "contract/arch.h"
#include "ops/format.h"

namespace tessera::cuda {
namespace {

std::atomic<int> chosen{0};  // compute capability times ten; 0: each device's own

// As arch_of spells it.
std::string name_of(int compute) { return format("sm_{}{}", compute, compute == 90 ? "a" : ""); }

// 0: no such architecture.
int compute_of(const std::string& arch) {
  for (const ArchLimits& limits : kArchLimits) {
    if (arch == name_of(limits.arch)) return limits.arch;
  }
  return 0;
}

CodeArch native_arch(const DeviceInfo& device) {
  return {{arch_of(device), false},
          10 * device.major + device.minor,
          static_cast<std::size_t>(device.shared_memory_per_block_optin)};
}

CodeArch arch_at(const DeviceInfo& device, int compute) {
  if (compute == 10 * device.major + device.minor) return native_arch(device);
  const int limit = std::min(limits_of(compute).shared_memory_per_block, device.shared_memory_per_block_optin);
  return {{name_of(compute), true}, compute, static_cast<std::size_t>(limit)};
}

}  // namespace

Status check_arch_name(const std::string& arch) {
  if (arch == "native" || compute_of(arch) != 0) return {};
  std::string known = "native";
  for (const ArchLimits& limits : kArchLimits) known += ", " + name_of(limits.arch);
  return {TESSERA_INVALID_ARGUMENT, format("no code is known for '{}'; {} are accepted", arch, known)};
}

Result<CodeArch> code_arch_for(const DeviceInfo& device, const std::string& arch) {
  if (Status s = check_arch_name(arch); !s.ok()) return s;
  if (arch == "native") return native_arch(device);
  const int compute = compute_of(arch);
  const int own = 10 * device.major + device.minor;
  // sm_90a's PTX runs on 9.0 alone.
  if (compute > own || (arch.ends_with('a') && compute != own)) {
    return Status(TESSERA_INVALID_ARGUMENT,
                  format("{} code does not run on {}, which is {}", arch, device.name, arch_of(device)));
  }
  return arch_at(device, compute);
}

void set_code_arch(const CodeArch& arch) { chosen.store(arch.target.ptx ? arch.compute : 0); }

CodeArch code_arch_of(const DeviceInfo& device) {
  const int compute = chosen.load(std::memory_order_relaxed);
  return compute == 0 ? native_arch(device) : arch_at(device, compute);
}

}  // namespace tessera::cuda
