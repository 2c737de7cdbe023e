// Config, shared-memory layout and Params of gemm/dense_sm90.cuh.
#pragma once

#include "gemm/epilogue.h"
#include "gemm/groups.h"
#include "gemm/tiles.h"
#include "tile/tensor_map.h"
#include "tile/types.h"

namespace tessera {

struct GemmDenseSm90Config {
  DType dtype;
  DType out_dtype;
  bool a_transposed;  // a is [K, M], else [M, K]
  bool b_transposed;  // b is [K, N], else [N, K]
  int block_m;        // rows of a tile: 64, 128, 192 (with ping_pong) or 256 (without)
  int block_n;        // columns of a tile, a multiple of 8 up to 256; if gated, of the two products together
  int stages;
  bool ping_pong;  // the two consumers own a tile each, else they share one by rows
  int cluster;     // CTAs, 1 or 2, with adjacent row tiles; each loads a half of B for both
  bool shares_a;   // their column tiles are adjacent instead, and they share A, which is transposed
  int strided;     // kStridedNone, kStridedM, kStridedK: rows that may start anywhere
  bool tma_store;  // else threads copy from and to rows that start anywhere
  bool edges;      // TMA stores whole chunks of 16 bytes, and threads what a row of out has beside them at its ends
  int staged;    // kStagedNone, ...: the epilogue's matrix that is moved like out; its other ones are accessed directly
  int grouping;  // kUngrouped, ...
  bool sums_two;   // A B + A2 B2: the steps of the second product follow those of the first
  bool split;      // K is divided among CTAs, which write fp32 partial sums; the epilogue is left to the next step
  int activation;  // and the rest of the epilogue: gemm/epilogue.h
  bool bias;
  bool gated;
  bool gradient;
  bool gated_gradient;
  bool weighted;
  bool preactivation;
  bool residual;
  bool pairs;
};

template <class Visitor>
constexpr void visit_fields(const GemmDenseSm90Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("out_dtype", config.out_dtype);
  visit("a_transposed", config.a_transposed);
  visit("b_transposed", config.b_transposed);
  visit("block_m", config.block_m);
  visit("block_n", config.block_n);
  visit("stages", config.stages);
  visit("ping_pong", config.ping_pong);
  visit("cluster", config.cluster);
  visit("shares_a", config.shares_a);
  visit("strided", config.strided);
  visit("tma_store", config.tma_store);
  visit("edges", config.edges);
  visit("staged", config.staged);
  visit("grouping", config.grouping);
  visit("sums_two", config.sums_two);
  visit("split", config.split);
  visit("activation", config.activation);
  visit("bias", config.bias);
  visit("gated", config.gated);
  visit("gradient", config.gradient);
  visit("gated_gradient", config.gated_gradient);
  visit("weighted", config.weighted);
  visit("preactivation", config.preactivation);
  visit("residual", config.residual);
  visit("pairs", config.pairs);
}

// Rows whose index is equal modulo 8 are a multiple of 16 bytes apart. kStridedM: a tile has every eighth row of A and out.
// kStridedK: a sum has every eighth row of A and B, both transposed.
constexpr int kStridedNone = 0;
constexpr int kStridedM = 1;
constexpr int kStridedK = 2;

namespace gemm_sm90 {

constexpr int kRowGroups = 8;      // of rows whose index is equal modulo 8
constexpr int kThreads = 3 * 128;  // a producer warpgroup and two consumers
constexpr int kConsumers = 2;
constexpr int kBlockK = 64;              // columns of a stage: the span of the widest swizzle
constexpr int kAtomBytes = 64 * 128;     // 64 rows of the widest swizzle atom
constexpr int kStagingBytes = 64 * 128;  // a box of 64 rows and 128 bytes of each

constexpr bool shares_b(const GemmDenseSm90Config& config) { return config.cluster > 1 && !config.shares_a; }
// Columns of the result that a tile computes.
constexpr int out_columns(const GemmDenseSm90Config& config) {
  return config.gated ? config.block_n / 2 : config.block_n;
}
// Rows of a tile that a consumer computes.
constexpr int consumer_rows(const GemmDenseSm90Config& config) {
  return config.ping_pong ? config.block_m : config.block_m / kConsumers;
}
// K-major, rows of a box are rows of M or N. MN-major, an operand consists of atoms of 64 columns and 64 rows of K.
constexpr int a_bytes(const GemmDenseSm90Config& config) { return config.block_m * kBlockK * 2; }
constexpr int b_atoms(const GemmDenseSm90Config& config) { return (config.block_n + 63) / 64; }
constexpr int b_bytes(const GemmDenseSm90Config& config) {
  return config.b_transposed ? b_atoms(config) * kAtomBytes : config.block_n * kBlockK * 2;
}
constexpr bool loads_staged(const GemmDenseSm90Config& config) {
  return config.staged == kStagedResidual || config.staged == kStagedSaved || config.staged == kStagedPair;
}
// Boxes of the same elements: of out and what is stored with it, or loaded to where out and out_gate will be.
constexpr int boxes_of_buffer(const GemmDenseSm90Config& config) {
  if (config.staged == kStagedPair) return 3;
  return config.staged == kStagedPreactivation ? (config.gated ? 3 : 2) : 1;
}
constexpr int loaded_boxes(const GemmDenseSm90Config& config) { return config.staged == kStagedPair ? 2 : 1; }
// Buffers per consumer: one that is written, one on its way to global memory and, if a matrix is loaded ahead, one that it is
// loaded to. Buffers of three boxes are fewer, so that the stages have room. Without TMA none is on its way.
constexpr int staging_buffers(const GemmDenseSm90Config& config) {
  if (!config.tma_store || (config.staged == kStagedPreactivation && config.gated)) return 1;
  return config.staged == kStagedResidual || config.staged == kStagedSaved ? 3 : 2;
}
constexpr int buffer_bytes(const GemmDenseSm90Config& config) { return boxes_of_buffer(config) * kStagingBytes; }
// The element type of what a consumer stores: partial sums are fp32.
constexpr DType stored_type(const GemmDenseSm90Config& config) {
  return config.split ? DType::kFloat32 : config.out_dtype;
}
constexpr int stored_columns(const GemmDenseSm90Config& config) {  // of a box of 128 bytes
  return stored_type(config) == DType::kFloat32 ? 32 : 64;
}
constexpr int m_groups(const GemmDenseSm90Config& config) { return config.strided == kStridedM ? kRowGroups : 1; }
constexpr int k_groups(const GemmDenseSm90Config& config) { return config.strided == kStridedK ? kRowGroups : 1; }

// Byte offsets in a CTA's shared memory.
struct Layout {
  int a;        // [stages][block_m, 64], or [stages][block_m / 64 atoms]
  int b;        // [stages][block_n, 64], or [stages][atoms]
  int staging;  // [consumers][staging_buffers][boxes_of_buffer] boxes
  int full;     // [stages] mbarriers: TMA has written A and B
  int empty;    // [stages] every consumer warp that reads the stage, of both CTAs, has finished
  int loaded;   // [consumers][staging_buffers] mbarriers: TMA has written the boxes of the epilogue's matrices
  int bytes;
};
constexpr Layout layout(const GemmDenseSm90Config& config) {
  Layout at = {};
  at.a = 0;
  at.b = config.stages * a_bytes(config);
  at.staging = (at.b + config.stages * b_bytes(config) + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  at.full = at.staging + kConsumers * staging_buffers(config) * buffer_bytes(config);
  at.empty = at.full + 8 * config.stages;
  at.loaded = at.empty + 8 * config.stages;
  at.bytes = at.loaded + 8 * kConsumers * staging_buffers(config);
  return at;
}

}  // namespace gemm_sm90

// m_groups, k_groups: 8 if rows of M or K are strided, else 1. Map i of a tensor has the rows whose index is i modulo 8. A
// map's address must be a multiple of 16 bytes. That of an operand begins at the last one before row i, that of out at the
// first one in it.
template <int m_groups, int k_groups>
struct alignas(64) GemmDenseSm90Params {
  TensorMap a[m_groups * k_groups];
  TensorMap b[k_groups];
  TensorMap gate;
  TensorMap a2, b2;            // sums_two
  TensorMap out[m_groups];     // or, if split, the partial sums [layers, M, N]; as 16-bit elements, as is:
  TensorMap staged[m_groups];  // the matrix that Config::staged names
  TensorMap staged_gate;       // the gate's preactivation, or saved_gate
  TensorMap out_gate, hidden;  // gated_gradient
  int a_shift[m_groups];       // 16-bit elements from the beginning of a map of a to its first row
  int out_shift[m_groups];     // and from the last multiple of 16 bytes to a row of out
  int b_layers;                // 1: b has a copy for each group of rows, shifted as a's or out's rows are; else 0
  GemmEpilogueParams epilogue;
  GemmPairParams pair;
  const int* offsets;  // of ragged groups
  int groups;
  int a_layers;  // per group: 0 if it has none, or is shared
  int m, n, k;
  TileOrder order;  // row tiles of a whole cluster; of a group. Ragged rows: there is no number of row tiles
  unsigned splits;
  unsigned work_tiles;  // tiles times splits, or times groups; not used if rows are ragged
  int k_steps;          // of 64, of the whole product; kStridedK: of each group of rows; sums_two: of both
  int k_steps_per_split;
};

}  // namespace tessera
