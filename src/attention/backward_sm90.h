// The parts of the Hopper backward's host file (backward_sm90.cc) that tests use.
#pragma once

#include <cstddef>
#include <vector>

#include "attention/atom_boxes.h"
#include "attention/backward_sm90_config.h"
#include "attention/problem.h"
#include "base/status.h"
#include "cuda/kernel.h"

namespace tessera::attention {

struct BackwardSm90Boxes {
  AtomBoxes q, d_o, k, v;
};

// Pure. The caller still has to make the tensor maps from the boxes and set the buffers. part_heads: only if the Config
// splits groups.
Result<BackwardSm90Boxes> backward_sm90_boxes(const AttentionArgs& args, const AttentionBackwardSm90Config& config);
Result<cuda::Work<AttentionBackwardSm90Params>> backward_sm90_work(const AttentionArgs& args,
                                                                   const AttentionBackwardSm90Config& config,
                                                                   int part_heads = 0);

// None if a head dim is above 128. seq_k: of the longest sequence; if few, one CTA has all keys.
std::vector<AttentionBackwardSm90Config> backward_sm90_configs(DType dtype, int dim_qk, int dim_v, bool masked,
                                                               bool deterministic, std::int64_t seq_k,
                                                               bool score_mod = false);

// Bytes for delta, LSE, the sums of dQ and, if groups are split, of dK and dV, and, if deterministic, the turns;
// TESSERA_UNSUPPORTED if that is beyond what can be addressed, or one of the kernels would need more CTAs than a grid
// has.
// sliced_tiles: key tiles whose queries are divided.
Result<std::size_t> backward_sm90_workspace(const AttentionProblem& problem, const AttentionBackwardSm90Config& config,
                                            std::int64_t sliced_tiles = 0);

}  // namespace tessera::attention
