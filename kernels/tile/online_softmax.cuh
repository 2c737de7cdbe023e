// Softmax over tiles of keys as they come, for a warp's 16 rows in the accumulator layout of wgmma and mma: a lane has
// two columns of every tile of 8, in rows lane / 4 (half 0) and lane / 4 + 8 (half 1).
//
// A row's probabilities are kept relative to a reference near its running maximum. While none is too large for a 16-bit
// type, nothing summed before has to be scaled, and the reference stays. So once every row has one, the maximum is not
// looked for: the exponentials are taken at once, and their sum tells whether one was too large. Only then are the
// scores brought back, and the maximum found before the exponentials.
#pragma once

#include "ptx/exp2_polynomial.cuh"
#include "ptx/math.cuh"

namespace tessera {

// tiles: of 8 keys. polynomial: of 8 exponentials, how many leave the special function unit in peace.
template <int tiles, int polynomial>
struct OnlineSoftmax {
  using Scores = float[tiles * 4];

  static constexpr float kSlack = 8.0f;          // the reference follows a maximum that exceeds it by 2^kSlack
  static constexpr float kTooLarge = 32768.0f;   // of a sum of probabilities; fp16 ends at 65504
  static constexpr float kExactShift = 1 << 12;  // below, added to a logarithm, it costs less than 16 bits round off
  static constexpr float kLost = 1e38f;          // the sum may hold an infinity, and the score behind it is gone
  static constexpr float kLargeShift = 1 << 24;  // its rounding may be more than one

  float scale_log2 = 0;  // of a score, to units of exp2
  float reference[2];    // in units of scores; -inf before any key
  float row_sum[2];      // this lane's share of a row's sum
  float decay[2];        // what was summed before is to be scaled with, after a growth
  bool settled;          // all rows of the warp have a reference, and one whose rounding does not matter

  __forceinline__ void reset() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      reference[half] = -infinity();
      row_sum[half] = 0;
      decay[half] = 1;
    }
    settled = false;
  }

  // Scores to probabilities. careful: some may be -inf, or remake() cannot bring them back. Says whether what was
  // summed before is to be scaled.
  template <class Remake>
  __forceinline__ bool update(Scores& scores, bool careful, const Remake& remake) {
    if (!careful && settled) {
      if (exponentiate_first(scores)) return false;
      if (!restore(scores)) remake();
    }
    return maximum_first(scores);
  }

  // Takes in the rows of another, who saw other keys. What either summed before is to be scaled with mine and theirs.
  __forceinline__ void take_in(const float (&other_reference)[2], const float (&other_sum)[2], float (&mine)[2],
                               float (&theirs)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float next = fmaxf(reference[half], other_reference[half]);
      mine[half] = factor_between(reference[half], next);
      theirs[half] = factor_between(other_reference[half], next);
      reference[half] = next;
      row_sum[half] = row_sum[half] * mine[half] + other_sum[half] * theirs[half];
    }
  }

  // Over all lanes of the row.
  __forceinline__ float total(int half) const {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }

  // Natural, of a row whose total is not 0.
  __forceinline__ float log_of(float total, int half) const { return (shift_of(half) + fast_log2(total)) * kLn2; }

 private:
  // The reference in units of exp2. A row that has seen no key: any finite number keeps exp2(-inf - it) at 0.
  __forceinline__ float shift_of(int half) const {
    return reference[half] == -infinity() ? 0.0f : reference[half] * scale_log2;
  }

  // From probabilities by one reference to those by another that is not less. They were made with a rounded shift,
  // unless that is large, and rounded in the same way it leaves. Both -inf: nothing to scale.
  __forceinline__ float factor_between(float from, float to) const {
    if (from == to) return 1.0f;
    const float shift = __fmul_rn(from, scale_log2);
    const float next = __fmul_rn(to, scale_log2);
    const bool rounded = fabsf(shift) < kLargeShift && fabsf(next) < kLargeShift;
    return fast_exp2(rounded ? shift - next : (from - to) * scale_log2);
  }

  // False, and row_sum as it was, if a probability of the warp is too large.
  __forceinline__ bool exponentiate_first(Scores& scores) {
    const float shift[2] = {shift_of(0), shift_of(1)};
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < tiles * 4; ++i) {
      const float x = scores[i] * scale_log2 - shift[i / 2 % 2];
      scores[i] = i % 8 < polynomial ? polynomial_exp2(x) : fast_exp2(x);
      sum[i / 2 % 2] += scores[i];
    }
    if (__any_sync(0xffffffffu, !(sum[0] < kTooLarge && sum[1] < kTooLarge))) return false;
    row_sum[0] += sum[0];
    row_sum[1] += sum[1];
    return true;
  }

  // Scores from their exponentials; false if some are beyond that, or the shift would round off too much of them.
  __forceinline__ bool restore(Scores& scores) const {
    bool lost = !(fabsf(shift_of(0)) < kExactShift && fabsf(shift_of(1)) < kExactShift);
#pragma unroll
    for (int i = 0; i < tiles * 4; ++i) lost |= !(scores[i] < kLost);
    if (polynomial > 0 || __any_sync(0xffffffffu, lost)) return false;
#pragma unroll
    for (int i = 0; i < tiles * 4; ++i) scores[i] = (fast_log2(scores[i]) + shift_of(i / 2 % 2)) / scale_log2;
    return true;
  }

  __forceinline__ bool maximum_first(Scores& scores) {
    float largest[2];
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      largest[half] = scores[half * 2];
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        largest[half] = fmaxf(largest[half], fmaxf(scores[n * 4 + half * 2], scores[n * 4 + half * 2 + 1]));
      }
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
      largest[half] = fmaxf(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
      grown |= (largest[half] - reference[half]) * scale_log2 > kSlack;
    }
    grown = __any_sync(0xffffffffu, grown);
    if (grown) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(reference[half], largest[half]);
        decay[half] = factor_between(reference[half], next);
        reference[half] = next;
        row_sum[half] *= decay[half];
      }
    }
    // One FMA a score takes the reference out: s * scale - shift, the product unrounded. What the rounding of the shift
    // adds is the same for all scores of a row and leaves with the row sum; only where it could be more than one, and 2
    // to its power overflow, is the reference taken out before the product.
    float shift[2] = {shift_of(0), shift_of(1)};
    const bool large = !(fabsf(shift[0]) < kLargeShift && fabsf(shift[1]) < kLargeShift);
    const bool unseen = reference[0] == -infinity() || reference[1] == -infinity();
    settled = !__any_sync(0xffffffffu, large || unseen);
    if (!settled && __any_sync(0xffffffffu, large)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (reference[half] == -infinity()) continue;
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
          scores[n * 4 + half * 2] -= reference[half];
          scores[n * 4 + half * 2 + 1] -= reference[half];
        }
        shift[half] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < tiles * 4; ++i) {
      scores[i] = fast_exp2(scores[i] * scale_log2 - shift[i / 2 % 2]);
      row_sum[i / 2 % 2] += scores[i];
    }
    return grown;
  }
};

}  // namespace tessera
