// Computes what the backward needs for every query row before its main loop:
//
//   delta[b, h, i]    = sum_d dO[b, i, h, d] * O[b, i, h, d] - dLSE[b, h, i]
//   lse_log2[b, h, i] = LSE[b, h, i] * log2(e)
//
// It also zeroes dQ's sums, to which the main loop adds, or the counters of turns if key tiles take turns at them: this
// saves a launch, and the writes overlap with the reads.
//
// A row that sees no key (LSE = -inf) gets lse_log2 = +inf, so that exp2(s - lse_log2) is 0 and not NaN for any finite
// score, and delta = 0, so that it contributes no gradient whatever dLSE is.
//
// Memory-bound: 4 * Dv + 12 bytes per row, 16 with dLSE, and 4 * Dqk of zeroed sums. `lanes_per_row` adjacent lanes read a
// row, 16 bytes each, and a warp processes as many rows as fit (Dv = 80: 10 lanes, 3 rows). A thread loads all its
// `unroll` rows before it uses one. The rows of a warp are consecutive in the sequence, so its row values share
// sectors; adjacent CTAs process the heads of the same rows, so that [B, S, H, D] is streamed in order.
#pragma once

#include "attention/backward_preprocess_config.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"

namespace tessera {

// The sum over a group of `lanes` adjacent lanes; the result is valid in the first lane of each group. `lane` counts
// within the group, whose size need not be a power of two; all 32 lanes take part.
__forceinline__ float sum_of_group(float value, unsigned lane, unsigned lanes) {
#pragma unroll
  for (unsigned step = 16; step > 0; step /= 2) {
    const float other = __shfl_down_sync(0xffffffffu, value, step);
    // Lanes at or above `step` have been added to those below by the time a smaller step reads them.
    if (lane < step && lane + step < lanes) value += other;
  }
  return value;
}

// Keeps a finite LSE finite after the change of units. NaN stays NaN.
__forceinline__ float clamp_to_finite(float x) {
  constexpr float kLargest = 3.402823466e38f;
  return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
}

template <DType dtype>
__forceinline__ float dot(const Words4& a, const Words4& b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum += low_to_float<dtype>(a.word[i]) * low_to_float<dtype>(b.word[i]);
    sum += high_to_float<dtype>(a.word[i]) * high_to_float<dtype>(b.word[i]);
  }
  return sum;
}

template <BackwardPreprocessConfig config>
__forceinline__ void backward_preprocess(const BackwardPreprocessParams& p) {
  constexpr int kUnroll = config.unroll;
  static_assert(config.vector == 8 || config.vector == 1);
  static_assert(config.threads % 32 == 0);

  const unsigned head = blockIdx.x % p.heads;
  const unsigned tile = blockIdx.x / p.heads % p.seq_tiles;
  const Index batch = blockIdx.x / p.heads / p.seq_tiles;

  pdl_wait_and_launch_dependents();
  const Index zeroed_end = min((blockIdx.x + Index{1}) * p.zeroed_a_block, p.zeroed_words);
  for (Index i = blockIdx.x * p.zeroed_a_block + threadIdx.x; i < zeroed_end; i += config.threads) {
    store_16(static_cast<Words4*>(p.zeroed) + i, Words4{});
  }

  const unsigned warp = threadIdx.x / 32;
  const unsigned rows_per_warp = 32 / p.lanes_per_row;  // at a time
  const unsigned group = threadIdx.x % 32 / p.lanes_per_row;
  const unsigned lane = threadIdx.x % 32 % p.lanes_per_row;
  const unsigned rows_per_cta = config.threads / 32 * rows_per_warp * kUnroll;
  // Row of the first load; the other rows follow at distances of rows_per_warp.
  const Index first = static_cast<Index>(tile) * rows_per_cta + warp * rows_per_warp * kUnroll + group;
  const bool in_group = group < rows_per_warp;

  const Bits16* o = static_cast<const Bits16*>(p.o) + batch * p.o_strides.batch + head * p.o_strides.head;
  const Bits16* d_o = static_cast<const Bits16*>(p.d_o) + batch * p.d_o_strides.batch + head * p.d_o_strides.head;

  bool valid[kUnroll];
#pragma unroll
  for (int r = 0; r < kUnroll; ++r) valid[r] = in_group && first + r * rows_per_warp < p.seq;

  float sum[kUnroll] = {};
  for (unsigned v = lane; v < p.vectors; v += p.lanes_per_row) {  // one iteration if a row has up to 32 vectors
    if constexpr (config.vector == 8) {
      Words4 a[kUnroll], b[kUnroll];
#pragma unroll
      for (int r = 0; r < kUnroll; ++r) {
        const Index row = first + r * rows_per_warp;
        a[r] = load_streaming_16(o + row * p.o_strides.seq + v * 8, valid[r]);
        b[r] = load_streaming_16(d_o + row * p.d_o_strides.seq + v * 8, valid[r]);
      }
#pragma unroll
      for (int r = 0; r < kUnroll; ++r) sum[r] += dot<config.dtype>(a[r], b[r]);
    } else {
      Bits16 a[kUnroll], b[kUnroll];
#pragma unroll
      for (int r = 0; r < kUnroll; ++r) {
        const Index row = first + r * rows_per_warp;
        a[r] = load_read_only(o + row * p.o_strides.seq + v, valid[r]);
        b[r] = load_read_only(d_o + row * p.d_o_strides.seq + v, valid[r]);
      }
#pragma unroll
      for (int r = 0; r < kUnroll; ++r) sum[r] += to_float<config.dtype>(a[r]) * to_float<config.dtype>(b[r]);
    }
  }

  const float* lse = p.lse + batch * p.lse_strides.batch + head * p.lse_strides.head;
  const float* d_lse = p.d_lse + batch * p.d_lse_strides.batch + head * p.d_lse_strides.head;
  float* delta = p.delta + batch * p.delta_strides.batch + head * p.delta_strides.head;
  float* lse_log2 = p.lse_log2 + batch * p.lse_log2_strides.batch + head * p.lse_log2_strides.head;
#pragma unroll
  for (int r = 0; r < kUnroll; ++r) {
    const Index row = first + r * rows_per_warp;
    const bool writes = valid[r] && lane == 0;
    const float row_lse = load_read_only(lse + row, writes);
    const float row_d_lse = load_read_only(d_lse + row, writes && p.d_lse != nullptr);
    const float total = sum_of_group(sum[r], lane, p.lanes_per_row);
    const bool empty = row_lse == -infinity();
    if (writes) {
      delta[row] = empty ? 0.0f : total - row_d_lse;
      lse_log2[row] = empty ? infinity() : clamp_to_finite(row_lse * kLog2E);
    }
  }
}

}  // namespace tessera
