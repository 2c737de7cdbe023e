// Attention forward on mma.sync, for every architecture since Turing and every head dim that is a multiple of 8.
// Entry point: attention_forward, below.
//
// Algorithm: FlashAttention with an online softmax. One CTA computes block_q queries of one head and loops over the
// keys in tiles of block_k, last tile first. Every warp has the same role: it owns 16 or 32 query rows from scores to
// output, and their scores, probabilities and output never leave its registers.
//
//   shared memory:  Q [block_q, Dqk] (reused for O)    K [block_k, Dqk]    V [block_k, Dv]
//
//   key tile j:     load V(j)     S = Q K(j)^T                            barrier: V(j) loaded, K(j) may be reused
//                   load K(j-1)   softmax(S), O = O * rescale + P V(j)    barrier: K(j-1) loaded, V(j) may be reused
//
// Fully masked tiles are never loaded; only partially masked tiles are masked score by score.
//
// K and V may be a KV cache (cache): lengths, the cache's row, left padding and pages are then read from device memory
// when the CTA starts, and with pages (paged) each row's address comes from the page table.
//
// Tiles: one K and one V tile in shared memory are enough, because each is loaded while the other is in use, and the
// remaining shared memory goes to larger tiles or more CTAs per SM (docs/kernels/attention_forward.md).
#pragma once

#include "attention/forward_config.h"
#include "ptx/convert.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "tile/kv_cache.cuh"
#include "tile/mask.h"
#include "tile/online_softmax.cuh"
#include "tile/probability.cuh"
#include "tile/products.cuh"
#include "tile/sequence.cuh"
#include "tile/shared_tile.cuh"

namespace tessera {

template <AttentionForwardConfig config>
struct AttentionForward;

template <AttentionForwardConfig config>
__forceinline__ void attention_forward(const AttentionForwardParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Kernel = AttentionForward<config>;
  const unsigned base = shared_address(shared);
  constexpr unsigned kQueryBytes =
      Kernel::TileQ::kBytes > Kernel::TileO::kBytes ? Kernel::TileQ::kBytes : Kernel::TileO::kBytes;
  pdl_wait_and_launch_dependents();
  Kernel kernel{p, {base}, {base + kQueryBytes}, {base + kQueryBytes + Kernel::TileK::kBytes}, {base}};
  kernel.run();
}

template <AttentionForwardConfig config>
struct AttentionForward {
  static constexpr DType kType = config.dtype;
  static constexpr int kThreads = config.warps * 32;
  static constexpr int kRowsPerWarp = config.block_q / config.warps;
  static constexpr int kRowTiles = kRowsPerWarp / 16;
  static constexpr int kKeyTiles = config.block_k / 8;
  static constexpr int kValueTiles = config.dim_v / 8;
  static_assert(kRowsPerWarp == 16 || kRowsPerWarp == 32);
  static_assert(config.block_k % 16 == 0);

  using TileQ = SharedTile<config.block_q, config.dim_qk>;
  using TileK = SharedTile<config.block_k, config.dim_qk>;
  using TileV = SharedTile<config.block_k, config.dim_v>;
  using TileO = SharedTile<config.block_q, config.dim_v>;

  const AttentionForwardParams& p;
  TileQ tile_q;
  TileK tile_k;
  TileV tile_v;
  TileO tile_o;

  int lane, warp;
  int batch, head;
  int len_q, len_k;
  int first_q;          // of this CTA
  int position_offset;  // query i is at position i + position_offset
  float slope;
  int leftpad = 0;  // cache: rows before key 0

  float scores[kRowTiles][kKeyTiles][4];
  float output[kRowTiles][kValueTiles][4];
  OnlineSoftmax<kKeyTiles, kRowTiles> softmax;

  // Query (within the sequence) of a lane's accumulator row.
  __forceinline__ int query_of(int row_tile, int half) const {
    return first_q + warp * kRowsPerWarp + row_tile * 16 + half * 8 + lane / 4;
  }

  __forceinline__ void multiply_queries_with_keys() {
    unsigned none[1][kRowTiles][4];
    const RowOperand<TileQ, kRowTiles, 0> queries{tile_q, warp * kRowsPerWarp, none};
    rows_by_rows<kType, config.in_halves>(scores, queries, tile_k, 0, FromZero{}, recomputed(lane));
  }

  // score_mod: the scores in natural units, after softcap and ALiBi.
  __forceinline__ void modify_scores(int first_k) {
    if constexpr (config.score_mod) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = first_k + n * 8 + lane % 4 * 2 + i % 2;
            modify_score(scores[m][n][i], p.scale, p.softcap, slope, query_of(m, i / 2) + position_offset - key);
          }
        }
      }
    }
  }

  // Sets the scores of keys outside a row's band, or beyond the sequence, to -inf.
  __forceinline__ void mask_scores(int first_k) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Interval<int> keys =
            visible_keys<config.masked, config.chunked>(p.band, query_of(m, half) + position_offset, len_k);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = first_k + n * 8 + lane % 4 * 2 + i;
            if (!keys.contains(key)) scores[m][n][half * 2 + i] = -infinity();
          }
        }
      }
    }
  }

  // Scores to probabilities.
  __forceinline__ void online_softmax() {
    auto& rows = reinterpret_cast<float(&)[kRowTiles][kKeyTiles * 4]>(scores);
    softmax.raise_references(rows, [&](int m, int half, float factor) {
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        output[m][n][half * 2] *= factor;
        output[m][n][half * 2 + 1] *= factor;
      }
    });
    softmax.template exponentiate<false>(rows);
  }

  __forceinline__ void multiply_probabilities_with_values() {
    const int lane = recomputed(this->lane);
#pragma unroll
    for (int step = 0; step < config.block_k / 16; ++step) {
      unsigned a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const float(&left)[4] = scores[m][2 * step];
        const float(&right)[4] = scores[m][2 * step + 1];
        a[m][0] = pack<kType>(left[0], left[1]);
        a[m][1] = pack<kType>(left[2], left[3]);
        a[m][2] = pack<kType>(right[0], right[1]);
        a[m][3] = pack<kType>(right[2], right[3]);
      }
#pragma unroll
      for (int n = 0; n < kValueTiles; n += 2) {
        const unsigned from_v = tile_v.address(lane % 16, n + (n + 1 < kValueTiles ? lane / 16 : 0));
        if (n + 1 < kValueTiles) {
          unsigned b[4];
          ldmatrix_x4_trans(b, from_v + step * 16 * TileV::kPitch);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_k16<kType>(output[m][n], a[m], b[0], b[1]);
            mma_k16<kType>(output[m][n + 1], a[m], b[2], b[3]);
          }
        } else {
          unsigned b[2];
          ldmatrix_x2_trans(b, from_v + step * 16 * TileV::kPitch);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) mma_k16<kType>(output[m][n], a[m], b[0], b[1]);
        }
      }
    }
  }

  // Divides by the row sums and writes O and LSE. O goes through shared memory, each warp its own rows, so that stores
  // to global memory are full rows.
  __forceinline__ void store() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = softmax.total(m, half);
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int row = warp * kRowsPerWarp + m * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
          store_shared_4(tile_o.address(row, n) + lane % 4 * 4,
                         pack<kType>(output[m][n][half * 2] * inverse, output[m][n][half * 2 + 1] * inverse));
        }
        const int query = first_q + row;
        if (p.lse && lane % 4 == 0 && query < len_q) {
          p.lse[offset_of(p.lse_strides, p.cu_seqlens_q, batch, head) + query] = softmax.log_sum_exp(sum, m, half);
        }
      }
    }
    __syncwarp();
    store_rows<config.vector, kRowsPerWarp>(tile_o, warp * kRowsPerWarp,
                                            rows_of(p.o, p.o_strides, p.cu_seqlens_q, batch, head), p.o_strides.seq,
                                            first_q, len_q, lane);
  }

  // The row of key 0, or, paged, row 0 of page 0.
  __forceinline__ const Bits16* keys_of(const void* data, const Strides& strides, const CachedSequence& cached) const {
    if constexpr (config.paged) {
      return static_cast<const Bits16*>(data) + head / p.group * strides.head;
    } else if constexpr (config.cache) {
      return rows_of(data, strides, nullptr, cached.row, head / p.group) + cached.leftpad * strides.seq;
    } else {
      return rows_of(data, strides, p.cu_seqlens_k, batch, head / p.group);
    }
  }

  // Starts to load a tile of K or V. source: of keys_of.
  template <class Loader, class Tile>
  __forceinline__ void load(Loader& loader, const Tile& tile, const Bits16* source, const Strides& strides,
                            int first_k) const {
    if constexpr (config.paged) {
      const PagedRows rows{p.cache, source, strides, p.cache.page_table + batch * p.cache.page_table_stride, leftpad};
      loader.begin(
          tile, [&](int row, bool wanted) { return rows.row(row, wanted); }, first_k, len_k);
    } else {
      loader.begin(tile, source, strides.seq, first_k, len_k);
    }
  }

  __forceinline__ void run() {
    // If the mask is causal, later queries see more keys, so their CTAs come first.
    const unsigned batch_head = blockIdx.x / p.q_tiles;
    head = batch_head % p.heads_q;
    batch = batch_head / p.heads_q;
    len_q = length_of(p.cu_seqlens_q, batch, p.seq_q);
    if constexpr (!config.cache) len_k = length_of(p.cu_seqlens_k, batch, p.seq_k);
    first_q = (p.q_tiles - 1 - blockIdx.x % p.q_tiles) * config.block_q;
    CachedSequence cached;
    if constexpr (config.cache) {
      cached = cached_sequence(p.cache, batch);
      len_k = cached.length;
      leftpad = cached.leftpad;
      if (p.cache.status && head == 0 && first_q == 0 && threadIdx.x == 0) p.cache.status[batch] = cached.refused;
    }
    if (first_q >= len_q) return;
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    position_offset = p.band.position_offset(len_q, len_k);
    slope = config.score_mod && p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] : 0.0f;

    const int last_q = min(first_q + config.block_q, len_q) - 1;
    const KeyRange keys =
        key_range<config.masked, config.chunked>(p.band, first_q + position_offset, last_q + position_offset, len_k);
    const int first_tile = keys.first_tile(config.block_k);
    const int end_tile = keys.end_tile(config.block_k);

    const Bits16* q = rows_of(p.q, p.q_strides, p.cu_seqlens_q, batch, head);
    const Bits16* k = keys_of(p.k, p.k_strides, cached);
    const Bits16* v = keys_of(p.v, p.v_strides, cached);

#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[m][n][i] = 0;
      }
    }

    softmax.reset();
    softmax.scale_log2 = (config.score_mod ? 1.0f : p.scale) * kLog2E;
    TileLoader<TileQ, kThreads, config.vector> load_q;
    TileLoader<TileK, kThreads, config.vector> load_k;
    TileLoader<TileV, kThreads, config.vector> load_v;
    if (end_tile > first_tile) {
      load_q.begin(tile_q, q, p.q_strides.seq, first_q, len_q);
      load_q.end(tile_q);
      load(load_k, tile_k, k, p.k_strides, (end_tile - 1) * config.block_k);
    }
    for (int tile = end_tile - 1; tile >= first_tile; --tile) {
      const int first_k = tile * config.block_k;
      load_k.end(tile_k);
      __syncthreads();
      load(load_v, tile_v, v, p.v_strides, first_k);
      multiply_queries_with_keys();
      load_v.end(tile_v);
      __syncthreads();
      if (tile > first_tile) load(load_k, tile_k, k, p.k_strides, first_k - config.block_k);
      modify_scores(first_k);
      if (keys.is_masked(first_k, config.block_k)) mask_scores(first_k);
      online_softmax();
      multiply_probabilities_with_values();
    }
    __syncthreads();  // O reuses Q's shared memory
    store();
  }
};

}  // namespace tessera
