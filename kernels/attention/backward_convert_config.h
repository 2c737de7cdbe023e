// Config and Params of attention/backward_convert.cuh: dQ = scale * sums, rounded.
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
  DqSums dq_sums;
  void* dq;
  const int* cu_seqlens_q;
  Strides dq_strides;
  int seq_q;
  int block_q;  // of the kernel that computed the sums
  unsigned heads;
  unsigned chunks;  // of 8 columns
  unsigned blocks;  // CTAs per head of the longest sequence
  float scale;
};

}  // namespace tessera
