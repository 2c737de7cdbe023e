#include "attention/backward_steps.h"

#include <algorithm>
#include <climits>

#include "attention/backward_preprocess.h"
#include "attention/gpu.h"
#include "attention/params.h"

namespace tessera::attention {
namespace {

// A step that does not depend on sequences' ends sees packed sequences as one batch.
std::int64_t batches(const AttentionProblem& p) { return p.varlen ? 1 : p.batch; }
std::int64_t rows_per_head(const AttentionProblem& p) { return p.varlen ? p.total_q : p.seq_q; }

// Rows of dQ's sums, per head. If packed, every sequence starts at a multiple of block_q.
std::int64_t sum_rows(const AttentionProblem& p, int block_q) {
  if (!p.varlen) return ceil_div(p.seq_q, block_q) * block_q;
  return padded_start(p.total_q, p.batch, block_q);
}

// Offsets in the workspace, in bytes.
struct Workspace {
  std::int64_t delta;     // float [B, Hq, Sq]
  std::int64_t lse_log2;  // likewise
  std::int64_t sums;
  std::int64_t turns;         // unsigned [rows of the sums / block_q], if they are added in a fixed order
  std::int64_t zeroed_bytes;  // from the sums on
  std::int64_t bytes;         // LLONG_MAX if the sizes overflow
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
    return {0, 0, 0, 0, 0, LLONG_MAX};
  }
  Workspace at = {};
  at.lse_log2 = at.delta + aligned(rows * kFloat);
  at.sums = at.lse_log2 + aligned(rows * kFloat);
  at.turns = at.sums + sums * kFloat;
  at.zeroed_bytes = sums * kFloat;
  if (p.deterministic && block_q > 0) {
    at.zeroed_bytes += ceil_div(sums / p.dim_qk / block_q * static_cast<std::int64_t>(sizeof(unsigned)), 16) * 16;
  }
  at.bytes = at.sums + aligned(at.zeroed_bytes);
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
          p.deterministic && block_q > 0 ? reinterpret_cast<unsigned*>(place(at.turns)) : nullptr,
          at.zeroed_bytes};
}

bool fits_a_grid(std::int64_t tiles, const AttentionProblem& problem, std::int64_t heads) {
  return saturating_product(tiles, problem.batch, heads) <= INT_MAX;
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
  preprocess.zeroed_bytes = buffers.zeroed_bytes;
  const auto work = preprocess_work(preprocess, preprocess_config(p.dtype, vector_of(p)));
  if (!work.ok()) return work.status();
  return cuda::launch(kernel, *work, stream);
}

double predicted_backward_time(const AttentionProblem& p, const engine::Device& device, double rows, double relative) {
  constexpr double kSteps = 6.0;           // the launches other than the main one
  constexpr double kOfForwardRate = 0.38;  // five products instead of two, and dQ's sums
  const double masked = p.causal && p.seq_q == p.seq_k ? 0.5 : 1.0;
  const auto at_least_one = [](std::int64_t size) { return static_cast<double>(std::max<std::int64_t>(size, 1)); };
  const double scores =
      std::max(rows, 1.0) * at_least_one(p.seq_k) * masked * at_least_one(p.batch) * at_least_one(p.heads_q);
  const double rate = portable_rate(device) * kOfForwardRate * 64.0 /
                      static_cast<double>(std::max<std::int64_t>({p.dim_qk, p.dim_v, 1}));
  return kSteps + scores / (rate * relative);
}

}  // namespace tessera::attention
