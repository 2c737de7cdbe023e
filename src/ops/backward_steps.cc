#include "ops/backward_steps.h"

#include <climits>

#include "ops/extents.h"
#include "ops/preprocess.h"
#include "select/kernels.h"

namespace tessera {
namespace {

// Packed sequences are one batch to whatever does not ask where they end.
std::int64_t batches(const AttentionProblem& p) { return p.varlen ? 1 : p.batch; }
std::int64_t rows_per_head(const AttentionProblem& p) { return p.varlen ? p.total_q : p.seq_q; }

// Of dQ's sums, per head. Packed, every sequence starts at a multiple of block_q.
std::int64_t sum_rows(const AttentionProblem& p, int block_q) {
  if (!p.varlen) return ceil_div(p.seq_q, block_q) * block_q;
  return padded_start(p.total_q, p.batch, block_q);
}

// Where things are in the workspace, in bytes.
struct Workspace {
  std::int64_t delta;     // float [B, Hq, Sq]
  std::int64_t lse_log2;  // likewise
  std::int64_t sums;
  std::int64_t sum_bytes;
  std::int64_t bytes;  // beyond all reason where the sizes overflow
};

Workspace workspace_of(const AttentionProblem& p, int block_q) {
  constexpr std::int64_t kAlignment = 256;
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  const auto aligned = [](std::int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; };
  const std::int64_t rows = saturating_product(batches(p), p.heads_q, rows_per_head(p));
  const std::int64_t sums =
      block_q > 0 ? saturating_product(saturating_product(batches(p), p.heads_q, sum_rows(p, block_q)), p.dim_qk, 1)
                  : 0;
  if (saturating_product(rows, 4 * kFloat, 1) > LLONG_MAX / 4 || saturating_product(sums, kFloat, 1) > LLONG_MAX / 4) {
    return {0, 0, 0, 0, LLONG_MAX};
  }
  Workspace at = {};
  at.lse_log2 = at.delta + aligned(rows * kFloat);
  at.sums = at.lse_log2 + aligned(rows * kFloat);
  at.sum_bytes = sums * kFloat;
  at.bytes = at.sums + aligned(at.sum_bytes);
  return at;
}

}  // namespace

std::int64_t backward_bytes(const AttentionProblem& problem, int block_q) {
  return workspace_of(problem, block_q).bytes;
}

BackwardBuffers backward_buffers(const AttentionProblem& p, int block_q, void* workspace) {
  const Workspace at = workspace_of(p, block_q);
  const auto place = [&](std::int64_t offset) {
    return reinterpret_cast<float*>(static_cast<char*>(workspace) + offset);
  };
  const std::int64_t rows = rows_per_head(p);
  const std::int64_t batch_stride = p.varlen ? 0 : p.heads_q * rows;
  return {{place(at.delta), batch_stride, rows},
          {place(at.lse_log2), batch_stride, rows},
          {place(at.sums), block_q > 0 ? sum_rows(p, block_q) : 0},
          at.sum_bytes};
}

bool fits_a_grid(std::int64_t tiles, const AttentionProblem& problem, std::int64_t heads) {
  return saturating_product(tiles, problem.batch, heads) <= INT_MAX;
}

std::int64_t convert_tiles(const AttentionProblem& p) {
  const std::int64_t warps = ceil_div(p.seq_q, 16) * ceil_div(p.dim_qk / 8, kConvertTiles);
  return ceil_div(warps, select::convert_config(p.dtype, 8).threads / 32);
}

Status enqueue_preprocess(const cuda::Kernel& kernel, const AttentionArgs& args, const BackwardBuffers& buffers,
                          cuda::CUstream stream) {
  const AttentionProblem& p = args.problem;
  PreprocessArgs preprocess;
  preprocess.dtype = p.dtype;
  preprocess.batch = batches(p);
  preprocess.seq = rows_per_head(p);
  preprocess.heads = p.heads_q;
  preprocess.head_dim = p.dim_v;
  preprocess.o = args.o;
  preprocess.d_o = args.d_o;
  preprocess.lse = args.lse;
  preprocess.d_lse = args.d_lse;
  preprocess.delta = buffers.delta;
  preprocess.lse_log2 = buffers.lse_log2;
  preprocess.zeroed = buffers.sums.data;
  preprocess.zeroed_bytes = buffers.sum_bytes;
  const auto work = preprocess_work(preprocess, select::preprocess_config(p.dtype, p.vectors ? 8 : 1));
  if (!work.ok()) return work.status();
  return cuda::launch(kernel, *work, stream);
}

Status enqueue_convert(const cuda::Kernel& kernel, const AttentionArgs& args, const DqSums& sums, int block_q,
                       cuda::CUstream stream) {
  const AttentionProblem& p = args.problem;
  const std::int64_t blocks = convert_tiles(p);
  BackwardConvertParams params = {};
  params.dq_sums = sums;
  params.dq = args.dq.data;
  params.cu_seqlens_q = args.cu_seqlens_q;
  params.dq_strides = strides_of(args.dq);
  params.seq_q = static_cast<int>(p.seq_q);
  params.block_q = block_q;
  params.heads = static_cast<unsigned>(p.heads_q);
  params.chunks = static_cast<unsigned>(p.dim_qk / 8);
  params.blocks = static_cast<unsigned>(blocks);
  params.scale = p.scale;
  const cuda::Grid grid{static_cast<unsigned>(blocks * p.batch * p.heads_q), 1, 1};
  return cuda::launch(kernel, cuda::Work<BackwardConvertParams>{params, grid}, stream);
}

}  // namespace tessera
