// Config and Params of attention/backward_convert.cuh: a gradient = scale * sums, rounded.
#pragma once

#include "attention/backward_config.h"

namespace tessera {

constexpr int kConvertTiles = 4;  // adjacent tiles of 16 x 8 per warp

struct BackwardConvertConfig {
  DType dtype;
  int vector;
  int threads;
};

template <class Visitor>
constexpr void visit_fields(const BackwardConvertConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("vector", config.vector);
  visit("threads", config.threads);
}

struct BackwardConvertParams {
  DqSums sums;
  void* out;              // [B, S, H, D], or [total, H, D]
  const int* cu_seqlens;  // [B + 1], null: every sequence has seq rows
  Strides strides;
  int seq;
  int block;  // sums of packed sequences start at multiples of so many rows
  unsigned heads;
  unsigned chunks;  // of 8 columns
  unsigned blocks;  // CTAs per head of the longest sequence
  float scale;
};

}  // namespace tessera
