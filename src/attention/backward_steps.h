// The workspace that every backward on a GPU has, its first step, and the predicted time of its main one.
#pragma once

#include <cstdint>
#include <string>

#include "attention/backward_config.h"
#include "attention/problem.h"
#include "base/status.h"
#include "cuda/kernel.h"
#include "engine/device.h"

namespace tessera::attention {

// Buffers in the workspace.
struct BackwardBuffers {
  RowView delta;     // [B, Hq, Sq]
  RowView lse_log2;  // likewise
  DqSums sums;
  DqSums dk_sums;             // of the same layout, only if CTAs share dK and dV
  DqSums dv_sums;             // likewise
  unsigned* turns;            // [rows of the sums / block_q], only if deterministic: for adding in a fixed order
  std::int64_t zeroed_bytes;  // sums and turns
};

// block_q, block_k: of the main kernel, for the sums of dQ and of dK and dV; 0: there are none. Saturated if sizes
// overflow.
std::int64_t backward_bytes(const AttentionProblem& problem, int block_q, int block_k = 0);
BackwardBuffers backward_buffers(const AttentionProblem& problem, int block_q, int block_k, void* workspace);

bool fits_a_grid(std::int64_t tiles, const AttentionProblem& problem, std::int64_t heads);

// Also zeroes the sums and their turns.
Status enqueue_preprocess(const cuda::Kernel& kernel, const AttentionArgs& args, const BackwardBuffers& buffers,
                          cuda::CUstream stream);

// Microseconds, roughly, of a main kernel that computes `rows` query rows of each head, at a rate relative to that
// of the portable kernel's large tile.
double predicted_backward_time(const AttentionProblem& problem, const engine::Device& device, double rows,
                               double relative);

// How the query heads of a key head are divided among CTAs: the best of the divisions into two parts or more.
struct GroupSplit {
  int part_heads = 0;        // query heads of a CTA
  double relative_time = 1;  // predicted; 1 is the time without a division
};
std::string split_text(const GroupSplit& split);  // for an offer: empty without a division
// block_q, block_k: of the main kernel, one of whose CTAs fits an SM. missing: how much longer its steps take if the heads
// in flight are twice what fits the L2 cache.
GroupSplit split_group(const AttentionProblem& problem, const engine::Device& device, int block_q, int block_k,
                       double missing);

}  // namespace tessera::attention
