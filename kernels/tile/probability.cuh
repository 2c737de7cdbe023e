// A score on its way to a probability, and who may see whom.
#pragma once

#include "contract/attention_forward.h"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"

namespace tessera {

// By its row's LSE. Rounding can leave a score above that, by more than exp2 can take where both are huge. A NaN stays.
__forceinline__ float probability(float score, float scale_log2, float lse_log2) {
  return fast_exp2(min_or_nan(score * scale_log2 - lse_log2, 0.0f));
}

// q . k to the score in natural units. Returns what a gradient of the score is multiplied with on the way back.
__forceinline__ float transform_score(float& s, float scale, float softcap, float slope, int distance) {
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

template <bool banded>
__forceinline__ bool is_visible(int key, int position, int len_k, const Band& band) {
  if constexpr (!banded) return key < len_k;
  return key < len_k && key >= position - band.left && key <= position + band.right;
}

}  // namespace tessera
