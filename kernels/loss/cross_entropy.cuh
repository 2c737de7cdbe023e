// Cross-entropy of rows of logits, and the gradient in place of them, for every architecture. Entry point:
// loss_cross_entropy, below.
//
//   loss = LSE(x) - x[target]        x <- (softmax(x) - onehot(target)) dout
//
// A CTA has one row. The first pass finds maximum and sum of exponentials, online: a thread has 8 logits at a time, in one
// 16-byte access. The second one writes the gradient.
//
//   pass 1   global → max, sum, shared memory (the first `cached` logits)    pass 2   shared memory, then global → gradient
//
// A row of 128 K logits is 256 KB, more than shared memory has; what is not cached is read again, from L2.
//
// Differences to the maximum are taken before they are scaled for exp2, since a product of a large logit would be rounded.
// A row whose target is no class has loss 0 and gradient 0.
#pragma once

#include "loss/cross_entropy_config.h"
#include "ptx/convert.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"

namespace tessera {

template <LossCrossEntropyConfig config>
struct LossCrossEntropy {
  static constexpr int kThreads = config.threads;
  static constexpr int kTogether = 4;  // accesses of a thread that are in flight
  static constexpr int kWarps = kThreads / 32;
  static constexpr float kLargest = 3.4028234663852886e38f;

  struct alignas(16) Chunk {  // 8 logits
    unsigned word[4];
  };
  struct Logits {
    float value[8];
  };
  struct Sum {  // of exp(x - most)
    float most, sum;
  };

  const LossCrossEntropyParams& p;
  Chunk* row;     // in global memory
  Chunk* kept;    // in shared memory
  int chunks;     // of the row
  Sum* of_warps;  // [kWarps], in shared memory

  static __forceinline__ float exp_of(float difference) { return fast_exp2(difference * kLog2E); }

  static __forceinline__ Sum merged(const Sum& a, const Sum& b) {
    const float most = fmaxf(a.most, b.most);
    return {most, a.sum * exp_of(a.most - most) + b.sum * exp_of(b.most - most)};
  }

  // Beyond the last class: -infinity, whose exponential is 0. What fp16 cannot hold is its largest number.
  __forceinline__ Logits unpacked(const Chunk& chunk, int column) const {
    Logits x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x.value[2 * i] = low_to_float<config.dtype>(chunk.word[i]);
      x.value[2 * i + 1] = high_to_float<config.dtype>(chunk.word[i]);
    }
    if constexpr (config.dtype == DType::kFloat16) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x.value[i] = x.value[i] > 65504.0f ? 65504.0f : x.value[i] < -65504.0f ? -65504.0f : x.value[i];
      }
    }
    if (column + 8 > p.classes) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i >= p.classes) x.value[i] = -infinity();
      }
    }
    return x;
  }

  __forceinline__ Sum first_pass() {
    Sum all{-kLargest, 0};
    for (int first = static_cast<int>(threadIdx.x); first < chunks; first += kTogether * kThreads) {
      Chunk loaded[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) loaded[i] = row[min(first + i * kThreads, chunks - 1)];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int chunk = first + i * kThreads;
        if (config.gradient && chunk * 8 < config.cached) kept[chunk] = loaded[i];
        const Logits x = unpacked(loaded[i], chunk * 8);
        float most = all.most;
#pragma unroll
        for (int e = 0; e < 8; ++e) most = fmaxf(most, x.value[e]);
        float sum = all.sum * exp_of(all.most - most);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += exp_of(x.value[e] - most);
        all = {most, sum};
      }
    }
    return all;
  }

  // Of all threads, in every thread, in a fixed order.
  __forceinline__ Sum of_cta(Sum own) const {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      own = merged(own, {__shfl_xor_sync(~0u, own.most, step), __shfl_xor_sync(~0u, own.sum, step)});
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
    __syncthreads();
    Sum all = of_warps[0];
#pragma unroll 8
    for (int i = 1; i < kWarps; ++i) all = merged(all, of_warps[i]);
    return all;
  }

  __forceinline__ void second_pass(const Sum& all, int target, float dout) {
    const float factor = dout / all.sum;
    for (int first = static_cast<int>(threadIdx.x); first < chunks; first += kTogether * kThreads) {
      Chunk loaded[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int chunk = min(first + i * kThreads, chunks - 1);
        loaded[i] = chunk * 8 < config.cached ? kept[chunk] : row[chunk];
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int chunk = first + i * kThreads;
        if (chunk >= chunks) continue;
        Logits x = unpacked(loaded[i], chunk * 8);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          x.value[e] = exp_of(x.value[e] - all.most) * factor;
          if (chunk * 8 + e == target) x.value[e] -= dout;
        }
        Chunk packed;
#pragma unroll
        for (int e = 0; e < 4; ++e) packed.word[e] = pack<config.dtype>(x.value[2 * e], x.value[2 * e + 1]);
        row[chunk] = packed;
      }
    }
  }

  __forceinline__ void run(Index at) {
    const int target = p.target[at];
    if (target < 0 || target >= p.classes) {
      if (threadIdx.x == 0) p.out[at] = 0;
      if constexpr (config.gradient) {
        for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks; chunk += kThreads) row[chunk] = Chunk{};
      }
      return;
    }
    // Read before the second pass overwrites it.
    float wanted = to_float<config.dtype>(reinterpret_cast<const Bits16*>(row)[target]);
    if constexpr (config.dtype == DType::kFloat16) wanted = fminf(fmaxf(wanted, -65504.0f), 65504.0f);
    const Sum all = of_cta(first_pass());
    if (threadIdx.x == 0) p.out[at] = (all.most - wanted) + logf(all.sum);
    if constexpr (config.gradient) second_pass(all, target, p.dout != nullptr ? p.dout[at] : 1.0f);
  }
};

template <LossCrossEntropyConfig config>
__forceinline__ void loss_cross_entropy(const LossCrossEntropyParams& p) {
  using Rows = LossCrossEntropy<config>;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ typename Rows::Sum of_warps[Rows::kWarps];
  pdl_wait_and_launch_dependents();
  const Index at = blockIdx.x;
  auto* row = reinterpret_cast<typename Rows::Chunk*>(static_cast<Bits16*>(p.logits) + at * p.row_stride);
  Rows{p, row, reinterpret_cast<typename Rows::Chunk*>(shared), (p.classes + 7) / 8, of_warps}.run(at);
}

}  // namespace tessera
