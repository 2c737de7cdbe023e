// Attention backward on mma.sync: one CTA computes dK and dV of block_k keys, and their contribution to dQ of all
// queries. Entry point: attention_backward, below.
//
// Algorithm: a CTA keeps K and V and loops over the queries in tiles of block_q, over all query heads that share its
// key head. Everything is computed transposed, keys by queries, so that the result of one product is the A operand of
// the next without leaving registers.
//
// Roles: half of the warps compute dV, the other half dK; a pair, one of each, shares 16 or 32 keys:
//
//   dV warp:     S^T = K Q^T,    P^T = exp(S^T - LSE) --weights-->    dV += P^T dO
//   dK warp:     dP^T = V dO^T,          dS^T = P^T (dP^T - delta)    dK += dS^T Q     --dS-->
//   then all:    dQ += dS K, each warp some rows and columns, added to fp32 sums in global memory
//
// They process a strip of 16 or 32 queries at a time, and a dK warp waits only for the weights of its strip. With two
// stages, the next Q and dO are loaded and S of the next tile starts while dQ is still being computed: one CTA-wide
// barrier per tile.
//
//   shared memory:  K [block_k, Dqk] (reused for dK)    V [block_k, Dv] (reused for dV)    P^T [block_k, block_q]
//                   dS^T, Q, dO, LSE and delta: [stages][...]    (BackwardLayout)
//
// Tiles: as many keys as registers allow for dK and dV, because every key tile reads all of Q and dO; kept_steps uses
// the registers that are left (docs/kernels/attention_backward.md).
//
// Deterministic mode: config.adds_dq is false, backward_dq.cuh computes dQ, and no result here depends on the order of
// execution.
#pragma once

#include "attention/backward_config.h"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/dq_sums.cuh"
#include "tile/mask.h"
#include "tile/probability.cuh"
#include "tile/products.cuh"
#include "tile/sequence.cuh"

namespace tessera {

template <AttentionBackwardConfig config>
struct AttentionBackward;

template <AttentionBackwardConfig config>
__forceinline__ void attention_backward(const AttentionBackwardParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  pdl_wait_and_launch_dependents();
  AttentionBackward<config> kernel{p, shared_address(shared)};
  kernel.run();
}

template <AttentionBackwardConfig config>
struct AttentionBackward {
  static constexpr DType kType = config.dtype;
  static constexpr int kThreads = config.warps * 32;
  static constexpr int kPairs = config.warps / 2;
  static constexpr int kRows = config.block_k / kPairs;  // keys per warp
  static constexpr int kRowTiles = kRows / 16;
  // Queries per strip: as many as make 16 values per lane; fewer if score_mod, which needs more registers per value.
  static constexpr int kWidest = kRows == 16 && !config.score_mod ? 32 : 16;
  static constexpr int kStrip = kWidest < config.block_q ? kWidest : config.block_q;
  static constexpr int kStrips = config.block_q / kStrip;
  static constexpr int kColumnTiles = kStrip / 8;
  static constexpr int kMaxDim = config.dim_qk > config.dim_v ? config.dim_qk : config.dim_v;
  static constexpr bool kDefersDq = config.adds_dq && config.stages == 2;  // until the next tile
  static constexpr BackwardLayout kLayout = backward_layout(config);
  static_assert(kRows == 16 || kRows == 32);
  static_assert(config.block_q % kStrip == 0 && kStrips < 16);  // a named barrier for each strip
  static_assert(2 * config.block_q <= kThreads);                // one thread for each row value

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

  // CTA-uniform values that are needed once per tile are kept in shared memory, because all registers are in use.
  enum Uniform { kBatch, kKvHead, kLenQ, kLenK, kFirstK, kPositionOffset, kFirstTile, kTiles };
  static_assert(kTiles < kBackwardUniforms);
  __forceinline__ int uniform(Uniform which) const { return load_shared_4(base + kLayout.uniforms + which * 4); }
  __forceinline__ void set_uniform(Uniform which, int value) const {
    store_shared_4(base + kLayout.uniforms + which * 4, value);
  }

  float sums[kRowTiles][kMaxDim / 8][4];                                       // of dV or dK
  unsigned kept[config.kept_steps > 0 ? config.kept_steps : 1][kRowTiles][4];  // of K's or V's rows

  TileLoader<TileQ, kThreads, config.vector> load_q;
  TileLoader<TileDo, kThreads, config.vector> load_d_o;
  ValueLoader<decltype(load_q)::kAsync> row_values;

  // A step of the main loop.
  struct QueryTile {
    int head;  // within the group
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
  // The weights of a pair: 16 bytes per lane for each 16 x 16.
  __forceinline__ unsigned weights_at(int strip, int row_tile, int k, int lane) const {
    const int tile = ((strip * kPairs + pair) * kRowTiles + row_tile) * (kColumnTiles / 2) + k;
    return base + kLayout.weights + tile * 512 + lane * 16;
  }
  // LSE or delta of this lane's columns.
  __forceinline__ void load_row_values(float (&values)[kColumnTiles][2], int strip, int stage, int which,
                                       int lane) const {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      load_shared_floats(values[n], rows_at(stage, which) + (strip * kStrip + n * 8 + lane % 4 * 2) * 4);
    }
  }

  template <class Tile>
  using Rows = RowOperand<Tile, kRowTiles, config.kept_steps>;
  __forceinline__ Rows<TileK> key_rows() { return {tile_k(), pair * kRows, kept}; }
  __forceinline__ Rows<TileV> value_rows() { return {tile_v(), pair * kRows, kept}; }

  __forceinline__ int head_of(const QueryTile& query_tile) const {
    return uniform(kKvHead) * p.group + query_tile.head;
  }
  __forceinline__ QueryTile next(QueryTile query_tile) const {
    return ++query_tile.tile < uniform(kFirstTile) + uniform(kTiles)
               ? query_tile
               : QueryTile{query_tile.head + 1, uniform(kFirstTile)};
  }
  __forceinline__ QueryTile before(QueryTile query_tile) const {
    return query_tile.tile > uniform(kFirstTile)
               ? QueryTile{query_tile.head, query_tile.tile - 1}
               : QueryTile{query_tile.head - 1, uniform(kFirstTile) + uniform(kTiles) - 1};
  }

  // Rows beyond the sequence are loaded as zeros, in dO too, so that they contribute nothing whatever their
  // probability.
  __forceinline__ void begin_load(const QueryTile& query_tile, int stage) {
    const int batch = uniform(kBatch);
    const int len_q = uniform(kLenQ);
    const int head = head_of(query_tile);
    const int first = query_tile.tile * config.block_q;
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

  // S^T to P^T, as the A operand of dV. The partner gets the weights of dS.
  __forceinline__ void exponentiate(Strip& x, Operand& a, int strip, int stage, int first_q, bool masked, float slope,
                                    float scale_log2) {
    const int lane = recomputed(this->lane);
    const int first_key = uniform(kFirstK) + pair * kRows + lane / 4;
    const int first_position = first_q + strip * kStrip + lane % 4 * 2 + uniform(kPositionOffset);
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
    if constexpr (config.score_mod) {
      for_all([&](int m, int n, int i, int key, int position) {
        factor[m][n][i] = modify_score(x[m][n][i], p.scale, p.softcap, slope, position - key);
      });
    }
    if (masked) {
      const int len_k = uniform(kLenK);
      for_all([&](int m, int n, int i, int key, int position) {
        if (!is_visible<config.masked>(p.band, position, key, len_k)) x[m][n][i] = -infinity();
      });
    }
    float lse[kColumnTiles][2];
    load_row_values(lse, strip, stage, 0, lane);
    for_all([&](int m, int n, int i, int, int) { x[m][n][i] = probability(x[m][n][i], scale_log2, lse[n][i % 2]); });
    Operand weights;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) pack_operand<kType>(a[m], x[m]);
    if constexpr (config.score_mod) {
      for_all([&](int m, int n, int i, int, int) { x[m][n][i] *= factor[m][n][i]; });
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) pack_operand<kType>(weights[m], x[m]);
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int k = 0; k < kColumnTiles / 2; ++k) {
        const auto& w = config.score_mod ? weights[m][k] : a[m][k];
        store_shared_16(weights_at(strip, m, k, lane), {w[0], w[1], w[2], w[3]});
      }
    }
    named_barrier_arrive(1 + strip, kThreads);
  }

  // dP^T - delta to dS^T, as the A operand of dK, and to shared memory for dQ.
  __forceinline__ void differentiate(Strip& x, Operand& a, int strip, int stage) {
    const int lane = recomputed(this->lane);
    named_barrier_sync(1 + strip, kThreads);
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

  // A tile's contribution to dV or dK: the first product of the next strip is interleaved with the second product of
  // this one. start_of(strip): initial value of the first product.
  template <class Own, class First, class Second, class StartOf, class ToOperand>
  __forceinline__ void loop_over_strips(const Own& own, const First& first, const Second& second,
                                        const StartOf& start_of, const ToOperand& to_operand) {
    Strip x;
    Operand a;
    rows_by_rows<kType, kStrips == 1>(x, own, first, 0, start_of(0), recomputed(lane));
#pragma unroll 1
    for (int strip = 0; strip + 1 < kStrips; ++strip) {
      to_operand(x, a, strip);
      both_products<kType>(x, own, first, (strip + 1) * kStrip, start_of(strip + 1), sums, a, second, strip * kStrip,
                           recomputed(lane));
    }
    to_operand(x, a, kStrips - 1);
    add_by_columns<kType>(sums, a, second, (kStrips - 1) * kStrip, recomputed(lane));
  }

  struct FromMinusColumns {
    float columns[kColumnTiles][2];
    __forceinline__ float operator()(int, int n, int i) const { return -columns[n][i % 2]; }
  };

  __forceinline__ void compute_dv(const QueryTile& query_tile, int stage, float scale_log2) {
    const int first_q = query_tile.tile * config.block_q;
    const int first_position = first_q + uniform(kPositionOffset);
    const int first_k = uniform(kFirstK);
    const int last_position = first_position + config.block_q - 1;
    const bool masked = first_k + config.block_k > uniform(kLenK) ||
                        (config.masked && (first_k < p.band.keys_of<false>(last_position).begin ||
                                           first_k + config.block_k > p.band.keys_of<false>(first_position).end));
    const float slope = config.score_mod && p.alibi_slopes
                            ? p.alibi_slopes[uniform(kBatch) * p.alibi_batch_stride + head_of(query_tile)]
                            : 0.0f;
    loop_over_strips(
        key_rows(), tile_q(stage), tile_d_o(stage), [](int) { return FromZero{}; },
        [&](Strip& x, Operand& a, int strip) { exponentiate(x, a, strip, stage, first_q, masked, slope, scale_log2); });
  }

  __forceinline__ void compute_dk(int stage) {
    loop_over_strips(
        value_rows(), tile_d_o(stage), tile_q(stage),
        [&](int strip) {
          FromMinusColumns delta;
          load_row_values(delta.columns, strip, stage, 1, recomputed(lane));
          return delta;
        },
        [&](Strip& x, Operand& a, int strip) { differentiate(x, a, strip, stage); });
  }

  __forceinline__ void compute_dq(const QueryTile& query_tile, int stage) {
    float* sums_of_tile = dq_sums_of(p.dq_sums, p.cu_seqlens_q, uniform(kBatch), head_of(query_tile), p.heads_q,
                                     config.block_q, config.dim_qk) +
                          static_cast<Index>(query_tile.tile) * (config.block_q * config.dim_qk);
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
                                     rows_of(out, strides, p.cu_seqlens_k, uniform(kBatch), uniform(kKvHead)),
                                     strides.seq, uniform(kFirstK), uniform(kLenK), lane);
  }

  __forceinline__ void run() {
    const unsigned heads_kv = p.heads_q / p.group;
    const unsigned batch_head = blockIdx.x / p.tiles;
    const int kv_head = batch_head % heads_kv;
    const int batch = batch_head / heads_kv;
    const int len_q = length_of(p.cu_seqlens_q, batch, p.seq_q);
    const int len_k = length_of(p.cu_seqlens_k, batch, p.seq_k);
    const int first_k = blockIdx.x % p.tiles * config.block_k;
    if (first_k >= len_k) return;
    const int position_offset = p.band.position_offset(len_q, len_k);
    const int last_k = min(first_k + config.block_k, len_k) - 1;
    const QueryTiles tiles = config.masked
                                 ? query_tiles(p.band, position_offset, first_k, last_k, len_q, config.block_q)
                                 : query_tiles(Interval<int>{0, len_q}, config.block_q);
    const int steps = tiles.count * p.group;
    set_uniform(kBatch, batch);
    set_uniform(kKvHead, kv_head);
    set_uniform(kLenQ, len_q);
    set_uniform(kLenK, len_k);
    set_uniform(kFirstK, first_k);
    set_uniform(kPositionOffset, position_offset);
    set_uniform(kFirstTile, tiles.first);
    set_uniform(kTiles, tiles.count);
    __syncthreads();

    // Reading threadIdx again in the loop would wait behind shared-memory accesses.
    lane = recomputed(threadIdx.x % 32);
    warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    pair = warp % kPairs;
    const bool computes_dv = warp < kPairs;
    const QueryTile first{0, tiles.first};
    if (steps > 0) prologue(first, steps, computes_dv, batch, kv_head, first_k, len_k);
    zero_sums();
    main_loop(first, steps, computes_dv);
    __syncthreads();  // the gradients reuse the shared memory of K and V
    if (computes_dv) {
      store(tile_v(), p.dv, p.dv_strides, 1.0f);
    } else {
      store(tile_k(), p.dk, p.dk_strides, p.scale);
    }
  }

  // Loads K, V and the first Q and dO, together, and keeps the first steps of K or V in registers.
  __forceinline__ void prologue(const QueryTile& first, int steps, bool computes_dv, int batch, int kv_head,
                                int first_k, int len_k) {
    TileLoader<TileK, kThreads, config.vector> load_k;
    TileLoader<TileV, kThreads, config.vector> load_v;
    load_k.begin(tile_k(), rows_of(p.k, p.k_strides, p.cu_seqlens_k, batch, kv_head), p.k_strides.seq, first_k, len_k);
    load_v.begin(tile_v(), rows_of(p.v, p.v_strides, p.cu_seqlens_k, batch, kv_head), p.v_strides.seq, first_k, len_k);
    begin_load(first, 0);
    load_k.end(tile_k());
    load_v.end(tile_v());
    end_load(0);
    __syncthreads();
    if (config.stages == 2 && steps > 1) begin_load(next(first), 1);
    if constexpr (config.kept_steps > 0) {
      if (computes_dv) {
        key_rows().keep(lane);
      } else {
        value_rows().keep(lane);
      }
      if (keeps_all_of_v(config)) __syncthreads();  // the weights reuse V's shared memory
    }
  }

  __forceinline__ void zero_sums() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kMaxDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0;
      }
    }
  }

  __forceinline__ void main_loop(QueryTile query_tile, int steps, bool computes_dv) {
    const float scale_log2 = (config.score_mod ? 1.0f : p.scale) * kLog2E;
    for (int step = 0; step < steps; ++step) {
      const int stage = config.stages == 2 ? step % 2 : 0;
      // dV warps are ahead of dK warps by a strip, so they compute the previous tile's dQ after this tile's strips and
      // the dK warps before.
#pragma unroll 1
      for (int phase = 0; phase < 2; ++phase) {
        if (computes_dv == (phase == 1)) {
          if (kDefersDq && step > 0) compute_dq(before(query_tile), 1 - stage);
        } else if (computes_dv) {
          compute_dv(query_tile, stage, scale_log2);
        } else {
          compute_dk(stage);
        }
      }
      if (config.stages == 2 && step + 1 < steps) end_load(1 - stage);
      __syncthreads();  // dS is written, Q and dO may be overwritten
      const bool more = step + config.stages < steps;
      if (more) begin_load(config.stages == 2 ? next(next(query_tile)) : next(query_tile), stage);
      if constexpr (config.stages == 1) {
        if constexpr (config.adds_dq) compute_dq(query_tile, 0);
        if (more) end_load(0);
        __syncthreads();  // the next Q and dO are loaded, dS may be overwritten
      }
      query_tile = next(query_tile);
    }
    if (kDefersDq && steps > 0) compute_dq(before(query_tile), (steps - 1) % 2);
  }
};

}  // namespace tessera
