// Rows of tokens to the order of experts and back. Entry points: moe_permute and moe_combine, below.
//
// moe_permute sorts the (token, expert) pairs by expert, tokens in order, and copies each token's row to its top_k places. A
// CTA has a chunk of tokens: it adds the counts of all chunks (moe/route.cuh) to the first row of each expert, and of the
// chunk in it; one warp then gives the chunk's pairs their rows, 32 at a time. So there is no step between the router and
// the copy, and a row is read once and written top_k times.
//
// moe_combine sums, for each token, its rows in the order of its experts, times the weights. No atomics on floats: results
// are the same at every run.
#pragma once

#include "moe/rows_config.h"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <MoePermuteConfig config>
struct MoePermute {
  static constexpr int kThreads = kMoePermuteThreads;
  const MoePermuteParams& p;
  int thread, first, last;  // tokens of the chunk

  struct Shared {
    int total[kMoeMostExperts];  // pairs of each expert, then of those up to it
    int next[kMoeMostExperts];   // the row of the chunk's next pair
    float partial[kThreads];
  };

  // Sums over chunks, by as many threads per expert as there are.
  template <class T, class Use>
  __forceinline__ void sum_over_chunks(const T* of, Use use) const {
    const int expert = thread % p.padded_experts, rows = kThreads / p.padded_experts;
    T all = 0, before = 0;
    if (expert < p.experts) {
#pragma unroll 8
      for (int chunk = thread / p.padded_experts; chunk < p.chunks; chunk += rows) {
        const T value = of[static_cast<Index>(chunk) * p.experts + expert];
        all += value;
        if (chunk < static_cast<int>(blockIdx.x)) before += value;
      }
    }
    use(expert, all, before);
  }

  // experts sum(count share) / tokens^2, by one CTA.
  __forceinline__ void balance(Shared& s) const {
    sum_over_chunks(p.shares, [&](int, float all, float) { s.partial[thread] = all; });
    __syncthreads();
    float loss = 0;
    if (thread < p.experts) {
      for (int i = thread; i < kThreads; i += p.padded_experts) loss += s.partial[i];
      loss *= static_cast<float>(s.total[thread]);
    }
    __syncthreads();
    s.partial[thread] = loss;
    __syncthreads();
    if (thread > 0) return;
    for (int i = 1; i < p.experts; ++i) loss += s.partial[i];
    *p.balance_loss = loss * p.balance_scale;
  }

  __forceinline__ void sort(Shared& s) const {
    s.total[thread] = s.next[thread] = 0;
    __syncthreads();
    sum_over_chunks(p.counts, [&](int expert, int all, int before) {
      if (expert >= p.experts) return;
      atomicAdd(&s.total[expert], all);
      atomicAdd(&s.next[expert], before);
    });
    __syncthreads();
    if (blockIdx.x == 0 && p.shares != nullptr) {
      balance(s);
      __syncthreads();
    }
    for (int step = 1; step < p.experts; step *= 2) {
      const int more = thread >= step ? s.total[thread - step] : 0;
      __syncthreads();
      s.total[thread] += more;
      __syncthreads();
    }
    const int offset = thread > 0 ? s.total[thread - 1] : 0;
    s.next[thread] += offset;
    if (blockIdx.x == 0) {
      if (thread < p.experts) p.offsets[thread] = offset;
      if (thread == 0) p.offsets[p.experts] = s.total[p.experts - 1];
    }
    __syncthreads();
    if (thread >= 32) return;
    const int pairs = last > first ? (last - first) * p.top_k : 0;
    const Index begin = static_cast<Index>(first) * p.top_k;
    for (int i = thread; i - thread < pairs; i += 32) {
      int expert = i < pairs ? p.expert_of[begin + i] : -1;
      if (expert >= p.experts) expert = -1;
      const unsigned alike = __match_any_sync(~0u, expert);
      const unsigned earlier = alike & ((1u << thread) - 1);
      const int position = expert >= 0 ? s.next[expert] + __popc(earlier) : -1;
      __syncwarp();
      if (expert >= 0 && earlier == 0) s.next[expert] += __popc(alike);
      __syncwarp();
      if (i < pairs) p.positions[begin + i] = position;
    }
  }

  __forceinline__ void copy(const MoeCopy& c, int token, int position) const {
    constexpr int kUnroll = config.vector == 8 ? 4 : 1;
    const int lane = thread % 32;
    const auto* from = static_cast<const Bits16*>(c.from) + token * c.from_stride;
    auto* to = static_cast<Bits16*>(c.to);
    for (int first_column = 0; first_column < p.columns; first_column += 32 * config.vector * kUnroll) {
      const int column = first_column + lane * config.vector;
      Words4 words[kUnroll];
      Bits16 element = 0;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int at = column + u * 32 * config.vector;
        if constexpr (config.vector == 8) {
          words[u] = load_streaming_16(from + at, at < p.columns);
        } else {
          element = load_read_only(from + at, at < p.columns);
        }
      }
      for (int j = 0; j < p.top_k; ++j) {
        const int row = __shfl_sync(~0u, position, j);
        if (row < 0) continue;
        Bits16* out = to + row * c.to_stride;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const int at = column + u * 32 * config.vector;
          if (at >= p.columns) continue;
          if constexpr (config.vector == 8) {
            store_16(out + at, words[u]);
          } else {
            out[at] = element;
          }
        }
      }
    }
  }

  __forceinline__ void run() const {
    if constexpr (config.sorts) {
      __shared__ Shared s;
      sort(s);
      __syncthreads();
    }
    const int lane = thread % 32;
    for (int token = first + thread / 32; token < last; token += kThreads / 32) {
      const Index at = static_cast<Index>(token) * p.top_k + lane;
      const int position = lane < p.top_k ? moe_row(p.positions[at], p.tokens * p.top_k) : -1;
      if (p.weights != nullptr && position >= 0) p.row_weights[position] = p.weights[at];
#pragma unroll
      for (const MoeCopy& c : p.copy) {
        if (c.from != nullptr) copy(c, token, position);
      }
    }
  }
};

template <MoePermuteConfig config>
__forceinline__ void moe_permute(const MoePermuteParams& p) {
  pdl_wait_and_launch_dependents();
  const int first = static_cast<int>(blockIdx.x) * p.chunk_tokens;
  const int last = p.tokens - first < p.chunk_tokens ? p.tokens : first + p.chunk_tokens;
  MoePermute<config>{p, static_cast<int>(threadIdx.x), first, last}.run();
}

template <MoeCombineConfig config>
__forceinline__ void moe_combine(const MoeCombineParams& p) {
  constexpr int kVector = config.vector, kUnroll = 4;
  pdl_wait_and_launch_dependents();
  const Index index = static_cast<Index>(blockIdx.x) * kMoeCombineThreads + threadIdx.x;
  const Index token = index / p.row_chunks;
  if (token >= p.tokens) return;
  const int column = static_cast<int>(index - token * p.row_chunks) * kVector;
  const auto* from = static_cast<const Bits16*>(p.from) + column;
  float sums[kVector] = {};
  for (int first = 0; first < p.top_k; first += kUnroll) {
    Words4 words[kUnroll];
    float weight[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const Index pair = token * p.top_k + first + j;
      const int position = first + j < p.top_k ? moe_row(p.positions[pair], p.rows) : -1;
      weight[j] = config.weighted && position >= 0 ? p.weights[pair] : 1.0f;
      if constexpr (kVector == 8) {
        words[j] = load_streaming_16(from + position * p.from_stride, position >= 0);
      } else {
        words[j].word[0] = load_read_only(from + position * p.from_stride, position >= 0);
      }
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const unsigned word = words[j].word[i / 2];
        sums[i] += weight[j] * (i % 2 == 0 ? low_to_float<config.dtype>(word) : high_to_float<config.dtype>(word));
      }
    }
  }
  auto* out = static_cast<Bits16*>(p.out) + token * p.out_stride + column;
  if constexpr (kVector == 8) {
    Words4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) words.word[i] = pack<config.dtype>(sums[2 * i], sums[2 * i + 1]);
    store_16(out, words);
  } else {
    *out = from_float<config.dtype>(sums[0]);
  }
}

}  // namespace tessera
