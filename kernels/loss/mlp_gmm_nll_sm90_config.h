// Config and Params of loss/mlp_gmm_nll_sm90.cuh.
#pragma once

#include "loss/gmm_nll_config.h"
#include "mlp/narrow_sm90_config.h"

namespace tessera {

struct LossMlpGmmNllSm90Config {
  DType dtype;
  int block_h, stages, cluster, activation;  // as in MlpNarrowSm90Config
  DType target_dtype;
  bool reduced;  // the losses of all rows are summed; else written
};

template <class Visitor>
constexpr void visit_fields(const LossMlpGmmNllSm90Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("block_h", config.block_h);
  visit("stages", config.stages);
  visit("cluster", config.cluster);
  visit("activation", config.activation);
  visit("target_dtype", config.target_dtype);
  visit("reduced", config.reduced);
}

namespace mlp_gmm_nll_sm90 {

constexpr int kLanes = 2;  // that share a row
constexpr int kMostComponents = mlp_narrow_sm90::kOutColumns / 3;
constexpr int kPerLane = (kMostComponents + kLanes - 1) / kLanes;
constexpr int kSumsPerTile = 8;  // of rows: one of every consumer warp

constexpr MlpNarrowSm90Config mlp_config(const LossMlpGmmNllSm90Config& config) {
  return {config.dtype, config.block_h, config.stages, config.cluster, config.activation, false};
}

}  // namespace mlp_gmm_nll_sm90

struct alignas(64) LossMlpGmmNllSm90Params {
  MlpNarrowSm90Params mlp;  // without out
  LossGmmNllParams loss;    // without params and dparams; reduced: out is [row tiles][8]
};

}  // namespace tessera
