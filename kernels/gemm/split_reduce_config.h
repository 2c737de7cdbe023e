// Config and Params of gemm/split_reduce.cuh.
#pragma once

#include "gemm/epilogue.h"
#include "tile/types.h"

namespace tessera {

struct GemmSplitReduceConfig {
  DType dtype;
  DType out_dtype;
  int activation;  // and the rest of the epilogue: gemm/epilogue.h
  bool bias;
  bool gated;  // false: a gated product is not split
  bool gradient;
  bool preactivation;
  bool residual;
  bool pairs;
};

template <class Visitor>
constexpr void visit_fields(const GemmSplitReduceConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("out_dtype", config.out_dtype);
  visit("activation", config.activation);
  visit("bias", config.bias);
  visit("gated", config.gated);
  visit("gradient", config.gradient);
  visit("preactivation", config.preactivation);
  visit("residual", config.residual);
  visit("pairs", config.pairs);
}

struct GemmSplitReduceParams {
  const float* partial;  // [splits, M, partial_stride]
  Index partial_stride;
  GemmEpilogueParams epilogue;
  int m, n;
  unsigned splits;
  unsigned column_pairs;  // ceil(N / 2)
};

}  // namespace tessera
