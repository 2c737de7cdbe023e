// Takes the place of kernels/ptx/mma_e4m3.cuh (device.h).
#pragma once

#include "ptx/e4m3.cuh"
#include "ptx/mma.cuh"

namespace tessera {

inline void mma_e4m3_k32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma<2>(d, a, {b0, b1}, d, [](unsigned of_a, unsigned of_b) {
    float sum = 0, x[4], y[4];
    unpack_e4m3(of_a, x);
    unpack_e4m3(of_b, y);
    for (int i = 0; i < 4; ++i) sum += x[i] * y[i];
    return sum;
  });
}

}  // namespace tessera
