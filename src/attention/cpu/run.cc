#include "attention/cpu/run.h"

#include <algorithm>
#include <new>

#include "attention/cpu/common.h"

namespace tessera::cpu {

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
