// Config and Params of attention/backward_preprocess.cuh.
#pragma once

#include "tile/types.h"

namespace tessera {

// The head dim is a run-time value: the kernel is memory-bound, so a compile-time head dim would only add instances.
struct BackwardPreprocessConfig {
  DType dtype;
  int vector;   // elements per load: 8 (16 bytes), or 1 if the head dim, a pointer or a stride does not allow it
  int unroll;   // rows that a thread has in flight
  int threads;  // per CTA
};

template <class Visitor>
constexpr void visit_fields(const BackwardPreprocessConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("vector", config.vector);
  visit("unroll", config.unroll);
  visit("threads", config.threads);
}

// Packed variable-length tensors are one batch of total_q rows: the result of a row does not depend on its sequence.
struct BackwardPreprocessParams {
  const void* o;       // [B, Sq, Hq, Dv]
  const void* d_o;     // [B, Sq, Hq, Dv]
  const float* lse;    // [B, Hq, Sq], natural log
  const float* d_lse;  // [B, Hq, Sq], may be null
  float* delta;        // [B, Hq, Sq]
  float* lse_log2;     // [B, Hq, Sq]
  void* zeroed;        // zeroed_words of 16 bytes; may be null if there are none
  Strides o_strides;
  Strides d_o_strides;
  RowStrides lse_strides;
  RowStrides d_lse_strides;
  RowStrides delta_strides;
  RowStrides lse_log2_strides;
  Index seq;
  Index zeroed_words;
  Index zeroed_a_block;  // words that one CTA zeroes
  unsigned heads;
  unsigned seq_tiles;      // ceil(seq / rows_per_block)
  unsigned vectors;        // per row: head dim / Config::vector
  unsigned lanes_per_row;  // min(vectors, 32)
};

// Rows of the sequence that one CTA processes, all of one head.
constexpr int preprocess_rows_per_block(const BackwardPreprocessConfig& config, int lanes_per_row) {
  return config.threads / 32 * (32 / lanes_per_row) * config.unroll;
}

}  // namespace tessera
