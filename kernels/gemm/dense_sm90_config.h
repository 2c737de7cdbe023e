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
  int block_m;        // rows of a tile: 64, 128 or 256
  int block_n;        // columns of a tile, a multiple of 8 up to 256; if gated, of the two products together
  int stages;
  bool ping_pong;  // the two consumers own a tile each, else they share one by rows
  int cluster;     // CTAs, 1 or 2, with adjacent row tiles; each loads a half of B for both
  int shifted;     // kShiftedA, kShiftedB: the operand whose rows may start anywhere; kShiftedNone
  bool tma_store;  // else threads copy from and to rows that start anywhere
  int staged;    // kStagedNone, ...: the epilogue's matrix that is moved like out; its other ones are accessed directly
  int grouping;  // kUngrouped, ...
  bool split;    // K is divided among CTAs, which write fp32 partial sums; the epilogue is left to the next step
  int activation;  // and the rest of the epilogue: gemm/epilogue.h
  bool bias;
  bool gated;
  bool gradient;
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
  visit("shifted", config.shifted);
  visit("tma_store", config.tma_store);
  visit("staged", config.staged);
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

constexpr int kShiftedNone = 0;
constexpr int kShiftedA = 1;
constexpr int kShiftedB = 2;

namespace gemm_sm90 {

constexpr int kRowGroups = 8;  // rows whose index is equal modulo 8 are a multiple of 16 bytes apart
constexpr int kShiftWarps = 3;
constexpr int kThreads = 3 * 128;  // a producer warpgroup and two consumers
constexpr int kConsumers = 2;
constexpr int kBlockK = 64;              // columns of a stage: the span of the widest swizzle
constexpr int kAtomBytes = 64 * 128;     // 64 rows of the widest swizzle atom
constexpr int kStagingBytes = 64 * 128;  // a box of 64 rows and 128 bytes of each

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
// Boxes per consumer that are written or on their way from or to global memory: two, and one to be loaded ahead. Without
// TMA they are not kept.
constexpr int staging_buffers(const GemmDenseSm90Config& config) {
  if (!config.tma_store) return config.staged == kStagedPreactivation ? 2 : 1;
  return config.staged == kStagedNone ? 2 : 3;
}
constexpr bool loads_staged(const GemmDenseSm90Config& config) {
  return config.staged == kStagedResidual || config.staged == kStagedSaved;
}
// The element type of what a consumer stores: partial sums are fp32.
constexpr DType stored_type(const GemmDenseSm90Config& config) {
  return config.split ? DType::kFloat32 : config.out_dtype;
}
constexpr int stored_columns(const GemmDenseSm90Config& config) {  // of a box of 128 bytes
  return stored_type(config) == DType::kFloat32 ? 32 : 64;
}
// A shifted operand is loaded by the index of its rows modulo 8. If they are rows of K, so are those of the other operand:
// the order of rows within a stage does not change the sum, as long as it is the same for A and B. Otherwise they are rows
// of M, and the rows of a tile of the result are in that order.
constexpr bool groups_are_of_k(const GemmDenseSm90Config& config) {
  return config.shifted != kShiftedNone && config.a_transposed;
}
constexpr bool groups_are_of_m(const GemmDenseSm90Config& config) {
  return config.shifted != kShiftedNone && !config.a_transposed;
}
constexpr int m_groups(const GemmDenseSm90Config& config) { return groups_are_of_m(config) ? kRowGroups : 1; }
constexpr int k_groups(const GemmDenseSm90Config& config) { return groups_are_of_k(config) ? kRowGroups : 1; }

// A frame is what TMA loads of a shifted operand for a step: 64 columns from the last multiple of 16 bytes before a row's
// own on. A row continues in the next step's frame if columns are of K, else in the next atom, and then there is one more.
constexpr int frames(const GemmDenseSm90Config& config) {
  return config.shifted == kShiftedNone ? 0 : config.a_transposed ? 2 : 3;
}
constexpr int shifted_atoms(const GemmDenseSm90Config& config) {  // MN-major, of the operand in a stage
  return config.shifted == kShiftedB ? b_atoms(config) : config.block_m / 64;
}
constexpr int frame_bytes(const GemmDenseSm90Config& config) {
  return config.a_transposed ? (shifted_atoms(config) + 1) * kAtomBytes : a_bytes(config);
}

// Byte offsets in a CTA's shared memory.
struct Layout {
  int a;            // [stages][block_m, 64], or [stages][block_m / 64 atoms]
  int b;            // [stages][block_n, 64], or [stages][atoms]
  int frames;       // [frames] of a shifted operand
  int staging;      // [consumers][staging_buffers] boxes
  int full;         // [stages] mbarriers: TMA has written A and B
  int empty;        // [stages] every consumer warp that reads the stage, of both CTAs, has finished
  int frame_full;   // [frames] mbarriers: TMA has written a frame
  int frame_empty;  // [frames] every warp that shifts has finished reading it
  int loaded;       // [consumers][staging_buffers] mbarriers: TMA has written a box of the epilogue's matrix
  int bytes;
};
constexpr Layout layout(const GemmDenseSm90Config& config) {
  Layout at = {};
  at.a = 0;
  at.b = config.stages * a_bytes(config);
  at.frames = (at.b + config.stages * b_bytes(config) + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
  at.staging = at.frames + frames(config) * frame_bytes(config);
  at.full = at.staging + kConsumers * staging_buffers(config) * kStagingBytes;
  at.empty = at.full + 8 * config.stages;
  at.frame_full = at.empty + 8 * config.stages;
  at.frame_empty = at.frame_full + 8 * frames(config);
  at.loaded = at.frame_empty + 8 * frames(config);
  at.bytes = at.loaded + 8 * kConsumers * staging_buffers(config);
  return at;
}

}  // namespace gemm_sm90

// m_groups, k_groups: 8 if rows of M or K are loaded in groups, else 1. Map i of a tensor has the rows whose index is i
// modulo the groups. A map's address must be a multiple of 16 bytes, so that of a shifted operand may begin before row i, by
// shift[i] 16-bit elements.
template <int m_groups, int k_groups>
struct alignas(64) GemmDenseSm90Params {
  TensorMap a[m_groups * k_groups];
  TensorMap b[k_groups];
  TensorMap gate;
  TensorMap out[m_groups];     // or, if split, the partial sums [splits, M, N]; as 16-bit elements, as is:
  TensorMap staged[m_groups];  // the matrix that Config::staged names
  int shift[m_groups * k_groups];
  GemmEpilogueParams epilogue;
  const int* offsets;  // of ragged groups
  int groups;
  int a_layers;  // per group: 0 if it has none, or is shared
  int m, n, k;
  TileOrder order;  // row tiles of a whole cluster; of a group. Ragged rows: there is no number of row tiles
  unsigned splits;
  unsigned work_tiles;  // tiles times splits, or times groups; not used if rows are ragged
  int k_steps;          // of 64, of the whole product
  int k_steps_per_split;
};

}  // namespace tessera
