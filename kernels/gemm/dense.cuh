// Dense GEMM on mma.sync, for every architecture since Turing, and rows at any stride. Entry point: gemm_dense, below.
//
// Algorithm: one CTA computes block_m x block_n elements of out = epilogue(A B) and loops over K in steps of block_k.
// Every warp has the same role: it owns a rectangle of the tile, whose fp32 sums stay in its registers.
//
//   shared memory:  A [stages][block_m, block_k]    B [stages][block_n, block_k]     (transposed operands: [block_k, ...])
//
//   step k:   barrier: stage k loaded, stage k - 1 may be reused
//             load step k + stages - 1 into the stage of k - 1     sums += A(k) B(k)
//
// With cp.async (sm_80 and newer, aligned rows) stages - 1 steps are in flight. Otherwise loads go through registers: they
// are issued before the products of a step and stored after them, and two stages are enough.
//
// ldmatrix transposes 8x8 matrices as it reads them, so operands that are stored the other way round are loaded as they
// are. Elements beyond the edges of A and B are loaded as zeros.
#pragma once

#include "gemm/dense_config.h"
#include "gemm/epilogue.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "tile/shared_tile.cuh"

namespace tessera {

// Loads a tile of a [rows, columns] matrix, with zeros beyond its edges. All threads of the CTA take part; the interface
// is that of TileLoader (tile/shared_tile.cuh), but a load has two corners.
template <class Tile, int threads, int vector>
struct EdgeTileLoader {
  static constexpr int kChunks = Tile::kRows * Tile::kChunks;
  static constexpr int kPasses = (kChunks + threads - 1) / threads;
#if __CUDA_ARCH__ >= 800
  static constexpr bool kAsync = vector == 8;
#else
  static constexpr bool kAsync = false;
#endif

  Words4 staged[kAsync ? 1 : kPasses];

  __forceinline__ void begin(const Tile& tile, const GemmMatrix& matrix, int first_row, int first_column, int rows,
                             int columns) {
    const int thread = recomputed(threadIdx.x);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int index = thread + pass * threads;
      const int in_tile = index / Tile::kChunks, chunk = index % Tile::kChunks;
      const int row = first_row + in_tile, column = first_column + chunk * 8;
      const bool mine = index < kChunks;
      const int count = mine && row < rows ? max(0, min(columns - column, 8)) : 0;  // elements that exist
      const Bits16* from = static_cast<const Bits16*>(matrix.data) + row * matrix.row_stride + column;
      if constexpr (kAsync) {
#if __CUDA_ARCH__ >= 800
        if (mine) cp_async_16_of(tile.address(in_tile, chunk), from, count * 2);
#endif
      } else {
        if (vector == 8 && (count == 8 || count == 0)) {
          staged[pass] = load_16(from, count == 8);
        } else {
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            staged[pass].word[w] = static_cast<unsigned>(load_read_only(from + 2 * w, 2 * w < count)) |
                                   static_cast<unsigned>(load_read_only(from + 2 * w + 1, 2 * w + 1 < count)) << 16;
          }
        }
      }
    }
  }

  __forceinline__ void end(const Tile& tile) const {
    if constexpr (!kAsync) {
      const int thread = recomputed(threadIdx.x);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int index = thread + pass * threads;
        if (index < kChunks) store_shared_16(tile.address(index / Tile::kChunks, index % Tile::kChunks), staged[pass]);
      }
    }
  }
};

template <GemmDenseConfig config>
struct GemmDense;

template <GemmDenseConfig config>
__forceinline__ void gemm_dense(const GemmDenseParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_wait_and_launch_dependents();
  GemmDense<config> kernel{p, shared_address(shared)};
  kernel.run();
}

template <GemmDenseConfig config>
struct GemmDense {
  static constexpr DType kType = config.dtype;
  static constexpr int kThreads = gemm_dense_threads(config);
  static constexpr int kRowTiles = config.block_m / config.warps_m / 16;
  static constexpr int kColumnTiles = config.block_n / config.warps_n / 8;
  static constexpr int kOutColumns = config.gated ? config.block_n / 2 : config.block_n;  // of a tile of out
  static constexpr int kHalf = config.gated ? kColumnTiles / 2 : kColumnTiles;            // column tiles of b
  static_assert(kRowTiles * 16 * config.warps_m == config.block_m);
  static_assert(kHalf % 2 == 0 && kColumnTiles * 8 * config.warps_n == config.block_n);
  static_assert(config.block_k % 16 == 0 && config.stages >= 2);

  using TileA = SharedTile<config.a_transposed ? config.block_k : config.block_m,
                           config.a_transposed ? config.block_m : config.block_k>;
  // b and the gate are loaded as a tile each; without a gate there is one.
  using TileB = SharedTile<config.b_transposed ? config.block_k : kOutColumns,
                           config.b_transposed ? kOutColumns : config.block_k>;
  using LoaderA = EdgeTileLoader<TileA, kThreads, config.vector>;
  using LoaderB = EdgeTileLoader<TileB, kThreads, config.vector>;
  static constexpr int kStageBytes = (config.block_m + config.block_n) * config.block_k * 2;

  const GemmDenseParams& p;
  unsigned shared;
  int lane = static_cast<int>(threadIdx.x) % 32;
  int warp_m = static_cast<int>(threadIdx.x) / 32 % config.warps_m;
  int warp_n = static_cast<int>(threadIdx.x) / 32 / config.warps_m;
  int first_row, first_column;  // of the tile of out
  int end_row;                  // rows from here on do not exist, or are of another group
  int first_k, end_k;
  int group = 0;

  LoaderA load_a;
  LoaderB load_b, load_gate;
  float sums[kRowTiles][kColumnTiles][4];

  __forceinline__ TileA tile_a(int stage) const { return {shared + stage * kStageBytes}; }
  __forceinline__ TileB tile_b(int stage) const { return {shared + stage * kStageBytes + TileA::kBytes}; }
  __forceinline__ TileB tile_gate(int stage) const {
    return {shared + stage * kStageBytes + TileA::kBytes + TileB::kBytes};
  }

  // The group's layer of a or b.
  __forceinline__ GemmMatrix layer_of(const GemmMatrix& all) const {
    if constexpr (config.grouping == kUngrouped) return all;
    return {static_cast<Bits16*>(all.data) + group * all.group_stride, all.row_stride, 0};
  }

  __forceinline__ void begin_b(LoaderB& loader, const TileB& tile, const GemmMatrix& matrix, int k) {
    if constexpr (config.b_transposed) {
      loader.begin(tile, matrix, k, first_column, end_k, p.n);
    } else {
      loader.begin(tile, matrix, first_column, k, p.n, end_k);
    }
  }
  __forceinline__ void begin(int stage, int k) {
    if (k < end_k) {
      if constexpr (config.a_transposed) {
        load_a.begin(tile_a(stage), layer_of(p.a), k, first_row, end_k, p.m);
      } else {
        load_a.begin(tile_a(stage), layer_of(p.a), first_row, k, end_row, end_k);
      }
      begin_b(load_b, tile_b(stage), layer_of(p.b), k);
      if constexpr (config.gated) begin_b(load_gate, tile_gate(stage), layer_of(p.gate), k);
    }
#if __CUDA_ARCH__ >= 800
    if constexpr (LoaderA::kAsync) cp_async_commit_group();
#endif
  }
  __forceinline__ void end(int stage) {
    load_a.end(tile_a(stage));
    load_b.end(tile_b(stage));
    if constexpr (config.gated) load_gate.end(tile_gate(stage));
  }

  __forceinline__ void multiply(int stage) {
    const int lane = recomputed(this->lane);
#pragma unroll
    for (int step = 0; step < config.block_k / 16; ++step) {
      unsigned a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int row = warp_m * kRowTiles * 16 + m * 16;
        if constexpr (config.a_transposed) {
          ldmatrix_x4_trans(a[m], tile_a(stage).address(step * 16 + lane / 16 * 8 + lane % 8, row / 8 + lane / 8 % 2));
        } else {
          ldmatrix_x4(a[m], tile_a(stage).address(row + lane % 16, step * 2 + lane / 16));
        }
      }
#pragma unroll
      for (int n = 0; n < kColumnTiles; n += 2) {
        const TileB tile = config.gated && n >= kHalf ? tile_gate(stage) : tile_b(stage);
        const int column = (warp_n * kHalf + n % kHalf) * 8;
        unsigned b[4];
        if constexpr (config.b_transposed) {
          ldmatrix_x4_trans(b, tile.address(step * 16 + lane % 16, column / 8 + lane / 16));
        } else {
          ldmatrix_x4(b, tile.address(column + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_k16<kType>(sums[m][n], a[m], b[0], b[1]);
          mma_k16<kType>(sums[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __forceinline__ void store(unsigned split) {
    const GemmEpilogue<epilogue_of(config)> epilogue{p.epilogue, end_row, p.n, group};
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int row = first_row + (warp_m * kRowTiles + m) * 16 + lane / 4;
      const int rows[2] = {row, row + 8};
#pragma unroll
      for (int n = 0; n < kHalf; ++n) {
        const int column = first_column + (warp_n * kHalf + n) * 8 + lane % 4 * 2;
        if constexpr (config.split) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const Index at = (static_cast<Index>(split) * p.m + rows[half]) * p.partial_stride + column;
            const bool exists = rows[half] < p.m;
            // Columns are padded to an even number.
            store_pair<DType::kFloat32, true>(p.partial, at, sums[m][n][half * 2], sums[m][n][half * 2 + 1],
                                              exists && column < p.n, false);
          }
        } else {
          epilogue.apply(sums[m][n], sums[m][config.gated ? n + kHalf : n], rows, column);
        }
      }
    }
  }

  // Ragged rows: the group that a tile is in, its rows, and the tile's index in it. Each lane looks at one of 32 groups.
  __forceinline__ bool find_group(unsigned& tile, GroupRange& rows, TileOrder& order) {
    constexpr unsigned kAll = 0xffffffffu;
    for (int first = 0; first < p.groups; first += 32) {
      GroupRange mine = {};
      if (first + lane < p.groups) mine = group_range(p.offsets, first + lane, p.m);
      const unsigned row_tiles = static_cast<unsigned>((mine.end - mine.begin + config.block_m - 1) / config.block_m);
      unsigned end = row_tiles * order.column_tiles;  // of this lane's group
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned before = __shfl_up_sync(kAll, end, distance);
        if (lane >= distance) end += before;
      }
      const unsigned after = __ballot_sync(kAll, tile < end);
      if (after != 0) {
        const int from = __ffs(static_cast<int>(after)) - 1;
        group = first + from;
        rows = {__shfl_sync(kAll, mine.begin, from), __shfl_sync(kAll, mine.end, from)};
        order.row_tiles = __shfl_sync(kAll, row_tiles, from);
        tile -= __shfl_sync(kAll, end, from) - order.row_tiles * order.column_tiles;
        return true;
      }
      tile -= __shfl_sync(kAll, end, 31);
    }
    return false;
  }

  __forceinline__ void run() {
    unsigned tile = blockIdx.x, split = 0;
    TileOrder order = p.order;
    GroupRange rows = {0, p.m}, terms = {0, p.k};
    if constexpr (config.split) {
      tile = blockIdx.x / p.splits;
      split = blockIdx.x - tile * p.splits;
    }
    if constexpr (config.grouping == kRaggedRows) {
      if (!find_group(tile, rows, order)) return;
    } else if constexpr (config.grouping != kUngrouped) {
      const unsigned tiles = order.row_tiles * order.column_tiles;
      group = static_cast<int>(tile / tiles);
      tile -= group * tiles;
      if constexpr (config.grouping == kRaggedSums) terms = group_range(p.offsets, group, p.k);
    }
    const TilePosition at = tile_position(order, tile);
    first_row = rows.begin + static_cast<int>(at.row) * config.block_m;
    end_row = rows.end;
    first_column = static_cast<int>(at.column) * kOutColumns;
    first_k = config.split ? static_cast<int>(split) * p.k_per_split : terms.begin;
    end_k = config.split ? min(first_k + p.k_per_split, p.k) : terms.end;

#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
      }
    }

    constexpr int kAhead = LoaderA::kAsync ? config.stages - 1 : 1;
    if constexpr (LoaderA::kAsync) {
#pragma unroll
      for (int stage = 0; stage < kAhead; ++stage) begin(stage, first_k + stage * config.block_k);
    } else {
      if (first_k < end_k) {
        begin(0, first_k);
        end(0);
      }
    }
    int stage = 0;
    for (int k = first_k; k < end_k; k += config.block_k) {
#if __CUDA_ARCH__ >= 800
      if constexpr (LoaderA::kAsync) cp_async_wait_group<kAhead - 1>();
#endif
      __syncthreads();
      const int next = stage + kAhead < config.stages ? stage + kAhead : stage + kAhead - config.stages;
      begin(next, k + kAhead * config.block_k);
      multiply(stage);
      if (!LoaderA::kAsync && k + config.block_k < end_k) end(next);
      stage = stage + 1 < config.stages ? stage + 1 : 0;
    }
    store(split);
  }
};

}  // namespace tessera
