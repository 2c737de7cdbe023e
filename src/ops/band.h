// A problem's mask as the kernels take it.
#pragma once

#include <algorithm>

#include "contract/attention_forward.h"
#include "ops/attention.h"

namespace tessera {

inline int band_edge(std::int64_t window) {
  return static_cast<int>(window < 0 ? kUnbounded : std::min<std::int64_t>(window, kUnbounded));
}

inline Band band_of(const AttentionProblem& p) {
  return {.left = band_edge(p.window_left),
          .right = p.causal ? 0 : band_edge(p.window_right),
          .bottom_right = p.alignment == Alignment::kBottomRight};
}

// Some keys are hidden from some queries.
inline bool is_banded(const AttentionProblem& p) { return p.causal || p.window_left >= 0 || p.window_right >= 0; }

// More is asked of a score than a positive scale.
inline bool is_general(const AttentionProblem& p) { return p.softcap > 0 || p.alibi || !(p.scale > 0); }

}  // namespace tessera
