// The router of a mixture of experts: from logits to the experts of each token, and back to the gradient of the logits.
// Entry points: moe_route and moe_route_backward, below.
//
//   score    softmax(logits) or sigmoid(logits), fp32
//   choice   the top_k largest logits, the lowest expert first among equals; NaN counts as the smallest
//   weight   the score, or the score divided by the sum of those that were chosen
//   share    the score divided by the sum over all experts; its mean over the tokens is a part of the balance loss
//
// A warp has a token at a time, lane l its experts l, l + 32, ... in registers; lane j has the j-th expert that was chosen.
// Logits are compared, not scores, so rounding cannot change the choice. A CTA has a chunk of consecutive tokens, and leaves
// the number of tokens that each expert got, and the sums of shares, for the next step (moe/rows.cuh). Sums of shares are in
// a fixed order: by each warp over its tokens, then over warps.
#pragma once

#include "moe/route_config.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

__forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// The logits of a token.
template <MoeRouteConfig config>
struct MoeLogits {
  static constexpr int kPerLane = config.per_lane;
  float value[kPerLane];
  bool here[kPerLane];
  float max;

  static __forceinline__ float load(const void* logits, Index at, bool wanted) {
    if constexpr (config.logits_dtype == DType::kFloat32) {
      return load_read_only(static_cast<const float*>(logits) + at, wanted);
    } else {
      return to_float<config.logits_dtype>(load_read_only(static_cast<const Bits16*>(logits) + at, wanted));
    }
  }

  __forceinline__ MoeLogits(const void* logits, Index row, int experts) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    max = -infinity();
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      here[i] = lane + i * 32 < experts;
      value[i] = load(logits, row + lane + i * 32, here[i]);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) max = here[i] ? fmaxf(max, value[i]) : max;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
  }

  // Scores, all divided by the same number, so that the largest does not underflow.
  __forceinline__ float scaled_score(float logit) const {
    if constexpr (config.scoring == kMoeSoftmax) return expf(logit - max);
    return max < 0 ? expf(logit - max) / (1.0f + expf(logit)) : 1.0f / (1.0f + expf(-logit));
  }
  static __forceinline__ float sigmoid(float logit) { return 1.0f / (1.0f + expf(-logit)); }

  struct Shares {
    float value[kPerLane];
    float sum;  // of scaled scores
  };
  __forceinline__ Shares shares() const {
    Shares s;
    s.sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      s.value[i] = here[i] ? scaled_score(value[i]) : 0.0f;
      s.sum += s.value[i];
    }
    s.sum = warp_sum(s.sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) s.value[i] /= s.sum;
    return s;
  }

  // An order of logits as integers; 0 is below all. Adding 0 makes -0 equal to 0.
  static __forceinline__ unsigned order_of(float logit) {
    const unsigned bits = bits_from_float(logit + 0.0f);
    if ((bits & 0x7fffffffu) > kFloatInfinityBits) return 1;
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  }

  // The top_k experts; lane j returns the j-th.
  __forceinline__ int choose(int top_k) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    unsigned order[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) order[i] = here[i] ? order_of(value[i]) : 0;
    int mine = 0;
    for (int j = 0; j < top_k; ++j) {
      unsigned best = 0;
      int expert = kMoeMostExperts;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (order[i] > best) {
          best = order[i];
          expert = lane + i * 32;
        }
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const unsigned other = __shfl_xor_sync(~0u, best, step);
        const int other_expert = __shfl_xor_sync(~0u, expert, step);
        if (other > best || (other == best && other_expert < expert)) {
          best = other;
          expert = other_expert;
        }
      }
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (expert == lane + i * 32) order[i] = 0;
      }
      if (lane == j) mine = expert;
    }
    return mine;
  }
};

template <MoeRouteConfig config>
__forceinline__ void moe_route(const MoeRouteParams& p) {
  constexpr int kWarps = kMoeRouteThreads / 32, kPerLane = config.per_lane;
  __shared__ int counts[kMoeMostExperts];
  __shared__ float sums[kWarps][kPerLane * 32];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = static_cast<int>(threadIdx.x); i < p.experts; i += kMoeRouteThreads) counts[i] = 0;
  __syncthreads();
  pdl_wait_and_launch_dependents();

  float share_sums[kPerLane] = {};
  const int first = static_cast<int>(blockIdx.x) * p.chunk_tokens;
  const int last = p.tokens - first < p.chunk_tokens ? p.tokens : first + p.chunk_tokens;
  for (int token = first + warp; token < last; token += kWarps) {
    const Index at = static_cast<Index>(token) * p.top_k + lane;
    const bool has_one = lane < p.top_k;
    int expert = -1;
    if constexpr (config.scoring == kMoeGiven) {
      if (has_one) expert = p.expert_of[at];
    } else {
      const Index row = token * p.logits_stride;
      const MoeLogits<config> logits(p.logits, row, p.experts);
      const auto shares = logits.shares();
      if (p.shares != nullptr) {
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) share_sums[i] += shares.value[i];
      }
      expert = logits.choose(p.top_k);
      const float logit = MoeLogits<config>::load(p.logits, row + expert, has_one);
      float weight = has_one ? logits.scaled_score(logit) : 0.0f;
      if (p.normalized) {
        weight /= warp_sum(weight);
      } else if constexpr (config.scoring == kMoeSoftmax) {
        weight /= shares.sum;
      } else {
        weight = MoeLogits<config>::sigmoid(logit);
      }
      if (has_one) {
        p.expert_of[at] = expert;
        p.weights[at] = weight;
      }
    }
    if (has_one && expert >= 0 && expert < p.experts) atomicAdd(&counts[expert], 1);
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sums[warp][lane + i * 32] = share_sums[i];
  __syncthreads();
  const Index chunk = static_cast<Index>(blockIdx.x) * p.experts;
  for (int i = static_cast<int>(threadIdx.x); i < p.experts; i += kMoeRouteThreads) {
    p.counts[chunk + i] = counts[i];
    if (p.shares == nullptr) continue;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][i];
    p.shares[chunk + i] = sum;
  }
}

// With dw the gradient of a token's weights, g that of its shares, and s' the derivative of a score divided by the score (1
// for softmax, 1 - sigmoid else):
//
//   dlogit = share s' (g - sum(share g))    and for chosen experts    weight s' (dw - sum(weight dw)), if normalized
//                                                                      weight s' dw, for sigmoid
// For softmax that is not normalized, weights are shares, and dw is added to g.
template <MoeRouteConfig config>
__forceinline__ void moe_route_backward(const MoeRouteBackwardParams& p) {
  constexpr int kPerLane = config.per_lane;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Index token = static_cast<Index>(blockIdx.x) * (kMoeRouteThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  pdl_wait_and_launch_dependents();
  if (token >= p.tokens) return;
  const Index at = token * p.top_k + lane;
  const bool has_one = lane < p.top_k;
  const int position = has_one ? moe_row(p.positions[at], p.tokens * p.top_k) : -1;
  float dweight = 0.0f;
  for (int part = 0; part < p.dweight_parts; ++part) {
    if (position >= 0) dweight += p.row_dweights[static_cast<Index>(position) * p.dweight_parts + part];
  }
  if constexpr (config.scoring == kMoeGiven) {
    if (has_one) p.dweights[at] = dweight;
  } else {
    const int expert = has_one ? p.expert_of[at] : -1;
    const float weight = has_one ? p.weights[at] : 0.0f;
    const float mean_dweight = p.normalized ? warp_sum(weight * dweight) : 0.0f;
    const MoeLogits<config> logits(p.logits, token * p.logits_stride, p.experts);
    const auto shares = logits.shares();
    const float per_token = p.dbalance_loss != nullptr ? *p.dbalance_loss * p.balance_scale : 0.0f;
    float dshare[kPerLane], direct[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      direct[i] = dshare[i] = 0;
      if (logits.here[i] && p.dbalance_loss != nullptr) {
        const int e = lane + i * 32;
        dshare[i] = per_token * static_cast<float>(p.offsets[e + 1] - p.offsets[e]);
      }
    }
    const bool of_shares = config.scoring == kMoeSoftmax && !p.normalized;
    const float to_weight = of_shares ? dweight : weight * (dweight - mean_dweight);
    for (int j = 0; j < p.top_k; ++j) {
      const int chosen = __shfl_sync(~0u, expert, j);
      const float d = __shfl_sync(~0u, to_weight, j);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        if (chosen != lane + i * 32) continue;
        if (of_shares) {
          dshare[i] += d;
        } else {
          direct[i] = d;
        }
      }
    }
    float mean = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) mean += dshare[i] * shares.value[i];
    mean = warp_sum(mean);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (!logits.here[i]) continue;
      float d = direct[i] + shares.value[i] * (dshare[i] - mean);
      if constexpr (config.scoring == kMoeSigmoid) d /= 1.0f + expf(logits.value[i]);
      const Index to = token * p.dlogits_stride + lane + i * 32;
      if constexpr (config.logits_dtype == DType::kFloat32) {
        static_cast<float*>(p.dlogits)[to] = d;
      } else {
        static_cast<Bits16*>(p.dlogits)[to] = from_float<config.logits_dtype>(d);
      }
    }
  }
}

}  // namespace tessera
