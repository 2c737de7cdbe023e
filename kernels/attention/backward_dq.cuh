// dQ on mma.sync for the deterministic backward: the scores are computed a second time so that no two CTAs add to the
// same element. Entry point: backward_dq, below.
//
// A CTA keeps Q and dO of block_q queries and loops over the keys in tiles of block_k. Every warp has the same role: it
// owns 16 or 32 queries, and processes a strip of 16 or 32 keys at a time:
//
//   S = Q K^T,  dP = dO V^T,  dS = exp(S - LSE) (dP - delta),  dQ += dS K
//
//   shared memory:  Q [block_q, Dqk] (reused for dQ)    dO [block_q, Dv]    K, V: [stages][block_k, ...]
//
// With two stages, the next K and V are loaded while the current ones are in use.
#pragma once

#include "attention/backward_dq_config.h"
#include "ptx/griddepcontrol.cuh"
#include "tile/mask.h"
#include "tile/probability.cuh"
#include "tile/products.cuh"
#include "tile/sequence.cuh"

namespace tessera {

template <BackwardDqConfig config>
struct BackwardDq;

template <BackwardDqConfig config>
__forceinline__ void backward_dq(const AttentionBackwardParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_wait_and_launch_dependents();
  BackwardDq<config> kernel{p, shared_address(shared)};
  kernel.run();
}

template <BackwardDqConfig config>
struct BackwardDq {
  static constexpr DType kType = config.dtype;
  static constexpr int kThreads = config.warps * 32;
  static constexpr int kRows = config.block_q / config.warps;
  static constexpr int kRowTiles = kRows / 16;
  static_assert(kRows == 16 || kRows == 32);

  using TileQ = SharedTile<config.block_q, config.dim_qk>;
  using TileDo = SharedTile<config.block_q, config.dim_v>;
  using TileK = SharedTile<config.block_k, config.dim_qk>;
  using TileV = SharedTile<config.block_k, config.dim_v>;
  // Keys per strip: as many as make 16 values per lane; fewer if score_mod, which needs more registers per value.
  static constexpr int kWidest = kRows == 16 && !config.score_mod ? 32 : 16;
  static constexpr int kStrip = kWidest < config.block_k ? kWidest : config.block_k;
  using Strip = float[kRowTiles][kStrip / 8][4];
  using Operand = unsigned[kRowTiles][kStrip / 16][4];
  static_assert(config.block_k % kStrip == 0);
  static constexpr int kStageBytes = TileK::kBytes + TileV::kBytes;

  const AttentionBackwardParams& p;
  unsigned base;  // of shared memory: Q, dO, then stages of K and V

  int lane, warp;
  int batch, head;
  int len_q, len_k;
  int first_q;
  int position_offset;
  float slope;

  float lse[kRowTiles][2];
  float delta[kRowTiles][2];
  float sums[kRowTiles][config.dim_qk / 8][4];

  TileLoader<TileK, kThreads, config.vector> load_k;
  TileLoader<TileV, kThreads, config.vector> load_v;

  __forceinline__ TileQ tile_q() const { return {base}; }
  __forceinline__ TileDo tile_d_o() const { return {base + TileQ::kBytes}; }
  __forceinline__ TileK tile_k(int stage) const {
    return {base + TileQ::kBytes + TileDo::kBytes + stage * kStageBytes};
  }
  __forceinline__ TileV tile_v(int stage) const { return {tile_k(stage).base + TileK::kBytes}; }

  // With one stage there is nothing to compute meanwhile: loads through registers then take one tile at a time, to save
  // registers.
  static constexpr bool kOneAtATime = !decltype(load_v)::kAsync && config.stages == 1;

  __forceinline__ void begin_load(int first_k, int stage) {
    if (kOneAtATime) return;
    begin_load_k(first_k, stage);
    begin_load_v(first_k, stage);
  }
  __forceinline__ void end_load(int first_k, int stage) {
    if (kOneAtATime) begin_load_k(first_k, stage);
    load_k.end(tile_k(stage));
    if (kOneAtATime) begin_load_v(first_k, stage);
    load_v.end(tile_v(stage));
  }
  __forceinline__ void begin_load_k(int first_k, int stage) {
    load_k.begin(tile_k(stage), rows_of(p.k, p.k_strides, p.cu_seqlens_k, batch, head / p.group), p.k_strides.seq,
                 first_k, len_k);
  }
  __forceinline__ void begin_load_v(int first_k, int stage) {
    load_v.begin(tile_v(stage), rows_of(p.v, p.v_strides, p.cu_seqlens_k, batch, head / p.group), p.v_strides.seq,
                 first_k, len_k);
  }

  template <class Tile>
  using Rows = RowOperand<Tile, kRowTiles, 0>;

  // s: S, ds: dP - delta. a: dS as the A operand of dQ.
  __forceinline__ void differentiate(Strip& s, Strip& ds, Operand& a, int first_key, bool masked, float scale_log2) {
    const int first_position = first_q + warp * kRows + lane / 4 + position_offset;
    first_key += lane % 4 * 2;
    const auto for_all = [&](auto&& visit) {  // visit(m, n, i, key, position)
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kStrip / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) visit(m, n, i, first_key + n * 8 + i % 2, first_position + m * 16 + i / 2 * 8);
        }
      }
    };
    if constexpr (config.score_mod) {
      for_all([&](int m, int n, int i, int key, int position) {
        ds[m][n][i] *= modify_score(s[m][n][i], p.scale, p.softcap, slope, position - key);
      });
    }
    if (masked) {
      Interval<int> keys[kRowTiles][2];
#pragma unroll
      for (int row = 0; row < kRowTiles * 2; ++row) {
        keys[row / 2][row % 2] = visible_keys<config.masked>(p.band, first_position + row * 8, len_k);
      }
      for_all([&](int m, int n, int i, int key, int) {
        if (!keys[m][i / 2].contains(key)) s[m][n][i] = -infinity();
      });
    }
    for_all([&](int m, int n, int i, int, int) { ds[m][n][i] *= probability(s[m][n][i], scale_log2, lse[m][i / 2]); });
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) pack_operand<kType>(a[m], ds[m]);
  }

  __forceinline__ void loop_over_strips(int stage, int first_k, bool masked, float scale_log2) {
    unsigned none[1][kRowTiles][4];
    const Rows<TileQ> queries{tile_q(), warp * kRows, none};
    const Rows<TileDo> gradients{tile_d_o(), warp * kRows, none};
#pragma unroll 1
    for (int row = 0; row < config.block_k; row += kStrip) {
      const int lane = recomputed(this->lane);
      Strip s, ds;
      Operand a;
      rows_by_rows<kType, false>(s, queries, tile_k(stage), row, FromZero{}, lane);
      rows_by_rows<kType, false>(
          ds, gradients, tile_v(stage), row, [&](int m, int, int i) { return -delta[m][i / 2]; }, lane);
      differentiate(s, ds, a, first_k + row, masked, scale_log2);
      add_by_columns<kType>(sums, a, tile_k(stage), row, lane);
    }
  }

  __forceinline__ void store() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = warp * kRows + m * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < TileQ::kChunks; ++n) {
          store_shared_4(tile_q().address(row, n) + lane % 4 * 4,
                         pack<kType>(sums[m][n][half * 2] * p.scale, sums[m][n][half * 2 + 1] * p.scale));
        }
      }
    }
    __syncwarp();
    store_rows<config.vector, kRows>(tile_q(), warp * kRows, rows_of(p.dq, p.dq_strides, p.cu_seqlens_q, batch, head),
                                     p.dq_strides.seq, first_q, len_q, lane);
  }

  __forceinline__ void run() {
    // If the mask is causal, later queries see more keys, so their CTAs come first.
    const unsigned batch_head = blockIdx.x / p.tiles;
    head = batch_head % p.heads_q;
    batch = batch_head / p.heads_q;
    len_q = length_of(p.cu_seqlens_q, batch, p.seq_q);
    len_k = length_of(p.cu_seqlens_k, batch, p.seq_k);
    first_q = (p.tiles - 1 - blockIdx.x % p.tiles) * config.block_q;
    if (first_q >= len_q) return;
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    position_offset = p.band.position_offset(len_q, len_k);
    slope = config.score_mod && p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] : 0.0f;

    const int last_q = min(first_q + config.block_q, len_q) - 1;
    const KeyRange keys = key_range<config.masked>(p.band, first_q + position_offset, last_q + position_offset, len_k);
    const int first_tile = keys.first_tile(config.block_k);
    const int end_tile = keys.end_tile(config.block_k);

    const Index rows_at = offset_of(p.row_strides, p.cu_seqlens_q, batch, head);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_q + warp * kRows + m * 16 + half * 8 + lane / 4;
        const float row_lse = load_read_only(p.lse_log2 + rows_at + row, row < len_q);
        lse[m][half] = row < len_q ? row_lse : infinity();
        delta[m][half] = load_read_only(p.delta + rows_at + row, row < len_q);
      }
#pragma unroll
      for (int n = 0; n < TileQ::kChunks; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
      }
    }

    if (end_tile > first_tile) {
      TileLoader<TileQ, kThreads, config.vector> load_q;
      load_q.begin(tile_q(), rows_of(p.q, p.q_strides, p.cu_seqlens_q, batch, head), p.q_strides.seq, first_q, len_q);
      load_q.end(tile_q());
      TileLoader<TileDo, kThreads, config.vector> load_d_o;
      load_d_o.begin(tile_d_o(), rows_of(p.d_o, p.d_o_strides, p.cu_seqlens_q, batch, head), p.d_o_strides.seq, first_q,
                     len_q);
      load_d_o.end(tile_d_o());
      begin_load(first_tile * config.block_k, 0);
    }
    const float scale_log2 = (config.score_mod ? 1.0f : p.scale) * kLog2E;
    for (int tile = first_tile; tile < end_tile; ++tile) {
      const int stage = config.stages == 2 ? (tile - first_tile) % 2 : 0;
      const int first_k = tile * config.block_k;
      end_load(first_k, stage);
      __syncthreads();  // this K and V are loaded; with two stages, the previous ones may be overwritten
      if (config.stages == 2 && tile + 1 < end_tile) begin_load(first_k + config.block_k, 1 - stage);
      const bool masked = keys.is_masked(first_k, config.block_k);
      loop_over_strips(stage, first_k, masked, scale_log2);
      if (config.stages == 1 && tile + 1 < end_tile) {
        __syncthreads();
        begin_load(first_k + config.block_k, 0);
      }
    }
    __syncwarp();  // a warp's dQ reuses the shared memory of its own Q
    store();
  }
};

}  // namespace tessera
