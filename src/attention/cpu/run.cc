#include "attention/cpu/run.h"

#include <algorithm>
#include <new>

#include "attention/cpu/common.h"

namespace tessera::cpu {
namespace {

// Packed queries: each sequence by itself.
AttentionProblem one_sequence(AttentionProblem p, std::int64_t queries) {
  p.batch = 1;
  p.seq_q = queries;
  p.varlen = false;
  p.total_q = 0;
  return p;
}

void decode_packed(const TileOps& ops, const AttentionArgs& args, int threads, void* workspace) {
  const std::int32_t row_of_batch[] = {0};  // of a view that begins there
  for (std::int64_t b = 0; b < args.problem.batch; ++b) {
    const std::int64_t first = args.cu_seqlens_q[b], queries = args.cu_seqlens_q[b + 1] - first;
    if (queries == 0) {
      if (args.status != nullptr) args.status[b] = 0;
      continue;
    }
    AttentionArgs one = args;
    one.problem = one_sequence(args.problem, queries);
    one.cu_seqlens_q = nullptr;
    const DType dtype = args.problem.dtype;
    one.q.data = element(args.q, dtype, 0, first, 0);
    one.o.data = element(args.o, dtype, 0, first, 0);
    if (args.lse.data != nullptr) one.lse.data = args.lse.data + first;
    if (args.alibi_slopes != nullptr) one.alibi_slopes += b * args.alibi_batch_stride;
    if (args.cache_seqlens != nullptr) one.cache_seqlens += b;
    if (args.leftpad_k != nullptr) one.leftpad_k += b;
    if (args.status != nullptr) one.status += b;
    const std::int64_t row = args.cache_batch_idx != nullptr ? args.cache_batch_idx[b] : b;
    if (args.problem.fp8_cache && !(has_key_scales(args.problem) && args.problem.paged)) {
      const std::int64_t of_scales = has_key_scales(args.problem) ? row : b;
      one.k_scale.data += of_scales * args.k_scale.batch_stride;
      one.v_scale.data += of_scales * args.v_scale.batch_stride;
    }
    if (args.problem.paged) {
      one.page_table += b * args.page_table_stride;
    } else {
      const auto cache_row = [&](const TensorView& cache) -> void* {
        if (!args.problem.fp8_cache) return element(cache, dtype, row, 0, 0);
        return static_cast<char*>(cache.data) + row * cache.batch_stride;
      };
      one.k.data = cache_row(args.k);
      one.v.data = cache_row(args.v);
      one.cache_batch_idx = row_of_batch;
    }
    decode(ops, one, threads, workspace);
  }
}

const TileOps* ops_of(const AttentionProblem& p) { return ops_for(has_key_scales(p) ? DType::kFloat32 : p.dtype); }

}  // namespace

std::size_t workspace_bytes(const AttentionProblem& problem, int threads) {
  const TileOps* ops = ops_of(problem);
  if (ops == nullptr) return 0;
  threads = std::max(threads, 1);
  switch (problem.op) {
    case AttentionOp::kForward:
      return problem.fp8 || problem.rounds_to_fp8 ? fp8_workspace(problem, threads)
                                                  : forward_workspace(*ops, problem, threads);
    case AttentionOp::kBackward:
      return backward_workspace(*ops, problem, threads);
    case AttentionOp::kDecode:
      if (!problem.varlen) return decode_workspace(*ops, problem, threads);
      // Fewer queries have fewer blocks of rows, but shorter and so more stretches of keys. With b blocks of 64 rows
      // there are at most b (Sk / (512 (b - 1)) + 1) partial results: three times those of the longest sequence.
      return 3 * decode_workspace(*ops, one_sequence(problem, problem.seq_q), threads);
  }
  return 0;
}

Status run(const AttentionArgs& args, int threads, void* workspace) {
  const TileOps* ops = ops_of(args.problem);
  if (ops == nullptr) return {TESSERA_UNSUPPORTED, "the CPU backend needs an x86-64 CPU with SSE4.2"};
  threads = std::max(threads, 1);
  try {
    switch (args.problem.op) {
      case AttentionOp::kForward:
        args.problem.fp8 || args.problem.rounds_to_fp8 ? forward_fp8(args, threads, workspace)
                                                       : forward(*ops, args, args.problem.dtype, threads, workspace);
        break;
      case AttentionOp::kBackward:
        backward(*ops, args, threads, workspace);
        break;
      case AttentionOp::kDecode:
        args.problem.varlen ? decode_packed(*ops, args, threads, workspace) : decode(*ops, args, threads, workspace);
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
