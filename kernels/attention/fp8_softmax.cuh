// Online softmax of the e4m3 forwards, for the rows of a warp in the accumulator layout of wgmma and mma: a lane has two
// columns of every tile of 8 keys, in rows lane / 4 (half 0) and lane / 4 + 8 (half 1).
//
// P is kept relative to a reference near the row's maximum: at the reference it is 2^kOffset, so that e4m3 has all its
// bits down to 2^-10 of it, and reaches 2^-13; up to 2^kSlack more does not saturate. The reference cancels at the end.
//
// Scores are multiplied by a factor per kScaleKeys keys (scale, log2 e, and the scales of Q and K), so references are in
// exp2 units. Once every row has one, the exponentials are taken without finding the maximum; their sum, or at least
// their maximum, shows that none saturates. Else the scores are restored, and the maximum is found first, as usual.
#pragma once

#include "attention/fp8.h"
#include "ptx/convert.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"

namespace tessera {

// tiles: of 8 keys. groups: of keys that have a factor. shifts: P is multiplied by 2^shift, a tile's scale of V relative
// to O's; row sums are without it.
template <int tiles, int groups, bool shifts = false>
struct Fp8Softmax {
  using Scores = float[tiles * 4];
  using Factors = float[groups];

  static constexpr float kOffset = 4.0f;
  static constexpr float kSlack = 4.5f;          // 2^(kOffset + kSlack) is below the largest e4m3
  static constexpr float kExactShift = 1 << 12;  // below, adding it to a logarithm loses less than rounding to e4m3
  static constexpr float kLost = 1e38f;          // above, the exponential may be infinite and its score is lost
  static constexpr float kLargeShift = 1 << 20;  // from here on, the rounding error of a shift matters
  static constexpr float kLargest = 1e38f;       // of a reference

  float reference[2];  // -inf before any key
  float rest[2];       // what rounding took from a large shift, else 0
  float row_sum[2];    // this lane's part of a row's sum
  bool settled;        // all rows of the warp have a reference that is not large
  float shift;         // of the tile, at most 0; shifts
  float unshift;       // 2^-shift

  static __forceinline__ constexpr int group_of(int i) { return groups == 1 ? 0 : i / 4 / (kScaleKeys / 8); }

  __forceinline__ void reset() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference[half] = -infinity();
      rest[half] = 0;
      row_sum[half] = 0;
    }
    settled = false;
  }

  // Scores to probabilities. careful: some scores may be -inf, or recompute() cannot reproduce them. Returns whether
  // references were raised; then everything that was summed before must be multiplied by rescale.
  template <class Recompute>
  __forceinline__ bool update(Scores& scores, const Factors& factor, bool careful, float (&rescale)[2],
                              const Recompute& recompute) {
    if (!careful && settled) {
      if (exponentiate_first(scores, factor)) return false;
      if (!restore(scores, factor)) recompute();
    }
    return raise_and_exponentiate(scores, factor, rescale);
  }

  // The row sum over all lanes of the row.
  __forceinline__ float total(int half) const {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }
  // In natural units; -inf if the total is 0.
  __forceinline__ float log_sum_exp(float total, int half) const {
    return total == 0.0f ? -infinity() : (fast_log2(total) - rest[half] - bias_of(half)) * kLn2;
  }

 private:
  __forceinline__ float shifted(float bias) const { return shifts ? bias + shift : bias; }
  __forceinline__ void add(const float (&sum)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) row_sum[half] += shifts ? sum[half] * unshift : sum[half];
  }

  // For a row that has seen no key, any finite number keeps exp2(-inf + bias) at 0.
  __forceinline__ float bias_of(int half) const {
    return reference[half] == -infinity() ? 0.0f : kOffset - reference[half];
  }

  static __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }

  // Returns false, and leaves row_sum unchanged, if a probability of the warp is too large.
  __forceinline__ bool exponentiate_first(Scores& scores, const Factors& factor) {
    const float bias[2] = {shifted(bias_of(0)), shifted(bias_of(1))};
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < tiles * 4; ++i) {
      scores[i] = fast_exp2(scores[i] * factor[group_of(i)] + bias[i / 2 % 2]);
      sum[i / 2 % 2] += scores[i];
    }
    if (__any_sync(0xffffffffu, !(sum[0] < kLargestE4m3 && sum[1] < kLargestE4m3))) {
      float largest[4] = {};  // independent, since each maximum waits for the one before
#pragma unroll
      for (int i = 0; i < tiles * 4; ++i) largest[i % 4] = fmaxf(largest[i % 4], scores[i]);
      const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
      if (__any_sync(0xffffffffu, !(all < kLargestE4m3))) return false;
    }
    add(sum);
    return true;
  }

  // Recovers the scores from their exponentials. Returns false if some are lost, or the shift would round off too much.
  __forceinline__ bool restore(Scores& scores, const Factors& factor) const {
    const float bias[2] = {shifted(bias_of(0)), shifted(bias_of(1))};
    bool lost = !(fabsf(bias[0]) < kExactShift && fabsf(bias[1]) < kExactShift);
#pragma unroll
    for (int i = 0; i < tiles * 4; ++i) lost |= !(scores[i] < kLost);
    if (__any_sync(0xffffffffu, lost)) return false;
    Factors inverse;
#pragma unroll
    for (int g = 0; g < groups; ++g) inverse[g] = 1.0f / factor[g];
#pragma unroll
    for (int i = 0; i < tiles * 4; ++i) {
      scores[i] = (fast_log2(scores[i]) - bias[i / 2 % 2]) * inverse[group_of(i)];
    }
    return true;
  }

  __forceinline__ bool raise_and_exponentiate(Scores& scores, const Factors& factor, float (&rescale)[2]) {
    float largest[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      float of_group[2] = {-infinity(), -infinity()};
#pragma unroll
      for (int i = 0; i < tiles * 4; ++i) {
        if (group_of(i) == g) of_group[i / 2 % 2] = fmaxf(of_group[i / 2 % 2], scores[i]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) largest[half] = fmaxf(largest[half], of_group[half] * factor[g]);
    }
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = fminf(quad_max(largest[half]), kLargest);
      grown |= largest[half] > reference[half] + kSlack;
    }
    grown = __any_sync(0xffffffffu, grown);
    const float old[2] = {bias_of(0), bias_of(1)};
    const float old_rest[2] = {rest[0], rest[1]};
    const bool is_first[2] = {reference[0] == -infinity(), reference[1] == -infinity()};
    bool large = false, unseen = false, raised[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      raised[half] = grown && largest[half] > reference[half];
      if (raised[half]) reference[half] = largest[half], rest[half] = 0;
      large |= fabsf(reference[half]) >= kLargeShift;  // -inf too: such a row has nothing to subtract
      unseen |= reference[half] == -infinity();
    }
    large = __any_sync(0xffffffffu, large);
    settled = !large;
    Factors multiplier;
#pragma unroll
    for (int g = 0; g < groups; ++g) multiplier[g] = factor[g];
    float bias[2] = {bias_of(0), bias_of(1)};
    if (large && !__all_sync(0xffffffffu, unseen)) subtract_large_references(scores, multiplier, bias, raised);
    if (grown) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // Nothing was summed before a row's first key.
        const float shift = (bias_of(half) - old[half]) + (rest[half] - old_rest[half]);
        rescale[half] = raised[half] && !is_first[half] ? fast_exp2(shift) : 1.0f;
        row_sum[half] *= rescale[half];
      }
    }
    bias[0] = shifted(bias[0]);
    bias[1] = shifted(bias[1]);
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < tiles * 4; ++i) {
      scores[i] = fast_exp2(scores[i] * multiplier[group_of(i)] + bias[i / 2 % 2]);
      sum[i / 2 % 2] += scores[i];
    }
    add(sum);
    return grown;
  }

  // Scores become exponents, so that multiplier is 1 and bias 0. An FMA rounds only the difference of score and
  // reference; how far the largest is from kOffset is what rounding took from the reference.
  __forceinline__ void subtract_large_references(Scores& scores, Factors& multiplier, float (&bias)[2],
                                                 const bool (&raised)[2]) {
    float largest[2] = {-infinity(), -infinity()};
#pragma unroll
    for (int i = 0; i < tiles * 4; ++i) {
      scores[i] = scores[i] * multiplier[group_of(i)] + bias[i / 2 % 2];
      largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], scores[i]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = quad_max(largest[half]);
      if (raised[half] && fabsf(reference[half]) >= kLargeShift) rest[half] = kOffset - largest[half];
      bias[half] = 0;
    }
#pragma unroll
    for (int i = 0; i < tiles * 4; ++i) {
      scores[i] = fminf(scores[i] + rest[i / 2 % 2], kOffset + kSlack);
    }
#pragma unroll
    for (int g = 0; g < groups; ++g) multiplier[g] = 1;
  }
};

}  // namespace tessera
