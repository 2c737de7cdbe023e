// Config, shared-memory layout and Params of mlp/narrow_sm90.cuh.
#pragma once

#include "gemm/epilogue.h"
#include "tile/tensor_map.h"
#include "tile/types.h"

namespace tessera {

struct MlpNarrowSm90Config {
  DType dtype;
  int block_h;  // hidden columns of a tile: a multiple of 16 up to 160
  int stages;
  int cluster;     // CTAs, 1 or 2; each loads half of a stage for both
  int activation;  // gemm/epilogue.h
  bool pairs;      // N is even, and rows of out start at multiples of 16 bytes
};

template <class Visitor>
constexpr void visit_fields(const MlpNarrowSm90Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("block_h", config.block_h);
  visit("stages", config.stages);
  visit("cluster", config.cluster);
  visit("activation", config.activation);
  visit("pairs", config.pairs);
}

namespace mlp_narrow_sm90 {

constexpr int kThreads = 3 * 128;  // a producer warpgroup and two consumers
constexpr int kBlockM = 128;
constexpr int kMostSteps = 8;              // atoms of 64 columns of x, all of them in shared memory
constexpr int kOutColumns = 32;            // at least N
constexpr int kAtomBytes = kBlockM * 128;  // 64 columns of x

constexpr int stage_bytes(const MlpNarrowSm90Config& config) { return config.block_h * 128; }
constexpr int kDownAtomBytes = kOutColumns * 128;
constexpr int down_atoms(const MlpNarrowSm90Config& config) { return (config.block_h + 63) / 64; }
constexpr int down_bytes(const MlpNarrowSm90Config& config) { return down_atoms(config) * kDownAtomBytes; }

// Byte offsets in a CTA's shared memory.
struct Layout {
  int x;           // [atoms][128 rows, 64 columns]; between row tiles, the sums that the consumers exchange
  int up;          // [stages][block_h rows, 64 columns]
  int down;        // [consumers][atoms of 64 hidden columns][32 rows]
  int x_full;      // [atoms] mbarriers: TMA has written the atom
  int x_empty;     // every consumer warp has finished the row tile
  int full;        // [stages] TMA has written the stage
  int empty;       // [stages] the consumer that reads it has finished, in all CTAs of the cluster
  int down_full;   // [consumers]
  int down_empty;  // [consumers]
  int bytes;
};
constexpr Layout layout(const MlpNarrowSm90Config& config) {
  Layout at = {};
  at.up = kMostSteps * kAtomBytes;
  at.down = at.up + config.stages * stage_bytes(config);
  at.x_full = at.down + 2 * down_bytes(config);
  at.x_empty = at.x_full + 8 * kMostSteps;
  at.full = at.x_empty + 8;
  at.empty = at.full + 8 * config.stages;
  at.down_full = at.empty + 8 * config.stages;
  at.down_empty = at.down_full + 16;
  at.bytes = at.down_empty + 16;
  return at;
}

}  // namespace mlp_narrow_sm90

struct alignas(64) MlpNarrowSm90Params {
  TensorMap x;     // [M, K], boxes of 128 rows
  TensorMap up;    // [H, K], boxes of block_h / cluster rows
  TensorMap down;  // [N, H], boxes of 32 rows
  GemmMatrix out;  // [M, N]
  int m, n;
  int k_steps;       // atoms of x, 1 to 8
  int row_tiles;     // a multiple of the cluster's CTAs
  int hidden_tiles;  // at least 1
};

}  // namespace tessera
