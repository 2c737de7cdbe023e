// Config and Params of attention/value_transpose_sm90.cuh: V as attention/forward_fp8_sm90.cuh reads it.
#pragma once

#include "attention/fp8.h"

namespace tessera {

struct ValueTransposeConfig {
  int keys;     // of a CTA's tile, a multiple of 16
  int columns;  // of a tile, a multiple of 4
  int threads;
};

template <class Visitor>
constexpr void visit_fields(const ValueTransposeConfig& config, Visitor&& visit) {
  visit("keys", config.keys);
  visit("columns", config.columns);
  visit("threads", config.threads);
}

// A tile's words of four keys: [4][columns / 4][keys / 4], the first index being a column's place in its word of V. Rows
// have one word more, so that neither side has bank conflicts.
constexpr int value_transpose_pitch(const ValueTransposeConfig& config) { return config.keys / 4 + 1; }
constexpr int value_transpose_shared_bytes(const ValueTransposeConfig& config) {
  return config.columns * value_transpose_pitch(config) * 4;
}

struct ValueTransposeParams {
  const void* v;          // e4m3 [B, Sk, Hkv, Dv], or [total_k, Hkv, Dv]
  void* out;              // e4m3 [B, Hkv, Dv, pitch], or [Hkv, Dv, pitch]
  const int* cu_seqlens;  // [B + 1], null: every sequence has seq_k keys
  Strides strides;
  Index pitch;  // keys of a row of `out`
  int seq_k;    // of the longest sequence if packed
  int dim_v;
  unsigned heads;
  unsigned tiles;  // of keys, of the longest sequence
};

}  // namespace tessera
