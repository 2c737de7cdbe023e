// Config and Params of norm/rotary.cuh.
#pragma once

#include "norm/row.h"

namespace tessera {

struct NormRotaryConfig {
  DType dtype;
  DType table_dtype;  // of cos and sin
  bool interleaved;   // pairs are dims 2 i and 2 i + 1; else i and i + R / 2
  bool aligned;       // 16 bytes at a time; else element by element
  int heads;          // per thread
};

template <class Visitor>
constexpr void visit_fields(const NormRotaryConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("table_dtype", config.table_dtype);
  visit("interleaved", config.interleaved);
  visit("aligned", config.aligned);
  visit("heads", config.heads);
}

// Dims that one load brings, and pairs that a thread rotates per head.
constexpr int norm_rotary_vector(const NormRotaryConfig& config) {
  return config.aligned ? norm_chunk_elements(config.dtype) : 1;
}
constexpr int norm_rotary_pairs(const NormRotaryConfig& config) {
  return config.aligned && config.interleaved ? norm_rotary_vector(config) / 2 : norm_rotary_vector(config);
}

struct NormRotaryParams {
  const void* x;  // [batch, seq, heads, dim]
  void* out;      // likewise, written
  Strides x_strides, out_strides;
  const void* cos;  // [table_rows, rotated / 2]
  const void* sin;
  Index cos_stride, sin_stride;
  const int* positions;  // [batch, seq]; null: token s is at position s
  Index positions_stride;
  Index table_rows;
  unsigned tokens, seq;
  int heads, rotated;
  unsigned rotating_slots;  // threads that rotate a head, and those that copy the rest of it
  unsigned slots;
  unsigned head_groups;
  float sign;  // of the angle
};

}  // namespace tessera
