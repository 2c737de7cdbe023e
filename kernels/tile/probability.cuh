// From a score to a probability: score modifications and the exponential.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/math.cuh"

namespace tessera {

// exp(score - LSE of the row). Rounding can leave a score above the LSE, and if both are huge by more than exp2 can
// represent, so the exponent is clamped at 0. NaN is propagated.
__forceinline__ float probability(float score, float scale_log2, float lse_log2) {
  return fast_exp2(min_or_nan(score * scale_log2 - lse_log2, 0.0f));
}

// q . k to the modified score in natural units. Returns the derivative by which the backward multiplies the score's
// gradient.
__forceinline__ float modify_score(float& s, float scale, float softcap, float slope, int distance) {
  float derivative = 1;
  s *= scale;
  if (softcap > 0) {
    const float t = accurate_tanh(s / softcap);
    s = softcap * t;
    derivative = 1 - t * t;
  }
  s -= slope * static_cast<float>(distance < 0 ? -distance : distance);
  return derivative;
}

}  // namespace tessera
