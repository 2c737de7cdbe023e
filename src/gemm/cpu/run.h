// GEMM on the CPU. The caller has checked the arguments; gemm/problem.h says what they mean. Results do not depend on
// the number of threads.
#pragma once

#include <cstddef>

#include "base/status.h"
#include "gemm/problem.h"

namespace tessera::gemm::cpu_backend {

// Scratch that run() needs on this many threads.
std::size_t workspace_bytes(const GemmProblem& problem, int threads);

// Returns when the result is complete.
Status run(const GemmArgs& args, int threads, void* workspace);

}  // namespace tessera::gemm::cpu_backend
