// Device code as the host's compiler takes it.
#pragma once

#include <string>

namespace tessera::emulated {

// A header of kernels/ that is not below ptx/: without the functions whose bodies are instructions (ptx/ here has them), and with
// variables in shared memory at addresses of the emulated CTA.
std::string host_source(const std::string& text);

}  // namespace tessera::emulated
