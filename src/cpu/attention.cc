#include "cpu/attention.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "cpu/common.h"

namespace tessera::cpu {

int default_threads() {
  if (const char* text = std::getenv("TESSERA_NUM_THREADS")) {
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && value >= 1 && value <= 1024) return static_cast<int>(value);
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return 1;
}

std::size_t workspace_bytes(const AttentionProblem& problem, int threads) {
  const TileOps* ops = ops_for(problem.dtype);
  if (ops == nullptr) return 0;
  threads = std::max(threads, 1);
  switch (problem.op) {
    case AttentionOp::kForward:
      return forward_workspace(*ops, problem, threads);
    case AttentionOp::kBackward:
      return backward_workspace(*ops, problem, threads);
    case AttentionOp::kDecode:
      return decode_workspace(*ops, problem, threads);
  }
  return 0;
}

Status run(const AttentionArgs& args, int threads, void* workspace) {
  const TileOps* ops = ops_for(args.problem.dtype);
  if (ops == nullptr) return {TESSERA_UNSUPPORTED, "the CPU backend needs an x86-64 CPU with SSE4.2"};
  threads = std::max(threads, 1);
  try {
    switch (args.problem.op) {
      case AttentionOp::kForward:
        forward(*ops, args, threads, workspace);
        break;
      case AttentionOp::kBackward:
        backward(*ops, args, threads, workspace);
        break;
      case AttentionOp::kDecode:
        decode(*ops, args, threads, workspace);
        break;
    }
  } catch (const std::bad_alloc&) {
    return {TESSERA_OUT_OF_MEMORY, "out of memory in the CPU backend"};
  }
  return {};
}

std::string isa_name() {
  std::string name = name_of(detect_isa());
  if (detect_bf16_isa() != Bf16Isa::kNone) name += std::string(" + ") + name_of(detect_bf16_isa());
  return name;
}

}  // namespace tessera::cpu
