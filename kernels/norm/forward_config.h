// Config and Params of norm/forward.cuh.
#pragma once

#include "norm/row.h"

namespace tessera {

struct NormForwardConfig {
  DType dtype;
  bool centered;    // LayerNorm; else RMSNorm
  bool residual;    // h = x + residual, written to sum
  bool aligned;     // rows, weight and bias start at multiples of 16 bytes, and rows are such a multiple long
  int threads;      // per CTA
  int row_threads;  // that share a row: a power of two
  int chunks;       // of 16 bytes, per thread, in registers
  bool looped;      // rows are longer than that: every pass reads them
};

template <class Visitor>
constexpr void visit_fields(const NormForwardConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("centered", config.centered);
  visit("residual", config.residual);
  visit("aligned", config.aligned);
  visit("threads", config.threads);
  visit("row_threads", config.row_threads);
  visit("chunks", config.chunks);
  visit("looped", config.looped);
}

struct NormForwardParams {
  NormMatrix x;         // [rows, columns]
  NormMatrix residual;  // likewise, as are the following
  NormMatrix sum;       // written
  NormMatrix out;       // written
  const void* weight;   // [columns]; null: ones
  const void* bias;     // [columns]; null: zeros
  float* rstd;          // [rows], written; may be null
  float* mean;          // [rows], written; may be null
  Index rows;
  int columns;
  float eps;
};

}  // namespace tessera
