// The workspace that every backward on a GPU has, its first step, and the predicted time of its main one.
#pragma once

#include <cstdint>

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
  unsigned* turns;            // [rows of the sums / block_q], only if deterministic: for adding in a fixed order
  std::int64_t zeroed_bytes;  // sums and turns
};

// block_q: of the main kernel, for dQ's sums; 0: there are none. Saturated if sizes overflow.
std::int64_t backward_bytes(const AttentionProblem& problem, int block_q);
BackwardBuffers backward_buffers(const AttentionProblem& problem, int block_q, void* workspace);

bool fits_a_grid(std::int64_t tiles, const AttentionProblem& problem, std::int64_t heads);

// Also zeroes dQ's sums and their turns.
Status enqueue_preprocess(const cuda::Kernel& kernel, const AttentionArgs& args, const BackwardBuffers& buffers,
                          cuda::CUstream stream);

// Microseconds, roughly, of a main kernel that computes `rows` query rows of each head, at a rate relative to that
// of the portable kernel's large tile.
double predicted_backward_time(const AttentionProblem& problem, const engine::Device& device, double rows,
                               double relative);

}  // namespace tessera::attention
