// Config and Params of attention/quantize_fp8_sm90.cuh.
#pragma once

#include "tile/types.h"

namespace tessera {

struct QuantizeFp8Config {
  DType dtype;  // of x
  int dim;
  int rows;  // of a CTA's tile, which is a block if blocks have scales
  int threads;
  bool finds_amax;  // only finds the largest value of each head, or of all
  bool of_whole;    // the scale is of what an earlier launch with finds_amax found; else each tile has its own
};

template <class Visitor>
constexpr void visit_fields(const QuantizeFp8Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim", config.dim);
  visit("rows", config.rows);
  visit("threads", config.threads);
  visit("finds_amax", config.finds_amax);
  visit("of_whole", config.of_whole);
}

struct QuantizeFp8Params {
  const void* x;          // [B, S, H, D], or [total, H, D]
  void* out;              // e4m3, likewise
  float* scale;           // [B, H, blocks], with strides of 0 for what shares a scale; 0 before finds_amax
  const int* cu_seqlens;  // [B + 1], null: every sequence has seq rows
  Strides x_strides;
  Strides out_strides;
  RowStrides scale_strides;
  int seq;  // of the longest sequence if packed
  unsigned heads;
  unsigned tiles;  // of the longest sequence
};

}  // namespace tessera
