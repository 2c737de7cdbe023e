// Losses on the CPU. The caller has checked the arguments; loss/problem.h says what they mean. Results do not depend on the
// number of threads.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "loss/problem.h"

namespace tessera::loss::cpu_backend {

// Scratch that run() needs on this many threads.
std::size_t workspace_bytes(const LossProblem& problem, int threads);

// Returns when the result is complete.
Status run(const LossArgs& args, int threads, void* workspace);

}  // namespace tessera::loss::cpu_backend
