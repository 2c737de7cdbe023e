// Joins the partial results of attention over slices of the keys:
//
//   LSE = log sum_s exp(lse_s),   O = sum_s exp(lse_s - LSE) * o_s
//
// Bound by memory: splits * (4 * Dv + 4) bytes read a row, 2 * Dv + 4 written. `lanes_per_row` threads stand side by
// side on a row, 16 bytes each; `split_groups` such groups take every split_groups-th split, so that a decode step with
// few rows still keeps the SMs loading; `rows_per_block` rows share a block. Each thread keeps an online softmax over
// its splits (running maximum m, sum l, accumulator o), `unroll` splits loaded before one is used, and the groups of a
// row are joined through shared memory:
//
//   shared: m[groups], l[groups], o[threads][vector]
//
// An empty split has lse = -inf and may leave its o unwritten: its weight is 0 and its o never enters a sum. Where all
// are empty, O = 0 and LSE = -inf.
#pragma once

#include "contract/split_combine.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"

namespace tessera {

// 64-bit division takes some seventy instructions; nearly every tensor fits the short one.
__forceinline__ Index divide(Index a, Index b) {
  if (((a | b) >> 32) == 0) return static_cast<unsigned>(a) / static_cast<unsigned>(b);
  return a / b;
}

// exp(lse - maximum), 0 where lse is -inf, also where maximum is. A NaN stays one.
__forceinline__ float split_weight(float lse, float maximum) {
  return lse == -infinity() ? 0.0f : fast_exp2((lse - maximum) * kLog2E);
}

template <int kVector>
__forceinline__ void load_floats(const float* address, bool wanted, float (&out)[kVector]) {
  if constexpr (kVector == 4) {
    const Words4 words = load_streaming_16(address, wanted);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = float_from_bits(words.word[i]);
  } else {
    out[0] = load_read_only(address, wanted);
  }
}

template <SplitCombineConfig config>
__forceinline__ void split_combine(const SplitCombineParams& p) {
  constexpr int kVector = config.vector;
  constexpr int kUnroll = config.unroll;
  static_assert(kVector == 4 || kVector == 1);

  __shared__ float shared_m[config.threads];
  __shared__ float shared_l[config.threads];
  __shared__ float shared_o[config.threads][kVector];

  follow_grids_before();
  const unsigned lane = threadIdx.x % p.lanes_per_row;
  const unsigned group = threadIdx.x / p.lanes_per_row;
  const unsigned split_group = group % p.split_groups;
  const unsigned row_in_block = group / p.split_groups;
  const Index row = static_cast<Index>(blockIdx.x) * p.rows_per_block + row_in_block;
  const Index column = (static_cast<Index>(blockIdx.y) * p.lanes_per_row + lane) * kVector;
  const bool active = row_in_block < p.rows_per_block && row < p.rows && column < p.head_dim;

  float m = -infinity();
  float l = 0;
  float o[kVector] = {};
  if (active) {
    const float* lse = p.lse_partial + row;
    const float* partial = p.o_partial + row * p.head_dim + column;
    const Index partial_stride = p.rows * p.head_dim;
    for (unsigned begin = split_group; begin < p.splits; begin += kUnroll * p.split_groups) {
      float split_lse[kUnroll];
      float split_o[kUnroll][kVector];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const Index split = begin + u * p.split_groups;
        const bool wanted = split < p.splits;
        const float loaded = load_read_only(lse + split * p.rows, wanted);
        split_lse[u] = wanted ? loaded : -infinity();
        load_floats<kVector>(partial + split * partial_stride, wanted, split_o[u]);
      }
      float maximum = m;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) maximum = fmaxf(maximum, split_lse[u]);
      const float keep = split_weight(m, maximum);
      m = maximum;
      l *= keep;
#pragma unroll
      for (int i = 0; i < kVector; ++i) o[i] *= keep;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const float weight = split_weight(split_lse[u], maximum);
        l += weight;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          // A product with weight 0 would let a NaN of an unwritten o through.
          o[i] = weight == 0.0f ? o[i] : o[i] + weight * split_o[u][i];
        }
      }
    }
  }

  shared_m[threadIdx.x] = m;
  shared_l[threadIdx.x] = l;
#pragma unroll
  for (int i = 0; i < kVector; ++i) shared_o[threadIdx.x][i] = o[i];
  __syncthreads();
  if (!active || split_group != 0) return;

  for (unsigned g = 1; g < p.split_groups; ++g) m = fmaxf(m, shared_m[threadIdx.x + g * p.lanes_per_row]);
  l = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) o[i] = 0;
  for (unsigned g = 0; g < p.split_groups; ++g) {
    const unsigned other = threadIdx.x + g * p.lanes_per_row;
    const float weight = split_weight(shared_m[other], m);
    l += weight * shared_l[other];
#pragma unroll
    for (int i = 0; i < kVector; ++i) o[i] += weight * shared_o[other][i];
  }

  // l is at least the largest split's weight, 1, but where every split is empty, when it is 0.
  const float scale = l == 0.0f ? 0.0f : fast_reciprocal(l);
  const Index batch_head = divide(row, p.seq);
  const Index seq = row - batch_head * p.seq;
  const Index batch = divide(batch_head, p.heads);
  const Index head = batch_head - batch * p.heads;
  Bits16* out =
      static_cast<Bits16*>(p.o) + batch * p.o_strides.batch + seq * p.o_strides.seq + head * p.o_strides.head + column;
  if constexpr (kVector == 4) {
    store_8(out,
            Words2{{pack<config.dtype>(o[0] * scale, o[1] * scale), pack<config.dtype>(o[2] * scale, o[3] * scale)}});
  } else {
    *out = from_float<config.dtype>(o[0] * scale);
  }
  if (p.lse && column == 0) {
    p.lse[batch * p.lse_strides.batch + head * p.lse_strides.head + seq] =
        l == 0.0f ? -infinity() : m + fast_log2(l) * kLn2;
  }
}

}  // namespace tessera
