// Takes the place of kernels/ptx/wgmma.cuh (emulated.h).
#pragma once

#include "ptx/shared.cuh"

namespace tessera {

struct MatrixDescriptor {
  unsigned address, atom_distance;
  unsigned long long at(unsigned bytes) const {
    return static_cast<unsigned long long>(atom_distance) << 32 | (address + bytes);
  }
};
template <int width>
MatrixDescriptor matrix_descriptor(unsigned address, unsigned atom_distance) {
  static_assert(width == 64);
  return {address, atom_distance};
}

// Element (i, k) of an operand: i counts rows of A, or columns of B.
template <bool transposed>
float element_of(unsigned long long descriptor, int i, int k) {
  const auto start = static_cast<unsigned>(descriptor), atom_distance = static_cast<unsigned>(descriptor >> 32);
  const unsigned plain =
      start + (transposed ? static_cast<unsigned>(i / 64) * atom_distance + static_cast<unsigned>(k * 128 + i % 64 * 2)
                          : static_cast<unsigned>(i * 128 + k * 2));
  return to_float<DType::kBFloat16>(load_shared_2(plain ^ (plain >> 7 & 7) << 4));
}

template <int n>
struct Wgmma {
  template <DType dtype, bool transposed_b, bool transposed_a>
  static void shared_shared(float (&d)[n / 2], unsigned long long a, unsigned long long b, bool adds) {
    emulated::defer(emulated::Queue::kWgmma, [&d, a, b, adds] {
      const int warp = static_cast<int>(threadIdx.x) % 128 / 32, lane = static_cast<int>(threadIdx.x) % 32;
      for (int half = 0; half < 2; ++half) {
        float of_a[16];
        for (int k = 0; k < 16; ++k) of_a[k] = element_of<transposed_a>(a, warp * 16 + half * 8 + lane / 4, k);
        for (int i = 0; i < n / 4; ++i) {
          float& sum = d[i / 2 * 4 + half * 2 + i % 2];
          if (!adds) sum = 0;
          for (int k = 0; k < 16; ++k)
            sum += of_a[k] * element_of<transposed_b>(b, i / 2 * 8 + lane % 4 * 2 + i % 2, k);
        }
      }
    });
  }
};
inline void wgmma_fence() {}
inline void wgmma_commit_group() { emulated::commit(emulated::Queue::kWgmma); }
template <int pending>
void wgmma_wait_group() {
  emulated::wait(emulated::Queue::kWgmma, pending);
}
template <int count>
void wgmma_fence_operand(float (&)[count]) {}
template <int registers>
void setmaxnreg_dec() {}
template <int registers>
void setmaxnreg_inc() {}

}  // namespace tessera
