// What a backward that adds dQ up in fp32 has before and after its main kernel, whichever that is.
#pragma once

#include <cstdint>

#include "contract/attention_backward.h"
#include "cuda/kernel.h"
#include "ops/attention.h"
#include "ops/status.h"

namespace tessera {

// In a workspace.
struct BackwardBuffers {
  RowView delta;     // [B, Hq, Sq]
  RowView lse_log2;  // likewise
  DqSums sums;
  std::int64_t sum_bytes;
};

// block_q: of the main kernel, for dQ's sums; 0: there are none. The largest number where sizes overflow.
std::int64_t backward_bytes(const AttentionProblem& problem, int block_q);
BackwardBuffers backward_buffers(const AttentionProblem& problem, int block_q, void* workspace);

bool fits_a_grid(std::int64_t tiles, const AttentionProblem& problem, std::int64_t heads);
// Blocks of backward_convert.cuh, for each head of each sequence.
std::int64_t convert_tiles(const AttentionProblem& problem);

// Zeroes the sums, too.
Status enqueue_preprocess(const cuda::Kernel& kernel, const AttentionArgs& args, const BackwardBuffers& buffers,
                          cuda::CUstream stream);
Status enqueue_convert(const cuda::Kernel& kernel, const AttentionArgs& args, const DqSums& sums, int block_q,
                       cuda::CUstream stream);

}  // namespace tessera
