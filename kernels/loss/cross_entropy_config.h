// Config and Params of loss/cross_entropy.cuh and loss/reduce_rows.cuh.
#pragma once

#include "tile/types.h"

namespace tessera {

struct LossCrossEntropyConfig {
  DType dtype;  // fp16 or bf16
  int threads;
  bool gradient;  // replaces the logits
  int cached;     // logits of a row that are kept in shared memory from the first pass to the second; gradient only
};

template <class Visitor>
constexpr void visit_fields(const LossCrossEntropyConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("threads", config.threads);
  visit("gradient", config.gradient);
  visit("cached", config.cached);
}

struct LossCrossEntropyParams {
  void* logits;      // [rows, classes], rows at multiples of 16 bytes, padded to such
  Index row_stride;  // elements
  int classes;
  const int* target;  // [rows]
  const float* dout;  // [rows], or null: 1
  float* out;         // [rows], written
};

struct LossReduceRowsConfig {
  int threads;
};

template <class Visitor>
constexpr void visit_fields(const LossReduceRowsConfig& config, Visitor&& visit) {
  visit("threads", config.threads);
}

struct LossReduceRowsParams {
  const float* losses;  // [rows]
  const int* target;    // [rows]
  Index rows;
  int classes;
  bool mean;   // of rows whose target is a class
  float* out;  // [1], written
};

}  // namespace tessera
