// Attention backward on mma.sync: dK and dV of block_k keys in one block, and their share of every query's dQ.
//
// A block keeps K and V and walks over the queries in tiles of block_q, over all query heads that share its key head.
// Everything is computed transposed, keys by queries, so that what leaves one product enters the next from registers.
// Half of the warps make dV, the other half dK; a pair, one of each, shares 16 or 32 keys:
//
//   dV warp:   S^T = K Q^T,   P^T = exp(S^T - LSE) --weights-->   dV += P^T dO
//   dK warp:   dP^T = V dO^T,         dS^T = P^T (dP^T - delta)   dK += dS^T Q     --dS-->
//   then all:  dQ += dS K, each warp some rows and columns, added to fp32 sums in global memory
//
// A strip of 16 or 32 queries at a time; dK warps wait for the weights of just those. With two stages, the next Q and
// dO arrive and the next tile's S begins while dQ is still being made: one barrier a tile.
//
// Deterministic: config.adds_dq is false, dQ comes of backward_dq.cuh, and nothing here depends on an order.
#pragma once

#include "contract/attention_backward.h"
#include "ptx/barrier.cuh"
#include "ptx/grid.cuh"
#include "tile/dq_sums.cuh"
#include "tile/probability.cuh"
#include "tile/products.cuh"
#include "tile/sequence.cuh"

namespace tessera {

template <AttentionBackwardConfig config>
struct AttentionBackward {
  static constexpr DType kType = config.dtype;
  static constexpr int kThreads = config.warps * 32;
  static constexpr int kPairs = config.warps / 2;
  static constexpr int kRows = config.block_k / kPairs;  // keys of a warp
  static constexpr int kRowTiles = kRows / 16;
  // Queries at a time: as many as make 16 values a lane; fewer where that can be and each needs more registers.
  static constexpr int kWidest = kRows == 16 && !config.general ? 32 : 16;
  static constexpr int kStrip = kWidest < config.block_q ? kWidest : config.block_q;
  static constexpr int kStrips = config.block_q / kStrip;
  static constexpr int kColumnTiles = kStrip / 8;
  static constexpr int kMaxDim = config.dim_qk > config.dim_v ? config.dim_qk : config.dim_v;
  static constexpr bool kDefersDq = config.adds_dq && config.stages == 2;  // until the next tile
  static constexpr BackwardLayout kLayout = backward_layout(config);
  static_assert(kRows == 16 || kRows == 32);
  static_assert(config.block_q % kStrip == 0 && kStrips < 16);  // a named barrier for each strip
  static_assert(2 * config.block_q <= kThreads);                // a thread for each row value

  using TileK = SharedTile<config.block_k, config.dim_qk>;
  using TileV = SharedTile<config.block_k, config.dim_v>;
  using TileQ = SharedTile<config.block_q, config.dim_qk>;
  using TileDo = SharedTile<config.block_q, config.dim_v>;
  using TileDs = SharedTile<config.block_k, config.block_q>;
  using Strip = float[kRowTiles][kColumnTiles][4];
  using Operand = unsigned[kRowTiles][kColumnTiles / 2][4];  // a strip, rounded

  const AttentionBackwardParams& p;
  unsigned base;  // of shared memory

  int lane, warp, pair;

  // What a block needs to know once a tile: kept in shared memory, since every register is taken.
  enum Fact { kBatch, kKvHead, kLenQ, kLenK, kFirstK, kPositionOffset, kFirstTile, kTiles };
  static_assert(kTiles < kBackwardFacts);
  __forceinline__ int fact(Fact which) const { return load_shared_4(base + kLayout.facts + which * 4); }
  __forceinline__ void know(Fact which, int value) const { store_shared_4(base + kLayout.facts + which * 4, value); }

  float sums[kRowTiles][kMaxDim / 8][4];                                       // of dV or dK
  unsigned kept[config.kept_steps > 0 ? config.kept_steps : 1][kRowTiles][4];  // of K's or V's rows

  TileLoader<TileQ, kThreads, config.vector> load_q;
  TileLoader<TileDo, kThreads, config.vector> load_d_o;
  ValueLoader<decltype(load_q)::kAsync> row_values;

  // A step of the walk.
  struct Place {
    int head;  // of the group
    int tile;
  };

  __forceinline__ TileK tile_k() const { return {base + kLayout.k}; }
  __forceinline__ TileV tile_v() const { return {base + kLayout.v}; }
  __forceinline__ TileQ tile_q(int stage) const { return {base + kLayout.q + stage * TileQ::kBytes}; }
  __forceinline__ TileDo tile_d_o(int stage) const { return {base + kLayout.d_o + stage * TileDo::kBytes}; }
  __forceinline__ TileDs tile_ds(int stage) const { return {base + kLayout.ds + stage * TileDs::kBytes}; }
  __forceinline__ unsigned rows_at(int stage, int which) const {
    return base + kLayout.rows + (stage * 2 + which) * config.block_q * 4;
  }
  // A pair's weights, 16 bytes a lane for each 16 x 16.
  __forceinline__ unsigned weights_at(int strip, int row_tile, int k, int lane) const {
    const int tile = ((strip * kPairs + pair) * kRowTiles + row_tile) * (kColumnTiles / 2) + k;
    return base + kLayout.weights + tile * 512 + lane * 16;
  }
  // LSE or delta of a lane's columns.
  __forceinline__ void load_row_values(float (&values)[kColumnTiles][2], int strip, int stage, int which,
                                       int lane) const {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      load_shared_floats(values[n], rows_at(stage, which) + (strip * kStrip + n * 8 + lane % 4 * 2) * 4);
    }
  }

  template <class Tile>
  using Rows = RowOperand<Tile, kRowTiles, config.kept_steps>;
  __forceinline__ Rows<TileK> keys() { return {tile_k(), pair * kRows, kept}; }
  __forceinline__ Rows<TileV> values() { return {tile_v(), pair * kRows, kept}; }

  __forceinline__ int head_of(const Place& place) const { return fact(kKvHead) * p.group + place.head; }
  __forceinline__ Place next(Place place) const {
    return ++place.tile < fact(kFirstTile) + fact(kTiles) ? place : Place{place.head + 1, fact(kFirstTile)};
  }
  __forceinline__ Place before(Place place) const {
    return place.tile > fact(kFirstTile) ? Place{place.head, place.tile - 1}
                                         : Place{place.head - 1, fact(kFirstTile) + fact(kTiles) - 1};
  }

  // Rows that are not there come as zeros, dO's too: whatever probability they get, it adds nothing.
  __forceinline__ void begin_load(const Place& place, int stage) {
    const int batch = fact(kBatch);
    const int len_q = fact(kLenQ);
    const int head = head_of(place);
    const int first = place.tile * config.block_q;
    const int row = first + threadIdx.x % config.block_q;
    row_values.begin(rows_at(stage, 0) + threadIdx.x * 4,
                     (threadIdx.x < config.block_q ? p.lse_log2 : p.delta) +
                         offset_of(p.row_strides, p.cu_seqlens_q, batch, head) + row,
                     threadIdx.x < 2 * config.block_q, row < len_q);
    load_q.begin(tile_q(stage), rows_of(p.q, p.q_strides, p.cu_seqlens_q, batch, head), p.q_strides.seq, first, len_q);
    load_d_o.begin(tile_d_o(stage), rows_of(p.d_o, p.d_o_strides, p.cu_seqlens_q, batch, head), p.d_o_strides.seq,
                   first, len_q);
  }

  __forceinline__ void end_load(int stage) {
    load_q.end(tile_q(stage));
    load_d_o.end(tile_d_o(stage));
    row_values.end(rows_at(stage, 0) + threadIdx.x * 4, threadIdx.x < 2 * config.block_q);
  }

  // S^T to P^T, as the first operand of dV; the weights of dS go to the partner.
  __forceinline__ void exponentiate(Strip& x, Operand& a, int strip, int stage, int first_q, bool masked, float slope,
                                    float scale_log2) {
    const int lane = recomputed(this->lane);
    const int first_key = fact(kFirstK) + pair * kRows + lane / 4;
    const int first_position = first_q + strip * kStrip + lane % 4 * 2 + fact(kPositionOffset);
    const auto for_all = [&](auto&& visit) {  // visit(m, n, i, key, position)
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) visit(m, n, i, first_key + m * 16 + i / 2 * 8, first_position + n * 8 + i % 2);
        }
      }
    };
    Strip factor;
    if constexpr (config.general) {
      for_all([&](int m, int n, int i, int key, int position) {
        factor[m][n][i] = transform_score(x[m][n][i], p.scale, p.softcap, slope, position - key);
      });
    }
    if (masked) {
      const int len_k = fact(kLenK);
      for_all([&](int m, int n, int i, int key, int position) {
        if (!is_visible<config.banded>(key, position, len_k, p.band)) x[m][n][i] = -infinity();
      });
    }
    float lse[kColumnTiles][2];
    load_row_values(lse, strip, stage, 0, lane);
    for_all([&](int m, int n, int i, int, int) { x[m][n][i] = probability(x[m][n][i], scale_log2, lse[n][i % 2]); });
    Operand weights;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) pack_operand<kType>(a[m], x[m]);
    if constexpr (config.general) {
      for_all([&](int m, int n, int i, int, int) { x[m][n][i] *= factor[m][n][i]; });
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) pack_operand<kType>(weights[m], x[m]);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kColumnTiles / 2; ++k) {
        const auto& w = config.general ? weights[m][k] : a[m][k];
        store_shared_16(weights_at(strip, m, k, lane), {w[0], w[1], w[2], w[3]});
      }
    }
    barrier_arrive(1 + strip, kThreads);
  }

  // dP^T - delta to dS^T, as the first operand of dK, and to shared memory for dQ.
  __forceinline__ void differentiate(Strip& x, Operand& a, int strip, int stage) {
    const int lane = recomputed(this->lane);
    barrier_wait(1 + strip, kThreads);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kColumnTiles / 2; ++k) {
        const Words4 weights = load_shared_16(weights_at(strip, m, k, lane));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float(&values)[4] = x[m][2 * k + i / 2];
          values[i % 2 * 2] *= low_to_float<kType>(weights.word[i]);
          values[i % 2 * 2 + 1] *= high_to_float<kType>(weights.word[i]);
        }
      }
      pack_operand<kType>(a[m], x[m]);
      if constexpr (config.adds_dq) {
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = pair * kRows + m * 16 + half * 8 + lane / 4;
            store_shared_4(tile_ds(stage).address(row, strip * kColumnTiles + n) + lane % 4 * 4,
                           a[m][n / 2][n % 2 * 2 + half]);
          }
        }
      }
    }
  }

  // A tile's part of dV or dK: the next strip's first product is made while this one is added up. start_of(strip): what
  // the first product starts from.
  template <class Own, class First, class Second, class StartOf, class Turn>
  __forceinline__ void walk_strips(const Own& own, const First& first, const Second& second, const StartOf& start_of,
                                   const Turn& turn_into_operand) {
    Strip x;
    Operand a;
    rows_by_rows<kType, kStrips == 1>(x, own, first, 0, start_of(0), recomputed(lane));
#pragma unroll 1
    for (int strip = 0; strip + 1 < kStrips; ++strip) {
      turn_into_operand(x, a, strip);
      both_products<kType>(x, own, first, (strip + 1) * kStrip, start_of(strip + 1), sums, a, second, strip * kStrip,
                           recomputed(lane));
    }
    turn_into_operand(x, a, kStrips - 1);
    add_by_columns<kType>(sums, a, second, (kStrips - 1) * kStrip, recomputed(lane));
  }

  struct FromMinusColumns {
    float columns[kColumnTiles][2];
    __forceinline__ float operator()(int, int n, int i) const { return -columns[n][i % 2]; }
  };

  __forceinline__ void walk_for_dv(const Place& place, int stage, float scale_log2) {
    const int first_q = place.tile * config.block_q;
    const int first_position = first_q + fact(kPositionOffset);
    const int first_k = fact(kFirstK);
    const bool masked = first_k + config.block_k > fact(kLenK) ||
                        (config.banded && (first_k < first_position + config.block_q - 1 - p.band.left ||
                                           first_k + config.block_k - 1 > first_position + p.band.right));
    const float slope =
        config.general && p.alibi_slopes ? p.alibi_slopes[fact(kBatch) * p.alibi_batch_stride + head_of(place)] : 0.0f;
    walk_strips(
        keys(), tile_q(stage), tile_d_o(stage), [](int) { return FromZero{}; },
        [&](Strip& x, Operand& a, int strip) { exponentiate(x, a, strip, stage, first_q, masked, slope, scale_log2); });
  }

  __forceinline__ void walk_for_dk(int stage) {
    walk_strips(
        values(), tile_d_o(stage), tile_q(stage),
        [&](int strip) {
          FromMinusColumns delta;
          load_row_values(delta.columns, strip, stage, 1, recomputed(lane));
          return delta;
        },
        [&](Strip& x, Operand& a, int strip) { differentiate(x, a, strip, stage); });
  }

  __forceinline__ void make_dq(const Place& place, int stage) {
    float* sums_of_tile =
        dq_sums_of(p.dq_sums, p.cu_seqlens_q, fact(kBatch), head_of(place), p.heads_q, config.block_q, config.dim_qk) +
        static_cast<Index>(place.tile) * (config.block_q * config.dim_qk);
    add_dq<kType, config.block_q, config.warps, config.dq_unroll>(tile_ds(stage), tile_k(), sums_of_tile, warp,
                                                                  recomputed(lane));
  }

  template <class Tile>
  __forceinline__ void store(const Tile& tile, void* out, const Strides& strides, float factor) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = pair * kRows + m * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < Tile::kChunks; ++n) {
          store_shared_4(tile.address(row, n) + lane % 4 * 4,
                         pack<kType>(sums[m][n][half * 2] * factor, sums[m][n][half * 2 + 1] * factor));
        }
      }
    }
    __syncwarp();
    store_rows<config.vector, kRows>(tile, pair * kRows,
                                     rows_of(out, strides, p.cu_seqlens_k, fact(kBatch), fact(kKvHead)), strides.seq,
                                     fact(kFirstK), fact(kLenK), lane);
  }

  __forceinline__ void run() {
    const unsigned heads_kv = p.heads_q / p.group;
    const unsigned block = blockIdx.x / p.tiles;
    const int kv_head = block % heads_kv;
    const int batch = block / heads_kv;
    const int len_q = length_of(p.cu_seqlens_q, batch, p.seq_q);
    const int len_k = length_of(p.cu_seqlens_k, batch, p.seq_k);
    const int first_k = blockIdx.x % p.tiles * config.block_k;
    if (first_k >= len_k) return;
    const int position_offset = p.band.bottom_right ? len_k - len_q : 0;

    // Queries that see some key of this block.
    int seen_begin = 0, seen_end = len_q;
    if constexpr (config.banded) {
      const int last_k = min(first_k + config.block_k, len_k) - 1;
      seen_begin = max(0, first_k - p.band.right - position_offset);
      seen_end = min(len_q, last_k + p.band.left - position_offset + 1);
    }
    const int first_tile = seen_begin / config.block_q;
    const int tiles = seen_end > seen_begin ? (seen_end - 1) / config.block_q + 1 - first_tile : 0;
    const int steps = tiles * p.group;
    know(kBatch, batch);
    know(kKvHead, kv_head);
    know(kLenQ, len_q);
    know(kLenK, len_k);
    know(kFirstK, first_k);
    know(kPositionOffset, position_offset);
    know(kFirstTile, first_tile);
    know(kTiles, tiles);
    __syncthreads();

    // Reading threadIdx again in the loop would queue behind shared memory.
    lane = recomputed(threadIdx.x % 32);
    warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    pair = warp % kPairs;
    const bool makes_dv = warp < kPairs;

    Place place{0, first_tile};
    if (steps > 0) {
      TileLoader<TileK, kThreads, config.vector> load_k;
      TileLoader<TileV, kThreads, config.vector> load_v;
      load_k.begin(tile_k(), rows_of(p.k, p.k_strides, p.cu_seqlens_k, batch, kv_head), p.k_strides.seq, first_k,
                   len_k);
      load_v.begin(tile_v(), rows_of(p.v, p.v_strides, p.cu_seqlens_k, batch, kv_head), p.v_strides.seq, first_k,
                   len_k);
      begin_load(place, 0);
      load_k.end(tile_k());
      load_v.end(tile_v());
      end_load(0);
      __syncthreads();
      if (config.stages == 2 && steps > 1) begin_load(next(place), 1);
      if constexpr (config.kept_steps > 0) {
        if (makes_dv) {
          keys().keep(lane);
        } else {
          values().keep(lane);
        }
        if (keeps_all_of_v(config)) __syncthreads();  // the weights take its place
      }
    }

#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kMaxDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
      }
    }
    const float scale_log2 = (config.general ? 1.0f : p.scale) * kLog2E;
    for (int step = 0; step < steps; ++step) {
      const int stage = config.stages == 2 ? step % 2 : 0;
      // dV warps are ahead of dK warps by a strip: they come to the last tile's dQ late, the others early.
#pragma unroll 1
      for (int turn = 0; turn < 2; ++turn) {
        if (makes_dv == (turn == 1)) {
          if (kDefersDq && step > 0) make_dq(before(place), 1 - stage);
        } else if (makes_dv) {
          walk_for_dv(place, stage, scale_log2);
        } else {
          walk_for_dk(stage);
        }
      }
      if (config.stages == 2 && step + 1 < steps) end_load(1 - stage);
      __syncthreads();  // dS is there, Q and dO are used up
      const bool more = step + config.stages < steps;
      if (more) begin_load(config.stages == 2 ? next(next(place)) : next(place), stage);
      if constexpr (config.stages == 1) {
        if constexpr (config.adds_dq) make_dq(place, 0);
        if (more) end_load(0);
        __syncthreads();  // the next Q and dO are there, dS is used up
      }
      place = next(place);
    }
    if (kDefersDq && steps > 0) make_dq(before(place), (steps - 1) % 2);
    __syncthreads();  // gradients take the place of K and V
    if (makes_dv) {
      store(tile_v(), p.dv, p.dv_strides, 1.0f);
    } else {
      store(tile_k(), p.dk, p.dk_strides, p.scale);
    }
  }
};

template <AttentionBackwardConfig config>
__forceinline__ void attention_backward(const AttentionBackwardParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  follow_grids_before();
  AttentionBackward<config> kernel{p, shared_address(shared)};
  kernel.run();
}

}  // namespace tessera
