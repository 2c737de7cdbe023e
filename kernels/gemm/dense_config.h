// Config, shared-memory size and Params of gemm/dense.cuh.
#pragma once

#include "gemm/epilogue.h"
#include "gemm/groups.h"
#include "gemm/tiles.h"
#include "tile/types.h"

namespace tessera {

struct GemmDenseConfig {
  DType dtype;
  DType out_dtype;
  bool a_transposed;  // a is [K, M], else [M, K]
  bool b_transposed;  // b is [K, N], else [N, K]
  int block_m;
  int block_n;  // if gated, of the two products together
  int block_k;
  int warps_m;  // warps along the rows of a tile
  int warps_n;  // and along its columns
  int stages;
  int vector;      // elements per load: 8 (16 bytes), or 1 if a pointer or a stride does not allow it
  int grouping;    // kUngrouped, ...
  bool split;      // K is divided among CTAs, which write fp32 partial sums; the epilogue is left to the next step
  int activation;  // and the rest of the epilogue: gemm/epilogue.h
  bool bias;
  bool gated;
  bool gradient;
  bool preactivation;
  bool residual;
  bool pairs;
};

template <class Visitor>
constexpr void visit_fields(const GemmDenseConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("out_dtype", config.out_dtype);
  visit("a_transposed", config.a_transposed);
  visit("b_transposed", config.b_transposed);
  visit("block_m", config.block_m);
  visit("block_n", config.block_n);
  visit("block_k", config.block_k);
  visit("warps_m", config.warps_m);
  visit("warps_n", config.warps_n);
  visit("stages", config.stages);
  visit("vector", config.vector);
  visit("grouping", config.grouping);
  visit("split", config.split);
  visit("activation", config.activation);
  visit("bias", config.bias);
  visit("gated", config.gated);
  visit("gradient", config.gradient);
  visit("preactivation", config.preactivation);
  visit("residual", config.residual);
  visit("pairs", config.pairs);
}

constexpr int gemm_dense_threads(const GemmDenseConfig& config) { return config.warps_m * config.warps_n * 32; }
constexpr int gemm_dense_shared_bytes(const GemmDenseConfig& config) {
  return config.stages * (config.block_m + config.block_n) * config.block_k * 2;
}

struct GemmDenseParams {
  GemmMatrix a;
  GemmMatrix b;
  GemmMatrix gate;
  float* partial;  // [splits, M, partial_stride], if split
  Index partial_stride;
  GemmEpilogueParams epilogue;
  const int* offsets;  // of ragged groups
  int groups;
  int m, n, k;
  TileOrder order;  // of a group; ragged rows: there is no number of row tiles
  unsigned splits;
  int k_per_split;  // a multiple of block_k
};

}  // namespace tessera
