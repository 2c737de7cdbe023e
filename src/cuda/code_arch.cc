#include "cuda/code_arch.h"

#include <algorithm>
#include <cstdlib>

#include "base/arch.h"
#include "base/format.h"
#include "jit/nvrtc.h"

namespace tessera::cuda {
namespace {

constexpr const char* kSpecific = "sm_90a";
constexpr int kKnownToEveryCompiler = 90;  // since CUDA 12.0, the oldest that is used

// Compute capability times ten, without architecture-specific features; kOwn: each device's own architecture.
constexpr int kOwn = -1;
constexpr int kNotSet = 0;
thread_local int chosen = kNotSet;

// 0: the architecture is not known.
int compute_of(const std::string& arch) {
  for (const ArchLimits& limits : kArchLimits) {
    if (arch == format("sm_{}", limits.arch)) return limits.arch;
  }
  return 0;
}

CodeArch native_arch(const DeviceInfo& device) {
  const std::string arch = arch_of(device);
  const int compute = 10 * device.major + device.minor;
  const CodeArch native{{arch, false},
                        compute,
                        true,
                        arch.ends_with('a'),
                        static_cast<std::size_t>(device.shared_memory_per_block_optin)};
  if (compute <= kKnownToEveryCompiler) return native;
  const auto archs_of = [](const Result<jit::NvrtcInfo>& nvrtc) {
    return nvrtc.ok() ? nvrtc->archs : std::vector<int>{};
  };
  if (portable_arch(compute, archs_of(jit::nvrtc_info())) == compute) return native;
  CodeArch portable = native;
  portable.target = {format("sm_{}", portable_arch(compute, archs_of(jit::nvrtc_info(true)))), true};
  return portable;
}

CodeArch arch_at(const DeviceInfo& device, int compute) {
  const int limit = std::min(limits_of(compute).shared_memory_per_block, device.shared_memory_per_block_optin);
  const bool older = compute != 10 * device.major + device.minor;
  return {{format("sm_{}", compute), older}, compute, false, false, static_cast<std::size_t>(limit)};
}

}  // namespace

Status check_arch_name(const std::string& arch) {
  if (arch == "native" || arch == kSpecific || compute_of(arch) != 0) return {};
  return {TESSERA_INVALID_ARGUMENT,
          format("no code is known for '{}'; native, {} are accepted", arch, join(arch_names(), ", "))};
}

Result<CodeArch> code_arch_for(const DeviceInfo& device, const std::string& arch) {
  if (Status s = check_arch_name(arch); !s.ok()) return s;
  if (arch == "native" || arch == arch_of(device)) return native_arch(device);
  const int compute = compute_of(arch);
  if (arch == kSpecific || compute > 10 * device.major + device.minor) {
    return Status(TESSERA_INVALID_ARGUMENT,
                  format("{} code does not run on {}, which is {}", arch, device.name, arch_of(device)));
  }
  return arch_at(device, compute);
}

void set_code_arch(const CodeArch& arch) { chosen = arch.own ? kOwn : arch.compute; }

const std::string& code_arch_in_environment() {
  static const std::string asked = [] {
    const char* const text = std::getenv("TESSERA_CODE_ARCH");
    return std::string(text != nullptr && *text != '\0' ? text : "native");
  }();
  return asked;
}

Result<CodeArch> code_arch_of(const DeviceInfo& device) {
  const std::string& asked = code_arch_in_environment();
  const int compute = chosen;
  if (compute == kOwn || (compute == kNotSet && asked == "native")) return native_arch(device);
  if (compute != kNotSet) return arch_at(device, compute);
  Result<CodeArch> arch = code_arch_for(device, asked);
  if (!arch.ok()) return Status(arch.status().code(), format("TESSERA_CODE_ARCH: {}", arch.status().message()));
  return arch;
}

}  // namespace tessera::cuda
