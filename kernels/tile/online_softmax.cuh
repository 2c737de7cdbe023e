// Online softmax over tiles of keys, for the rows of a warp in the accumulator layout of wgmma and mma: in each row
// tile of 16 rows, a lane has two columns of every tile of 8 keys, in rows lane / 4 (half 0) and lane / 4 + 8 (half 1).
//
// A row's probabilities are kept relative to a reference near its running maximum. While no probability is too large
// for a 16-bit type, the reference stays and nothing that was summed before is rescaled. The reference cancels at the
// end.
//
// raise_references() finds the maximum, then exponentiate() takes the exponentials. update_speculatively() does without
// the maximum once every row has a reference: it takes the exponentials at once, and their sum shows whether one was
// too large. Only then are the scores restored, and the maximum is found first.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/math.cuh"

namespace tessera {

// tiles: of 8 keys. row_tiles: of 16 rows.
template <int tiles, int row_tiles = 1>
struct OnlineSoftmax {
  using Scores = float[row_tiles][tiles * 4];
  using Rows = float[row_tiles][2];  // a value per row: [row tile][half]

  static constexpr float kSlack = 8.0f;          // the reference is raised if a maximum exceeds it by a factor 2^kSlack
  static constexpr float kTooLarge = 32768.0f;   // for a sum of probabilities; the largest fp16 is 65504
  static constexpr float kExactShift = 1 << 12;  // below, adding it to a logarithm loses less than rounding to 16 bits
  static constexpr float kLost = 1e38f;          // above, the exponential may be infinite and its score is lost
  static constexpr float kLargeShift = 1 << 24;  // from here on, the rounding error of a shift may exceed one

  float scale_log2 = 0;  // from score units to exp2 units
  Rows reference;        // in score units; -inf before any key
  Rows row_sum;          // this lane's part of a row's sum
  bool settled;          // all rows of the warp have a reference, and its rounding does not matter

  __forceinline__ void reset() {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -infinity();
        row_sum[m][half] = 0;
      }
    }
    settled = false;
  }

  // Raises the references if a maximum exceeds its reference by more than the slack, and returns whether it did. Then
  // rescale(m, half, factor) is called for each row: everything summed before must be multiplied by the factor.
  template <class Rescale>
  __forceinline__ bool raise_references(const Scores& scores, const Rescale& rescale) {
    Rows largest;
    find_maxima(scores, largest);
    bool grown = false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) grown |= (largest[m][half] - reference[m][half]) * scale_log2 > kSlack;
    }
    grown = __any_sync(0xffffffffu, grown);
    if (grown) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float next = fmaxf(reference[m][half], largest[m][half]);
          const float factor = factor_between(reference[m][half], next);
          reference[m][half] = next;
          row_sum[m][half] *= factor;
          rescale(m, half, factor);
        }
      }
    }
    return grown;
  }

  // Scores to probabilities, after raise_references(). settles: `settled` is computed as well.
  template <bool settles>
  __forceinline__ void exponentiate(Scores& scores) {
    // One FMA per score subtracts the reference: s * scale - shift, with an unrounded product. The rounding error of
    // the shift is the same for all scores of a row and cancels with the row sum. Only if it could exceed one, and 2 to
    // its power overflow, is the reference subtracted before the product.
    Rows shift;
    bool large = false, unseen = false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shift[m][half] = shift_of(m, half);
        large |= is_large(shift[m][half]);
        unseen |= reference[m][half] == -infinity();
      }
    }
    if constexpr (settles) settled = !__any_sync(0xffffffffu, large || unseen);
    if ((!settles || !settled) && __any_sync(0xffffffffu, large)) subtract_large_references(scores, shift);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int i = 0; i < tiles * 4; ++i) {
        scores[m][i] = fast_exp2(scores[m][i] * scale_log2 - shift[m][i / 2 % 2]);
        row_sum[m][i / 2 % 2] += scores[m][i];
      }
    }
  }

  // Both steps; once every row has a reference, only the exponentials. careful: some scores may be -inf, or recompute()
  // cannot reproduce them. Returns what raise_references() does.
  template <class Recompute, class Rescale>
  __forceinline__ bool update_speculatively(Scores& scores, bool careful, const Recompute& recompute,
                                            const Rescale& rescale) {
    if (!careful && settled) {
      if (exponentiate_first(scores)) return false;
      if (!restore(scores)) recompute();
    }
    const bool grown = raise_references(scores, rescale);
    exponentiate<true>(scores);
    return grown;
  }

  // The softmax of rows whose keys are all in this tile.
  __forceinline__ void take_all(Scores& scores) {
    find_maxima(scores, reference);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) row_sum[m][0] = row_sum[m][1] = 0;
    exponentiate<false>(scores);
  }

  // Merges the softmax of the same rows over other keys. The caller multiplies what each side has summed by mine and
  // theirs.
  __forceinline__ void merge(const Rows& other_reference, const Rows& other_sum, Rows& mine, Rows& theirs) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(reference[m][half], other_reference[m][half]);
        mine[m][half] = factor_between(reference[m][half], next);
        theirs[m][half] = factor_between(other_reference[m][half], next);
        reference[m][half] = next;
        row_sum[m][half] = row_sum[m][half] * mine[m][half] + other_sum[m][half] * theirs[m][half];
      }
    }
  }

  // The factor that converts probabilities from one reference to another that is not less. They were computed with a
  // rounded shift, unless it is large; rounded in the same way, the shift cancels. Both -inf: there is nothing to
  // scale.
  __forceinline__ float factor_between(float from, float to) const {
    if (from == to) return 1.0f;
    const float shift = __fmul_rn(from, scale_log2);
    const float next = __fmul_rn(to, scale_log2);
    return fast_exp2(!is_large(shift) && !is_large(next) ? shift - next : (from - to) * scale_log2);
  }

  // The row sum over all lanes of the row.
  __forceinline__ float total(int m, int half) const {
    float sum = row_sum[m][half];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
  }

  // In natural units; -inf if the total is 0.
  __forceinline__ float log_sum_exp(float total, int m, int half) const {
    return total == 0.0f ? -infinity() : (shift_of(m, half) + fast_log2(total)) * kLn2;
  }

 private:
  __forceinline__ static void find_maxima(const Scores& scores, Rows& largest) {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& row_max = largest[m][half];
        row_max = scores[m][half * 2];
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
          row_max = fmaxf(row_max, fmaxf(scores[m][n * 4 + half * 2], scores[m][n * 4 + half * 2 + 1]));
        }
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffffu, row_max, 2));
      }
    }
  }

  // The reference in exp2 units. For a row that has seen no key, any finite number keeps exp2(-inf - shift) at 0.
  __forceinline__ float shift_of(int m, int half) const {
    return reference[m][half] == -infinity() ? 0.0f : reference[m][half] * scale_log2;
  }

  static __forceinline__ bool is_large(float shift) { return !(fabsf(shift) < kLargeShift); }

  // Returns false, and leaves row_sum unchanged, if a probability of the warp is too large.
  __forceinline__ bool exponentiate_first(Scores& scores) {
    Rows shift, sum;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shift[m][half] = shift_of(m, half);
        sum[m][half] = 0;
      }
    }
    bool fits = true;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int i = 0; i < tiles * 4; ++i) {
        scores[m][i] = fast_exp2(scores[m][i] * scale_log2 - shift[m][i / 2 % 2]);
        sum[m][i / 2 % 2] += scores[m][i];
      }
      fits &= sum[m][0] < kTooLarge && sum[m][1] < kTooLarge;
    }
    if (__any_sync(0xffffffffu, !fits)) return false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      row_sum[m][0] += sum[m][0];
      row_sum[m][1] += sum[m][1];
    }
    return true;
  }

  // Recovers the scores from their exponentials. Returns false if some are lost, or the shift would round off too much.
  __forceinline__ bool restore(Scores& scores) const {
    bool lost = false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      lost |= !(fabsf(shift_of(m, 0)) < kExactShift && fabsf(shift_of(m, 1)) < kExactShift);
#pragma unroll
      for (int i = 0; i < tiles * 4; ++i) lost |= !(scores[m][i] < kLost);
    }
    if (__any_sync(0xffffffffu, lost)) return false;
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int i = 0; i < tiles * 4; ++i) {
        scores[m][i] = (fast_log2(scores[m][i]) + shift_of(m, i / 2 % 2)) / scale_log2;
      }
    }
    return true;
  }

  // Their shift becomes 0.
  __forceinline__ void subtract_large_references(Scores& scores, Rows& shift) const {
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!is_large(shift[m][half])) continue;
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
          scores[m][n * 4 + half * 2] -= reference[m][half];
          scores[m][n * 4 + half * 2 + 1] -= reference[m][half];
        }
        shift[m][half] = 0;
      }
    }
  }
};

}  // namespace tessera
