// Config and Params of loss/gmm_nll.cuh and loss/sum_partials.cuh.
#pragma once

#include "tile/types.h"

namespace tessera {

struct LossGmmNllConfig {
  DType dtype;
  DType target_dtype;
  int lanes;       // that share a row: a power of two, up to 32
  int components;  // per lane
  bool gradient;   // is written, too
  bool reduced;    // the losses of all rows are summed; else written
};

template <class Visitor>
constexpr void visit_fields(const LossGmmNllConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("target_dtype", config.target_dtype);
  visit("lanes", config.lanes);
  visit("components", config.components);
  visit("gradient", config.gradient);
  visit("reduced", config.reduced);
}

constexpr int kLossGmmNllThreads = 256;

struct LossGmmNllParams {
  const void* params;  // [rows, components, 3]
  Index row_stride, component_stride;
  void* dparams;  // likewise, written
  Index drow_stride, dcomponent_stride;
  const void* target;  // [rows]
  Index target_stride;
  float* out;  // [rows], written; reduced: [CTAs]
  Index rows;
  int components;
  float scale;  // of every loss that is summed
};

struct LossSumPartialsConfig {
  int threads;
};

template <class Visitor>
constexpr void visit_fields(const LossSumPartialsConfig& config, Visitor&& visit) {
  visit("threads", config.threads);
}

struct LossSumPartialsParams {
  const float* partial;  // [count]
  int count;
  float* out;  // [1]
};

}  // namespace tessera
