// Attention on the CPU: forward, backward and decode. The caller has checked the arguments; attention/problem.h says
// what they mean. Results do not depend on timing: for a given thread count they are bitwise equal from run to run.
#pragma once

#include <cstddef>
#include <string>

#include "attention/problem.h"
#include "base/status.h"

namespace tessera::cpu {

// Scratch that run() needs for this problem on this many threads; linear in the sequence.
std::size_t workspace_bytes(const AttentionProblem& problem, int threads);

// Forward, backward or decode, as args.problem.op says. Returns when the result is complete.
Status run(const AttentionArgs& args, int threads, void* workspace);

// What run-time dispatch chose, e.g. "avx512 + amx-bf16".
std::string isa_name();

}  // namespace tessera::cpu
