// Attention forward on mma.sync, for every architecture since Turing and every head dim that is a multiple of 8.
//
// One block takes block_q queries of one head and walks over the keys in tiles of block_k, last tile first. A warp owns
// 16 or 32 query rows from end to end: its scores, probabilities and output never leave its registers.
//
//   shared:   Q [block_q, Dqk] (O on the way out)   K [block_k, Dqk]   V [block_k, Dv]
//
//   tile j:   V(j) on its way  | S = Q K(j)^T                      barrier: V(j) is there, K(j) is used up
//             K(j-1) on its way| softmax(S), O = O * decay + P V(j)  barrier: K(j-1) is there, V(j) is used up
//
// The softmax is online. Tiles that the mask empties are never loaded; only tiles that the mask cuts through pay for
// it.
#pragma once

#include "contract/attention_forward.h"
#include "ptx/convert.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "tile/band.cuh"
#include "tile/probability.cuh"
#include "tile/products.cuh"
#include "tile/sequence.cuh"
#include "tile/shared_tile.cuh"

namespace tessera {

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
  int first_q;          // of this block
  int position_offset;  // query i stands at key i + position_offset
  float slope;

  float scores[kRowTiles][kKeyTiles][4];
  float output[kRowTiles][kValueTiles][4];
  float reference[kRowTiles][2];  // what a row's exponents are taken relative to
  float row_sum[kRowTiles][2];    // this lane's share; summed over the quad at the end

  // Query (within the sequence) of a lane's accumulator row.
  __forceinline__ int query_of(int row_tile, int half) const {
    return first_q + warp * kRowsPerWarp + row_tile * 16 + half * 8 + lane / 4;
  }

  __forceinline__ void multiply_queries_with_keys() {
    unsigned none[1][kRowTiles][4];
    const RowOperand<TileQ, kRowTiles, 0> queries{tile_q, warp * kRowsPerWarp, none};
    rows_by_rows<kType, config.in_halves>(scores, queries, tile_k, 0, FromZero{}, recomputed(lane));
  }

  // Scores in natural units, where more is asked than a positive scale.
  __forceinline__ void transform_scores(int first_k) {
    if constexpr (config.general) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = first_k + n * 8 + lane % 4 * 2 + i % 2;
            transform_score(scores[m][n][i], p.scale, p.softcap, slope, query_of(m, i / 2) + position_offset - key);
          }
        }
      }
    }
  }

  // Keys outside a row's band, or beyond the sequence, get -inf.
  __forceinline__ void mask_scores(int first_k) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int begin = 0;
        int end = len_k;
        if constexpr (config.banded) {
          const int position = query_of(m, half) + position_offset;
          begin = position - p.band.left;
          end = min(len_k, position + p.band.right + 1);
        }
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = first_k + n * 8 + lane % 4 * 2 + i;
            if (key < begin || key >= end) scores[m][n][half * 2 + i] = -infinity();
          }
        }
      }
    }
  }

  // Turns scores into probabilities relative to the row's reference, which follows the running maximum lazily: while no
  // score exceeds it by more than 2^kSlack, exp2 stays small enough for any 16-bit type and nothing summed before has
  // to be scaled. What the reference is cancels out in the end.
  __forceinline__ void online_softmax(float scale_log2) {
    constexpr float kSlack = 8.0f;
    float largest[kRowTiles][2];
    bool grown = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float tile_max = -infinity();
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          tile_max = fmaxf(tile_max, fmaxf(scores[m][n][half * 2], scores[m][n][half * 2 + 1]));
        }
        tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
        tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
        largest[m][half] = tile_max;
        grown |= (tile_max - reference[m][half]) * scale_log2 > kSlack;
      }
    }
    if (__any_sync(0xffffffffu, grown)) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float next = fmaxf(reference[m][half], largest[m][half]);
          // Both -inf: no key seen yet, and nothing to scale.
          const float decay = next == -infinity() ? 1.0f : fast_exp2((reference[m][half] - next) * scale_log2);
          reference[m][half] = next;
          row_sum[m][half] *= decay;
#pragma unroll
          for (int n = 0; n < kValueTiles; ++n) {
            output[m][n][half * 2] *= decay;
            output[m][n][half * 2 + 1] *= decay;
          }
        }
      }
    }
    // One FMA a score takes the reference out: s * scale - shift, the product unrounded. What the rounding of `shift`
    // adds is the same for all scores of a row and leaves with the row sum; only where it could be more than one, and 2
    // to its power overflow, is the reference taken out before the product.
    bool fused = true;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) fused &= fabsf(shift_of(m, half, scale_log2)) < (1 << 24);
    }
    fused = __all_sync(0xffffffffu, fused);
    if (!fused) subtract_references();
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float shift = fused ? shift_of(m, half, scale_log2) : 0.0f;
        float sum = row_sum[m][half];
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& s = scores[m][n][half * 2 + i];
            s = fast_exp2(s * scale_log2 - shift);
            sum += s;
          }
        }
        row_sum[m][half] = sum;
      }
    }
  }

  // The reference in units of exp2. A row that has seen no key: any finite number keeps exp2(-inf - it) at 0.
  __forceinline__ float shift_of(int m, int half, float scale_log2) const {
    return reference[m][half] == -infinity() ? 0.0f : reference[m][half] * scale_log2;
  }

  __forceinline__ void subtract_references() {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (reference[m][i / 2] != -infinity()) scores[m][n][i] -= reference[m][i / 2];
        }
      }
    }
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
          load_matrix_x4_transposed(b, from_v + step * 16 * TileV::kPitch);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_k16<kType>(output[m][n], a[m], b[0], b[1]);
            mma_k16<kType>(output[m][n + 1], a[m], b[2], b[3]);
          }
        } else {
          unsigned b[2];
          load_matrix_x2_transposed(b, from_v + step * 16 * TileV::kPitch);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) mma_k16<kType>(output[m][n], a[m], b[0], b[1]);
        }
      }
    }
  }

  // Divides by the row sums and writes O and LSE. O goes through shared memory, each warp its own rows, so that global
  // memory sees whole rows.
  __forceinline__ void store(float scale_log2) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = row_sum[m][half];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        const int row = warp * kRowsPerWarp + m * 16 + half * 8 + lane / 4;
#pragma unroll
        for (int n = 0; n < kValueTiles; ++n) {
          store_shared_4(tile_o.address(row, n) + lane % 4 * 4,
                         pack<kType>(output[m][n][half * 2] * inverse, output[m][n][half * 2 + 1] * inverse));
        }
        const int query = first_q + row;
        if (p.lse && lane % 4 == 0 && query < len_q) {
          p.lse[offset_of(p.lse_strides, p.cu_seqlens_q, batch, head) + query] =
              sum == 0.0f ? -infinity() : (shift_of(m, half, scale_log2) + fast_log2(sum)) * kLn2;
        }
      }
    }
    __syncwarp();
    store_rows<config.vector, kRowsPerWarp>(tile_o, warp * kRowsPerWarp,
                                            rows_of(p.o, p.o_strides, p.cu_seqlens_q, batch, head), p.o_strides.seq,
                                            first_q, len_q, lane);
  }

  __forceinline__ void run() {
    // Later queries see more keys where the mask is causal: they start first.
    const unsigned block = blockIdx.x / p.q_tiles;
    head = block % p.heads_q;
    batch = block / p.heads_q;
    len_q = length_of(p.cu_seqlens_q, batch, p.seq_q);
    len_k = length_of(p.cu_seqlens_k, batch, p.seq_k);
    first_q = (p.q_tiles - 1 - blockIdx.x % p.q_tiles) * config.block_q;
    if (first_q >= len_q) return;
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    position_offset = p.band.bottom_right ? len_k - len_q : 0;
    slope = config.general && p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] : 0.0f;

    const KeyTiles keys = key_tiles<config.banded>(p.band, first_q, config.block_q, config.block_k, len_q, len_k);

    const Bits16* q = rows_of(p.q, p.q_strides, p.cu_seqlens_q, batch, head);
    const Bits16* k = rows_of(p.k, p.k_strides, p.cu_seqlens_k, batch, head / p.group);
    const Bits16* v = rows_of(p.v, p.v_strides, p.cu_seqlens_k, batch, head / p.group);

#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -infinity();
        row_sum[m][half] = 0;
      }
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[m][n][i] = 0;
      }
    }

    const float scale_log2 = (config.general ? 1.0f : p.scale) * kLog2E;
    TileLoader<TileQ, kThreads, config.vector> load_q;
    TileLoader<TileK, kThreads, config.vector> load_k;
    TileLoader<TileV, kThreads, config.vector> load_v;
    if (keys.end > keys.begin) {
      load_q.begin(tile_q, q, p.q_strides.seq, first_q, len_q);
      load_q.end(tile_q);
      load_k.begin(tile_k, k, p.k_strides.seq, (keys.end - 1) * config.block_k, len_k);
    }
    for (int tile = keys.end - 1; tile >= keys.begin; --tile) {
      const int first_k = tile * config.block_k;
      load_k.end(tile_k);
      __syncthreads();
      load_v.begin(tile_v, v, p.v_strides.seq, first_k, len_k);
      multiply_queries_with_keys();
      load_v.end(tile_v);
      __syncthreads();
      if (tile > keys.begin) load_k.begin(tile_k, k, p.k_strides.seq, first_k - config.block_k, len_k);
      transform_scores(first_k);
      if (keys.is_masked(first_k, config.block_k)) mask_scores(first_k);
      online_softmax(scale_log2);
      multiply_probabilities_with_values();
    }
    __syncthreads();  // O takes Q's place
    store(scale_log2);
  }
};

template <AttentionForwardConfig config>
__forceinline__ void attention_forward(const AttentionForwardParams& p) {
  extern __shared__ __align__(128) unsigned char shared[];
  using Kernel = AttentionForward<config>;
  const unsigned base = shared_address(shared);
  constexpr unsigned kQueryBytes =
      Kernel::TileQ::kBytes > Kernel::TileO::kBytes ? Kernel::TileQ::kBytes : Kernel::TileO::kBytes;
  follow_grids_before();
  Kernel kernel{p, {base}, {base + kQueryBytes}, {base + kQueryBytes + Kernel::TileK::kBytes}, {base}};
  kernel.run();
}

}  // namespace tessera
