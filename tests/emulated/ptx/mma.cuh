// Takes the place of kernels/ptx/mma.cuh (device.h).
#pragma once

#include "ptx/convert.cuh"

namespace tessera {

// Of the lanes that have a row of A and a column of B. times(a, b): of two words.
template <int words, class Times>
void mma(float (&d)[4], const unsigned (&a)[2 * words], const unsigned (&b)[words], const float (&c)[4],
         const Times& times) {
  constexpr int kAll = 3 * words;
  unsigned own[kAll], all[32 * kAll];
  std::memcpy(own, a, sizeof a);
  std::memcpy(own + 2 * words, b, sizeof b);
  emulated::exchange(own, kAll, all);
  const int row = emulated::lane() / 4;
  for (int i = 0; i < 4; ++i) {
    const int column = emulated::lane() % 4 * 2 + i % 2;
    float sum = c[i];
    for (int word = 0; word < words; ++word) {
      for (int lane = 0; lane < 4; ++lane) {
        sum +=
            times(all[(row * 4 + lane) * kAll + 2 * word + i / 2], all[(column * 4 + lane) * kAll + 2 * words + word]);
      }
    }
    d[i] = sum;
  }
}
template <DType dtype>
float times(unsigned a, unsigned b) {
  return low_to_float<dtype>(a) * low_to_float<dtype>(b) + high_to_float<dtype>(a) * high_to_float<dtype>(b);
}
template <DType dtype>
void mma_k8(float (&d)[4], unsigned a0, unsigned a1, unsigned b0, const float (&c)[4]) {
  mma<1>(d, {a0, a1}, {b0}, c, times<dtype>);
}
template <DType dtype>
void mma_k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&c)[4]) {
  mma<2>(d, a, {b0, b1}, c, times<dtype>);
}
template <DType dtype>
void mma_k8(float (&d)[4], unsigned a0, unsigned a1, unsigned b0) {
  mma_k8<dtype>(d, a0, a1, b0, d);
}
template <DType dtype>
void mma_k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma_k16<dtype>(d, a, b0, b1, d);
}

}  // namespace tessera
