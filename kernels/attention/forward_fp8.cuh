// Attention forward of e4m3 on mma.sync, for sm_89 and newer and every head dim that is a multiple of 16.
// Entry point: attention_forward_fp8, below.
//
// The pipeline is that of attention/forward.cuh: one CTA computes block_q queries of one head and loops over the keys in
// tiles of kScaleKeys, last tile first. Every warp owns 16 or 32 query rows from scores to output.
//
//   shared memory:  Q [block_q, Dqk] (reused for O)    K [keys, Dqk]    V [keys, Dv]
//
//   key tile j:     load V(j)     S = Q K(j)^T                            barrier: V(j) loaded, K(j) may be reused
//                   load K(j-1)   softmax(S), O = O * rescale + P V(j)    barrier: K(j-1) loaded, V(j) may be reused
//
// The second product needs no transposed V. Lane t of a quad has P of keys 2t, 2t+1, 2t+8 and 2t+9 of each 16: these are
// its four values of k in a word of A, whatever their order, if B has the same. ldmatrix.trans gives the lane the rows
// 2t and 2t+1 of V, two columns (16 bits) each; one byte permutation takes the even column from two such words, and one
// the odd column:
//
//   keys 2t, 2t+1:  (even, odd, even, odd)      even column of four keys: B of a product with every other column of V
//   keys + 8:       (even, odd, even, odd)  ->  odd column: B of another
//
// so a lane has four neighbouring columns of O.
#pragma once

#include "attention/forward_fp8_config.h"
#include "attention/fp8_softmax.cuh"
#include "ptx/convert.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_e4m3.cuh"
#include "tile/mask.h"
#include "tile/probability.cuh"
#include "tile/sequence.cuh"
#include "tile/shared_tile.cuh"

namespace tessera {

template <AttentionForwardFp8Config config>
struct AttentionForwardFp8;

template <AttentionForwardFp8Config config>
__forceinline__ void attention_forward_fp8(const AttentionForwardFp8Params& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Kernel = AttentionForwardFp8<config>;
  const unsigned base = shared_address(shared);
  constexpr unsigned kQueryBytes = forward_fp8_query_bytes(config);
  pdl_wait_and_launch_dependents();
  Kernel kernel{p, {base}, {base + kQueryBytes}, {base + kQueryBytes + Kernel::TileK::kBytes}, {base}};
  kernel.run();
}

template <AttentionForwardFp8Config config>
struct AttentionForwardFp8 {
  static constexpr int kThreads = config.warps * 32;
  static constexpr int kRowsPerWarp = config.block_q / config.warps;
  static constexpr int kRowTiles = kRowsPerWarp / 16;
  static constexpr int kBlockK = kScaleKeys;
  static constexpr int kKeyTiles = kBlockK / 8;
  static constexpr int kQkSteps = (config.dim_qk + 31) / 32;  // the last one is 16 deep if dim is an odd multiple of 16
  static constexpr int kPvSteps = kBlockK / 32;
  static constexpr int kColumnGroups = config.dim_v / 16;
  static constexpr int kVector = 8;  // 16 bytes
  static_assert(kRowsPerWarp == 16 || kRowsPerWarp == 32);
  static_assert(config.dim_qk % 16 == 0 && config.dim_v % 16 == 0);

  // For loads, e4m3 tensors are 16-bit tensors of half as many columns.
  using TileQ = SharedTile<config.block_q, fp8_columns(config.dim_qk)>;
  using TileK = SharedTile<kBlockK, fp8_columns(config.dim_qk)>;
  using TileV = SharedTile<kBlockK, fp8_columns(config.dim_v)>;
  using TileO = SharedTile<config.block_q, config.dim_v>;

  const AttentionForwardFp8Params& p;
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
  float q_factor;  // scale and Q's scale; in exp2 units, unless scores are modified
  const float* k_scales;
  const float* v_scales;
  float v_unit;  // of O: V's scale

  float scores[kRowTiles][kKeyTiles * 4];
  float output[kRowTiles][kColumnGroups][2][4];  // [..][even and odd columns][value of a lane]
  Fp8Softmax<kKeyTiles, 1> softmax[kRowTiles];

  // Query (within the sequence) of a lane's accumulator row.
  __forceinline__ int query_of(int row_tile, int half) const {
    return first_q + warp * kRowsPerWarp + row_tile * 16 + half * 8 + lane / 4;
  }

  __forceinline__ void multiply_queries_with_keys() {
    const int lane = recomputed(this->lane);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kKeyTiles * 4; ++i) scores[m][i] = 0;
    }
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      const bool whole = 2 * step + 1 < TileQ::kChunks;
      unsigned a[kRowTiles][4] = {};
      const unsigned from_q = tile_q.address(warp * kRowsPerWarp + lane % 16, whole ? 2 * step + lane / 16 : 2 * step);
      const unsigned from_k = whole ? tile_k.address(lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2)
                                    : tile_k.address(lane % 16, 2 * step);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if (whole) {
          ldmatrix_x4(a[m], from_q + m * 16 * TileQ::kPitch);
        } else {
          ldmatrix_x2(reinterpret_cast<unsigned(&)[2]>(a[m]), from_q + m * 16 * TileQ::kPitch);
        }
      }
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        unsigned b[4] = {};
        if (whole) {
          ldmatrix_x4(b, from_k + n * 8 * TileK::kPitch);
        } else {
          unsigned loaded[2];
          ldmatrix_x2(loaded, from_k + n * 8 * TileK::kPitch);
          b[0] = loaded[0], b[2] = loaded[1];
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          mma_e4m3_k32(reinterpret_cast<float(&)[4]>(scores[m][n * 4]), a[m], b[0], b[1]);
          mma_e4m3_k32(reinterpret_cast<float(&)[4]>(scores[m][n * 4 + 4]), a[m], b[2], b[3]);
        }
      }
    }
  }

  // score_mod: the scores in natural units, after softcap and ALiBi.
  __forceinline__ void modify_scores(int first_k, float factor) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kKeyTiles * 4; ++i) {
        const int key = first_k + i / 4 * 8 + lane % 4 * 2 + i % 2;
        modify_score(scores[m][i], factor, p.softcap, slope, query_of(m, i / 2 % 2) + position_offset - key);
      }
    }
  }

  // Sets the scores of keys outside a row's band, or beyond the sequence, to -inf.
  __forceinline__ void mask_scores(int first_k) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Interval<int> keys = visible_keys<config.masked>(p.band, query_of(m, half) + position_offset, len_k);
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = first_k + n * 8 + lane % 4 * 2 + i;
            if (!keys.contains(key)) scores[m][n * 4 + half * 2 + i] = -infinity();
          }
        }
      }
    }
  }

  // Scores to probabilities; O is rescaled if references were raised, or V's scale is another one.
  __forceinline__ void online_softmax(int first_k, bool masked) {
    float factor[1] = {q_factor * k_scales[first_k >> p.k_scale.shift]};
    if constexpr (config.score_mod) {
      modify_scores(first_k, factor[0]);
      factor[0] = kLog2E;
    }
    if (masked) mask_scores(first_k);
    float change = 1;
    if constexpr (config.v_blocks) {
      const float v_scale = v_scales[first_k >> p.v_scale.shift];
      if (v_scale != v_unit) change = v_unit / v_scale;  // exact if V's scales are powers of two
      v_unit = v_scale;
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      float rescale[2] = {1, 1};
      const bool grown = softmax[m].update(scores[m], factor, true, rescale, [] {});
      if (!grown && change == 1) continue;
#pragma unroll
      for (int c = 0; c < kColumnGroups; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) output[m][c][i / 4][i % 4] *= rescale[i / 2 % 2] * change;
      }
    }
  }

  // The tensor cores truncate sums, which makes long ones smaller: they add to O themselves only where registers are short.
  static __forceinline__ void add_products(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (config.dim_v > 128) {
      mma_e4m3_k32(sums, a, b[0], b[1]);
    } else {
      float products[4] = {};
      mma_e4m3_k32(products, a, b[0], b[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += products[i];
    }
  }
  __forceinline__ void multiply_probabilities_with_values() {
    constexpr unsigned kEven = 0x6420, kOdd = 0x7531;
    const int lane = recomputed(this->lane);
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) {
      unsigned a[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* const s = scores[m] + step * 16 + i / 2 * 8 + i % 2 * 2;
          a[m][i] = pack_e4m3(s[0], s[1], s[4], s[5]);
        }
      }
#pragma unroll
      for (int c = 0; c < kColumnGroups; ++c) {
        unsigned v[4];  // of keys 0 to 7, 8 to 15, 16 to 23, 24 to 31
        ldmatrix_x4_trans(v, tile_v.address(lane, c) + step * 32 * TileV::kPitch);
        const unsigned even[2] = {__byte_perm(v[0], v[1], kEven), __byte_perm(v[2], v[3], kEven)};
        const unsigned odd[2] = {__byte_perm(v[0], v[1], kOdd), __byte_perm(v[2], v[3], kOdd)};
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          add_products(output[m][c][0], a[m], even);
          add_products(output[m][c][1], a[m], odd);
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
        const float sum = softmax[m].total(half);
        const float inverse = sum == 0.0f ? 0.0f : v_unit / sum;
        const int row = warp * kRowsPerWarp + m * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int c = 0; c < kColumnGroups; ++c) {
          const float(&even)[4] = output[m][c][0];
          const float(&odd)[4] = output[m][c][1];
          const unsigned at = tile_o.address(row, 2 * c + lane % 4 / 2) + lane % 2 * 8;
          store_shared_4(at, pack<config.dtype>(even[half * 2] * inverse, odd[half * 2] * inverse));
          store_shared_4(at + 4, pack<config.dtype>(even[half * 2 + 1] * inverse, odd[half * 2 + 1] * inverse));
        }
        const int query = first_q + row;
        if (p.lse && lane % 4 == 0 && query < len_q) {
          p.lse[offset_of(p.lse_strides, p.cu_seqlens_q, batch, head) + query] = softmax[m].log_sum_exp(sum, half);
        }
      }
    }
    __syncwarp();
    store_rows<kVector, kRowsPerWarp>(tile_o, warp * kRowsPerWarp,
                                      rows_of(p.o, p.o_strides, p.cu_seqlens_q, batch, head), p.o_strides.seq, first_q,
                                      len_q, lane);
  }

  __forceinline__ void run() {
    // If the mask is causal, later queries see more keys, so their CTAs come first.
    const unsigned batch_head = blockIdx.x / p.q_tiles;
    head = batch_head % p.heads_q;
    batch = batch_head / p.heads_q;
    len_q = length_of(p.cu_seqlens_q, batch, p.seq_q);
    len_k = length_of(p.cu_seqlens_k, batch, p.seq_k);
    first_q = (p.q_tiles - 1 - blockIdx.x % p.q_tiles) * config.block_q;
    if (first_q >= len_q) return;
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    position_offset = p.band.position_offset(len_q, len_k);
    slope = config.score_mod && p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] : 0.0f;

    const int last_q = min(first_q + config.block_q, len_q) - 1;
    const KeyRange keys = key_range<config.masked>(p.band, first_q + position_offset, last_q + position_offset, len_k);
    const int first_tile = keys.first_tile(kBlockK);
    const int end_tile = keys.end_tile(kBlockK);

    const int key_head = head / p.group;
    const Bits16* const q = rows_of(p.q, p.q_strides, p.cu_seqlens_q, batch, head);
    const Bits16* const k = rows_of(p.k, p.k_strides, p.cu_seqlens_k, batch, key_head);
    const Bits16* const v = rows_of(p.v, p.v_strides, p.cu_seqlens_k, batch, key_head);
    k_scales = p.k_scale.of(batch, key_head);
    v_scales = p.v_scale.of(batch, key_head);
    q_factor = 0;
    v_unit = 1;

#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      softmax[m].reset();
#pragma unroll
      for (int c = 0; c < kColumnGroups; ++c) {
#pragma unroll
        for (int i = 0; i < 8; ++i) output[m][c][i / 4][i % 4] = 0;
      }
    }

    TileLoader<TileQ, kThreads, kVector> load_q;
    TileLoader<TileK, kThreads, kVector> load_k;
    TileLoader<TileV, kThreads, kVector> load_v;
    if (end_tile > first_tile) {
      load_q.begin(tile_q, q, p.q_strides.seq, first_q, len_q);
      load_q.end(tile_q);
      load_k.begin(tile_k, k, p.k_strides.seq, (end_tile - 1) * kBlockK, len_k);
      // A warp's rows have one scale. Rows beyond the sequence have none.
      const int row = min(first_q + warp * kRowsPerWarp, len_q - 1);
      q_factor = p.q_scale.of(batch, head)[row >> p.q_scale.shift] * p.scale * (config.score_mod ? 1.0f : kLog2E);
      v_unit = v_scales[((end_tile - 1) * kBlockK) >> p.v_scale.shift];
    }
    for (int tile = end_tile - 1; tile >= first_tile; --tile) {
      const int first_k = tile * kBlockK;
      load_k.end(tile_k);
      __syncthreads();
      load_v.begin(tile_v, v, p.v_strides.seq, first_k, len_k);
      multiply_queries_with_keys();
      load_v.end(tile_v);
      __syncthreads();
      if (tile > first_tile) load_k.begin(tile_k, k, p.k_strides.seq, first_k - kBlockK, len_k);
      online_softmax(first_k, keys.is_masked(first_k, kBlockK));
      multiply_probabilities_with_values();
    }
    __syncthreads();  // O reuses Q's shared memory
    store();
  }
};

}  // namespace tessera
