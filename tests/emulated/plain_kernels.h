// Attention as a plain loop over what a kernel's Params describe: bf16, heads side by side. For tests in which a launch must be
// quick and its result right, but nobody asks how the kernel computes it.
#pragma once

#include "cuda/driver.h"

namespace tessera::emulated {

using Compute = void (*)(const cuda::LaunchConfig& config, const void* params);

// Of the kernel with this entry point; null if there is none.
Compute plain_kernel(const char* name);

}  // namespace tessera::emulated
