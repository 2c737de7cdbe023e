// The parts of the portable backward's host file (backward.cc) that tests use.
#pragma once

#include <cstddef>
#include <vector>

#include "attention/backward_config.h"
#include "attention/backward_dq_config.h"
#include "attention/problem.h"
#include "base/status.h"

namespace tessera::attention {

struct BackwardConfigs {
  AttentionBackwardConfig main;
  BackwardDqConfig dq;  // if main does not add dQ up itself
};
// The large tile first, then one for few queries.
std::vector<BackwardConfigs> backward_configs(int compute, DType dtype, int dim_qk, int dim_v, int vector, bool masked,
                                              bool score_mod, bool deterministic);

// Bytes for delta, LSE and dQ's sums; TESSERA_UNSUPPORTED if that is beyond what can be addressed, or one of the kernels
// would need more CTAs than a grid has.
Result<std::size_t> backward_workspace(const AttentionProblem& problem, const BackwardConfigs& configs);

}  // namespace tessera::attention
