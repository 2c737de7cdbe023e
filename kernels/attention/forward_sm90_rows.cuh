// The 64 query rows of a consumer of attention/forward_sm90.cuh and attention/forward_fp8_sm90.cuh: where they are, which
// keys they see, and where their results go.
#pragma once

#include "attention/forward_sm90_work_tile.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "tile/mask.h"
#include "tile/probability.cuh"
#include "tile/quad.cuh"
#include "tile/sequence.cuh"

namespace tessera {

__forceinline__ void store_16_if(void* address, const Words4& v, bool wanted) {  // address: a multiple of 16
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
      "}\n" ::"l"(address),
      "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3]), "r"(static_cast<int>(wanted))
      : "memory");
}
__forceinline__ void store_float_if(float* address, float v, bool wanted) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "@p st.global.f32 [%0], %1;\n"
      "}\n" ::"l"(address),
      "f"(v), "r"(static_cast<int>(wanted))
      : "memory");
}

template <auto config, class Params>
struct ForwardSm90Rows {
  using WorkTileInfo = ForwardSm90WorkTileInfo;

  const Params& p;
  int consumer;  // warp-uniform, and the compiler knows it
  int lane, warp;

  // Of the work tile whose scores are being computed.
  int first_q = 0;  // first row of this consumer
  int len_k = 0;
  int position_offset = 0;
  float slope = 0;

  __forceinline__ int first_row() const {
    return config.intra_cta_split ? 0 : consumer * kConsumerRows;
  }  // in the tile
  __forceinline__ int row_of(int half) const { return warp * 16 + half * 8 + lane / 4; }
  __forceinline__ int query_of(int half) const { return WorkTileInfo::query_at<config>(p, first_q + row_of(half)); }

  __forceinline__ void start(const WorkTileInfo& info) {
    first_q = info.first_q + first_row();
    len_k = info.len_k;
    position_offset = info.position_offset(p);
    if constexpr (config.score_mod) {
      slope = p.alibi_slopes ? p.alibi_slopes[info.batch * p.alibi_batch_stride + info.head] : 0.0f;
    }
  }

  // score_mod: a score in natural units, after softcap and ALiBi. i: of a lane's values of 8 keys.
  __forceinline__ void modify(float& score, float scale, int first_key, int i) const {
    modify_score(score, scale, p.softcap, slope,
                 query_of(i / 2) + position_offset - (first_key + lane % 4 * 2 + i % 2));
  }

  // Sets the scores of keys outside a row's band, or beyond the sequence, to -inf.
  template <int count>
  __forceinline__ void mask(float (&scores)[count], int first_k) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Interval<int> keys =
          visible_keys<config.masked, config.chunked>(p.band, query_of(half) + position_offset, len_k);
      // Relative to this lane's first key, so that every comparison is with a constant.
      const int begin = keys.begin - (first_k + lane % 4 * 2);
      const int end = keys.end - (first_k + lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < count / 4; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = n * 8 + i;
          if (key >= end || (config.masked && key < begin)) scores[n * 4 + half * 2 + i] = -infinity();
        }
      }
    }
  }

  // Divides O, which is in units of `unit`, by the row sums, total(half), and writes it and LSE. The lanes of a quad hold
  // a row in pieces of two columns; they exchange them so that each lane has 8 columns, 16 bytes, of one of four adjacent
  // tiles, and a quad writes 64 bytes. Few warps are resident, so latencies show: stores are predicated instead of
  // branched around, so that the compiler interleaves the exchanges.
  template <int count, class Total, class LogSumExp>
  __forceinline__ void store(const WorkTileInfo& info, const float (&output)[count], float unit, const Total& total,
                             const LogSumExp& log_sum_exp) const {
    constexpr int kValueTiles = count / 4;
    const int begin = p.cu_seqlens_q ? p.cu_seqlens_q[info.batch] : 0;
    const Index first_o = (p.cu_seqlens_q ? begin * p.o_strides.seq : info.batch * p.o_strides.batch) +
                          info.head * p.o_strides.head + lane % 4 * 8;
    const Index first_lse =
        (p.cu_seqlens_q ? begin : info.batch * p.lse_strides.batch) + info.head * p.lse_strides.head;
    float factor[2];
    Bits16* out[2];
    bool exists[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = info.first_q + first_row() + row_of(half);
      const int query = WorkTileInfo::query_at<config>(p, row);
      const int head = config.pack_gqa ? row - query * static_cast<int>(p.group) : 0;  // relative to info.head
      exists[half] = query < info.len_q;
      out[half] = static_cast<Bits16*>(p.o) + first_o + head * p.o_strides.head + query * p.o_strides.seq;
      const float sum = total(half);
      factor[half] = sum == 0.0f ? 0.0f : unit * fast_reciprocal(sum);
      store_float_if(p.lse + first_lse + head * p.lse_strides.head + query, log_sum_exp(sum, half),
                     p.lse != nullptr && lane % 4 == 0 && exists[half]);
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; n += 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Words4 words = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (n + j >= kValueTiles) continue;
          const float* const pair = output + (n + j) * 4 + half * 2;
          words.word[j] = pack<config.dtype>(pair[0] * factor[half], pair[1] * factor[half]);
        }
        transpose_quad(words.word, lane);
        store_16_if(out[half] + n * 8, words, exists[half] && n + lane % 4 < kValueTiles);
      }
    }
  }
};

}  // namespace tessera
