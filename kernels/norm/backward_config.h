// Config and Params of norm/backward.cuh.
#pragma once

#include "norm/row.h"

namespace tessera {

struct NormBackwardConfig {
  DType dtype;
  bool centered;    // LayerNorm; else RMSNorm
  bool residual;    // dsum is added to dx
  bool parameters;  // gradients of weight and bias are wanted
  bool aligned;     // rows and weight start at multiples of 16 bytes, and rows are such a multiple long
  int threads;      // per CTA
  int row_threads;  // that share a row: a power of two
  int chunks;       // of 16 bytes, per thread, in registers
  bool looped;      // rows are longer than that: every pass reads them
  int stages;       // rows of a thread in shared memory, on their way or in use; 0: rows are loaded into registers
};

template <class Visitor>
constexpr void visit_fields(const NormBackwardConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("centered", config.centered);
  visit("residual", config.residual);
  visit("parameters", config.parameters);
  visit("aligned", config.aligned);
  visit("threads", config.threads);
  visit("row_threads", config.row_threads);
  visit("chunks", config.chunks);
  visit("looped", config.looped);
  visit("stages", config.stages);
}

// Rows that one CTA processes at a time add their gradients up here.
constexpr int norm_backward_sum_bytes(const NormBackwardConfig& config) {
  if (!config.parameters || config.threads == config.row_threads) return 0;
  return norm_tile_columns(config) * (config.centered ? 2 : 1) * 4;
}
constexpr int norm_backward_matrices(const NormBackwardConfig& config) { return config.residual ? 3 : 2; }  // read
constexpr int norm_backward_stage_bytes(const NormBackwardConfig& config) {
  return norm_backward_matrices(config) * config.chunks * config.threads * 16;
}
constexpr int norm_backward_shared_bytes(const NormBackwardConfig& config) {
  return norm_backward_sum_bytes(config) + config.stages * norm_backward_stage_bytes(config);
}

struct NormBackwardParams {
  NormMatrix x;     // [rows, columns]: what was normalised
  NormMatrix dout;  // likewise, as are the following
  NormMatrix dsum;
  NormMatrix dx;       // written
  const void* weight;  // [columns]; null: ones
  const float* rstd;   // [rows]
  const float* mean;   // [rows]; LayerNorm
  float* partial;      // [CTAs, columns], LayerNorm [CTAs, 2, columns]: gradients of weight and of bias, written
  Index rows;
  int columns;
};

}  // namespace tessera
