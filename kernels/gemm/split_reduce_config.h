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
  bool shifted;     // columns of partial results begin anywhere, else at multiples of 16 bytes
  bool transposed;  // partial results are of the transposed product: [N, M]
};

constexpr int kMostPartials = 72;
constexpr int kReduceThreads = 256;
constexpr int kReduceTile = 32;  // transposed: rows and columns of a CTA

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
  visit("shifted", config.shifted);
  visit("transposed", config.transposed);
}

struct GemmSplitReduceParams {
  const float* partial;  // of partial_stride elements per row
  Index partial_stride;
  Index first[kMostPartials];  // out's first element in each partial result
  GemmEpilogueParams epilogue;
  int m, n;
  unsigned splits;
  unsigned column_pairs;  // ceil(N / 2); transposed: column tiles
};

}  // namespace tessera
