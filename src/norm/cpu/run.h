// Norms and rotary embedding on the CPU. The caller has checked the arguments; norm/problem.h says what they mean. Results
// do not depend on the number of threads.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "norm/problem.h"

namespace tessera::norm::cpu_backend {

// Scratch that run() needs on this many threads.
std::size_t workspace_bytes(const NormProblem& problem, int threads);

// Returns when the result is complete.
Status run(const NormArgs& args, int threads, void* workspace);

}  // namespace tessera::norm::cpu_backend
