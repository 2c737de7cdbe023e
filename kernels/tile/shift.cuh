// 16-bit elements across 16-byte boundaries.
#pragma once

#include "ptx/global.cuh"

namespace tessera {

// Elements `from` to `from` + 7 of the sixteen in low and high; from: 0 to 8.
__forceinline__ Words4 eight_of_sixteen(const Words4& low, const Words4& high, int from) {
  unsigned x[9];
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = low.word[i], x[i + 4] = high.word[i];
  x[8] = 0;
  const int words = from / 2;
#pragma unroll
  for (int i = 0; i < 5; ++i) x[i] = words & 4 ? x[i + 4] : x[i];
#pragma unroll
  for (int i = 0; i < 7; ++i) x[i] = words & 2 ? x[i + 2] : x[i];
#pragma unroll
  for (int i = 0; i < 6; ++i) x[i] = words & 1 ? x[i + 1] : x[i];
  Words4 y;
#pragma unroll
  for (int i = 0; i < 4; ++i) y.word[i] = __funnelshift_r(x[i], x[i + 1], from % 2 * 16);
  return y;
}

}  // namespace tessera
