// Combines the partial results of attention over splits of the keys:
//
//   LSE = log sum_s exp(lse_s),   O = sum_s exp(lse_s - LSE) * o_s
//
// Memory-bound: it reads splits * (4 * Dv + 4) bytes per row and writes 2 * Dv + 4. `lanes_per_row` adjacent threads
// process a row, 16 bytes each; each of `split_groups` such groups takes every split_groups-th split, so that a decode
// step with few rows still keeps enough loads in flight; a CTA processes `rows_per_block` rows. Each thread keeps an
// online softmax over its splits (running maximum m, sum l, accumulator o) and loads `unroll` splits before it uses
// one. The groups of a row are then combined through shared memory:
//
//   shared memory:  m [threads]    l [threads]    o [threads][vector]
//
// An empty split has lse = -inf and may leave its o unwritten: its weight is 0 and its o never enters a sum. If all
// splits are empty, O = 0 and LSE = -inf.
//
// Entry point: split_combine, at the end of this file.
#pragma once

#include "attention/split_combine_config.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"

namespace tessera {

// 64-bit division takes some seventy instructions; 32-bit division is enough for nearly every tensor.
__forceinline__ Index divide(Index a, Index b) {
  if (((a | b) >> 32) == 0) return static_cast<unsigned>(a) / static_cast<unsigned>(b);
  return a / b;
}

// exp(lse - maximum); 0 if lse is -inf, even if the maximum is too. NaN stays NaN.
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

// Where a thread works: four or one columns of a row, and every split_groups-th split from `split_group` on.
struct SplitCombineWork {
  Index row;
  Index column;
  unsigned split_group;
  bool active;
};

template <int kVector>
__forceinline__ SplitCombineWork split_combine_work(const SplitCombineParams& p) {
  const unsigned lane = threadIdx.x % p.lanes_per_row;
  const unsigned group = threadIdx.x / p.lanes_per_row;
  const unsigned row_in_cta = group / p.split_groups;
  const Index row = static_cast<Index>(blockIdx.x) * p.rows_per_block + row_in_cta;
  const Index column = (static_cast<Index>(blockIdx.y) * p.lanes_per_row + lane) * kVector;
  return {row, column, group % p.split_groups, row_in_cta < p.rows_per_block && row < p.rows && column < p.head_dim};
}

// A thread's online softmax over its splits: running maximum, sum and accumulator.
template <int kVector>
struct CombinedSplits {
  float m = -infinity();
  float l = 0;
  float o[kVector] = {};

  template <int kUnroll>
  __forceinline__ void add_splits(const SplitCombineParams& p, const SplitCombineWork& work) {
    const float* lse = p.lse_partial + work.row;
    const float* partial = p.o_partial + work.row * p.head_dim + work.column;
    const Index partial_stride = p.rows * p.head_dim;
    for (unsigned begin = work.split_group; begin < p.splits; begin += kUnroll * p.split_groups) {
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
          // A product with weight 0 would propagate a NaN from an unwritten o.
          o[i] = weight == 0.0f ? o[i] : o[i] + weight * split_o[u][i];
        }
      }
    }
  }

  // Combines the groups of a row, whose values are in shared memory. Called by the threads of its first group.
  __forceinline__ void combine_groups(const SplitCombineParams& p, const float* shared_m, const float* shared_l,
                                      const float (*shared_o)[kVector]) {
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
  }

  template <DType dtype>
  __forceinline__ void store(const SplitCombineParams& p, const SplitCombineWork& work) const {
    // l is at least 1, the weight of the largest split, unless every split is empty; then it is 0.
    const float scale = l == 0.0f ? 0.0f : fast_reciprocal(l);
    const Index batch_head = divide(work.row, p.seq);
    const Index seq = work.row - batch_head * p.seq;
    const Index batch = divide(batch_head, p.heads);
    const Index head = batch_head - batch * p.heads;
    Bits16* out = static_cast<Bits16*>(p.o) + batch * p.o_strides.batch + seq * p.o_strides.seq +
                  head * p.o_strides.head + work.column;
    if constexpr (kVector == 4) {
      store_8(out, Words2{{pack<dtype>(o[0] * scale, o[1] * scale), pack<dtype>(o[2] * scale, o[3] * scale)}});
    } else {
      *out = from_float<dtype>(o[0] * scale);
    }
    if (p.lse && work.column == 0) {
      p.lse[batch * p.lse_strides.batch + head * p.lse_strides.head + seq] =
          l == 0.0f ? -infinity() : m + fast_log2(l) * kLn2;
    }
  }
};

template <SplitCombineConfig config>
__forceinline__ void split_combine(const SplitCombineParams& p) {
  constexpr int kVector = config.vector;
  static_assert(kVector == 4 || kVector == 1);
  __shared__ float shared_m[config.threads];
  __shared__ float shared_l[config.threads];
  __shared__ float shared_o[config.threads][kVector];

  pdl_wait_and_launch_dependents();
  const SplitCombineWork work = split_combine_work<kVector>(p);
  CombinedSplits<kVector> combined;
  if (work.active) combined.template add_splits<config.unroll>(p, work);
  shared_m[threadIdx.x] = combined.m;
  shared_l[threadIdx.x] = combined.l;
#pragma unroll
  for (int i = 0; i < kVector; ++i) shared_o[threadIdx.x][i] = combined.o[i];
  __syncthreads();
  if (!work.active || work.split_group != 0) return;
  combined.combine_groups(p, shared_m, shared_l, shared_o);
  combined.template store<config.dtype>(p, work);
}

}  // namespace tessera
