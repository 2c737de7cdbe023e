// Config and shared-memory size of attention/backward_dq.cuh; its Params are those of backward_config.h.
#pragma once

#include "attention/backward_config.h"

namespace tessera {

// A CTA owns block_q queries and loops over the keys.
struct BackwardDqConfig {
  DType dtype;
  int dim_qk;
  int dim_v;
  int block_q;
  int block_k;
  int warps;   // each owns block_q / warps queries, 16 or 32
  int stages;  // of K and V
  int ctas_per_sm;
  int vector;
  bool masked;
  bool score_mod;
};

template <class Visitor>
constexpr void visit_fields(const BackwardDqConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("block_q", config.block_q);
  visit("block_k", config.block_k);
  visit("warps", config.warps);
  visit("stages", config.stages);
  visit("ctas_per_sm", config.ctas_per_sm);
  visit("vector", config.vector);
  visit("masked", config.masked);
  visit("score_mod", config.score_mod);
}

constexpr int backward_dq_shared_bytes(const BackwardDqConfig& config) {
  return 2 * (config.block_q + config.stages * config.block_k) * (config.dim_qk + config.dim_v);
}

}  // namespace tessera
