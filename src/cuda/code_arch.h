// Which architecture's code a device runs: its own, unless verify, bench or TESSERA_CODE_ARCH ask for an older one's,
// to prove on one GPU what others will run. The older code travels as PTX, and the selector sees the older limits.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/device.h"

namespace tessera::cuda {

struct CodeArch {
  jit::Target target;     // PTX where it is not the device's own architecture
  int compute = 0;        // 10 * major + minor
  bool own = false;       // the device's own, not one that was asked for
  bool specific = false;  // with the instructions that this architecture alone has, as in sm_90a
  std::size_t shared_memory_per_block = 0;
};

// "native", or "sm_75" ... "sm_90", "sm_90a"; sm_90 is what runs where no kernel is made for Hopper alone.
// TESSERA_INVALID_ARGUMENT for another spelling and for an architecture that is newer than the device.
Result<CodeArch> code_arch_for(const DeviceInfo& device, const std::string& arch);
// Is it a spelling that some device could take?
Status check_arch_name(const std::string& arch);

// Process-wide, for all devices; plans made before keep their choice but load for the new one, so it is set first. Not
// in the C ABI.
void set_code_arch(const CodeArch& arch);

// What TESSERA_CODE_ARCH says, read once; "native" where it says nothing.
const std::string& code_arch_in_environment();

// What is in force for a device: what was set, else what the environment says.
Result<CodeArch> code_arch_of(const DeviceInfo& device);

}  // namespace tessera::cuda
