// The parts of the Hopper forward's host file (forward_sm90.cc) that tests use.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/atom_boxes.h"
#include "attention/forward_sm90_config.h"
#include "attention/problem.h"
#include "base/status.h"
#include "cuda/kernel.h"

namespace tessera::attention {

// Q, K and V as boxes that TMA loads; if paged, also single rows of K and V.
struct ForwardSm90Boxes {
  AtomBoxes q, k, v, k_rows, v_rows;
};

// Pure. The caller still has to make the tensor maps from the boxes. TESSERA_UNSUPPORTED if one grid cannot cover the
// problem.
Result<ForwardSm90Boxes> forward_sm90_boxes(const AttentionArgs& args, const AttentionForwardSm90Config& config);
Result<cuda::Work<AttentionForwardSm90Params>> forward_sm90_work(const AttentionArgs& args,
                                                                 const AttentionForwardSm90Config& config,
                                                                 int multiprocessors);

// Whether the query heads of a key head can be the rows of the Config's tiles.
bool can_pack_gqa(const AttentionProblem& problem, const AttentionForwardSm90Config& config);

// The tiles that are offered, without packed GQA. longest: queries or keys of the longest sequence; short ones have
// tiles of their own.
std::vector<AttentionForwardSm90Config> forward_sm90_configs(DType dtype, int dim_qk, int dim_v, bool masked,
                                                             bool score_mod, std::int64_t longest = kUnbounded);

}  // namespace tessera::attention
