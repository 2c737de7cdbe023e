// Config and Params of attention/split_combine.cuh.
#pragma once

#include "tile/types.h"

namespace tessera {

// Head dim and number of splits are run-time values: the kernel is memory-bound.
struct SplitCombineConfig {
  DType dtype;  // of the output
  int vector;   // floats per load: 4 (16 bytes), or 1 if the head dim, a pointer or a stride does not allow it
  int unroll;   // splits that a thread has in flight
  int threads;  // per CTA
};

template <class Visitor>
constexpr void visit_fields(const SplitCombineConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("vector", config.vector);
  visit("unroll", config.unroll);
  visit("threads", config.threads);
}

struct SplitCombineParams {
  const float* o_partial;    // [splits, B, Hq, Sq, Dv], contiguous
  const float* lse_partial;  // [splits, B, Hq, Sq], contiguous, natural log; -inf: an empty split, whose O is not used
  void* o;                   // [B, Sq, Hq, Dv]
  float* lse;                // [B, Hq, Sq], may be null
  Strides o_strides;
  RowStrides lse_strides;
  Index rows;  // B * Hq * Sq
  Index seq;
  Index head_dim;
  unsigned heads;
  unsigned splits;
  unsigned lanes_per_row;   // adjacent threads on one row, at most Config::threads
  unsigned split_groups;    // groups of lanes_per_row threads that share a row's splits
  unsigned rows_per_block;  // lanes_per_row * split_groups * rows_per_block <= Config::threads
};

}  // namespace tessera
