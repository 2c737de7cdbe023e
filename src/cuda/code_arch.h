// Which architecture's code a device runs: its own, unless verify, bench or TESSERA_CODE_ARCH asks for an older one, to
// test on one GPU the code that others will run. The older code is compiled to PTX, and the selector sees the older
// limits. A GPU that is newer than the known architectures, or than the compiler, runs the PTX of the newest known one.
#pragma once

#include <cstddef>
#include <string>

#include "cuda/device.h"

namespace tessera::cuda {

struct CodeArch {
  jit::Target target;     // PTX if it is not the device's own architecture
  int compute = 0;        // 10 * major + minor: of the device, or of the architecture that was requested
  bool own = false;       // no architecture was requested
  bool specific = false;  // with architecture-specific instructions, as in sm_90a
  std::size_t shared_memory_per_block = 0;
};

// "native", or a name of base/arch.h; sm_90 excludes the kernels that are written for Hopper alone.
// TESSERA_INVALID_ARGUMENT for any other name and for an architecture that is newer than the device.
Result<CodeArch> code_arch_for(const DeviceInfo& device, const std::string& arch);
// OK if code_arch_for accepts this name for some device.
Status check_arch_name(const std::string& arch);

// For all devices, and for the calls that this thread makes: threads of one process can run different code. Set it
// before making plans: existing plans keep their candidate but load it for the new architecture. Not in the C ABI.
void set_code_arch(const CodeArch& arch);

// The value of TESSERA_CODE_ARCH, read once; "native" if it is not set.
const std::string& code_arch_in_environment();

// What applies to a device: what was set, else the environment's value.
Result<CodeArch> code_arch_of(const DeviceInfo& device);

}  // namespace tessera::cuda
