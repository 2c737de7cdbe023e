// Attention on the CPU: forward, backward and decode. Arguments are checked by the caller; see ops/attention.h for what
// they mean. Results do not depend on timing: for a given thread count they are bitwise equal from run to run.
#pragma once

#include <cstddef>
#include <string>

#include "ops/attention.h"
#include "ops/status.h"

namespace tessera::cpu {

// TESSERA_NUM_THREADS, else the cores in the affinity mask.
int default_threads();

// Scratch that run() needs for this problem on this many threads; linear in the sequence.
std::size_t workspace_bytes(const AttentionProblem& problem, int threads);

// Forward, backward or decode, as args.problem.op says. Returns when the result is there.
Status run(const AttentionArgs& args, int threads, void* workspace);

// What run-time dispatch chose, e.g. "avx512 + amx-bf16".
std::string isa_name();

}  // namespace tessera::cpu
