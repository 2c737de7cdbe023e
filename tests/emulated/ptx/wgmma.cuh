// Takes the place of kernels/ptx/wgmma.cuh (device.h).
#pragma once

#include "ptx/shared.cuh"

namespace tessera {

struct MatrixDescriptor {
  unsigned address, atom_distance, width;
  unsigned long long at(unsigned bytes) const {
    return static_cast<unsigned long long>(width) << 48 | static_cast<unsigned long long>(atom_distance) << 24 |
           (address + bytes);
  }
};
template <int width>
MatrixDescriptor matrix_descriptor(unsigned address, unsigned atom_distance) {
  return {address, atom_distance, width};
}

// An operand in shared memory, in swizzle atoms. Of element (i, k), i counts rows of A, or columns of B.
struct MatrixInShared {
  emulated::Window window = emulated::async_view();
  unsigned start, atom_distance, width;

  explicit MatrixInShared(unsigned long long descriptor)
      : start(descriptor & 0xffffff), atom_distance(descriptor >> 24 & 0xffffff), width(descriptor >> 48) {}
  template <class Value>
  Value read(unsigned plain) const {
    const unsigned address = plain ^ (plain >> 7 & (width / 8 - 1)) << 4;
    Value value;
    const bool exists = address + sizeof value <= window.bytes;
    emulated::require(exists, "an operand beyond shared memory");
    std::memcpy(&value, window.data + (exists ? address : 0), sizeof value);
    return value;
  }
  template <DType dtype, bool transposed>
  float at(unsigned i, unsigned k) const {
    const unsigned offset = transposed ? i / width * atom_distance + (k * width + i % width) * 2 : (i * width + k) * 2;
    return to_float<dtype>(read<Bits16>(start + offset));
  }
  unsigned byte_at(unsigned i, unsigned k) const { return read<unsigned char>(start + i * width * 2 + k); }
};

// A in registers: a lane has parts of two rows, the lanes of a quad the rest. They exchange them.
struct OperandOfQuad {
  unsigned word[4][4];  // [lane of the quad][word]

  explicit OperandOfQuad(const unsigned (&own)[4]) {
    unsigned all[32 * 4];
    emulated::exchange(own, 4, all);
    std::memcpy(word, all + threadIdx.x % 32 / 4 * 16, sizeof word);
  }
};

template <int n>
struct Wgmma {
  // a(row, k): of this warp's 16 rows.
  template <DType dtype, bool transposed_b, class A>
  static void add(float (&d)[n / 2], const A& a, unsigned long long b_descriptor, bool adds) {
    const MatrixInShared b(b_descriptor);
    const unsigned lane = threadIdx.x % 32;
    float of_a[2][16];
    for (unsigned k = 0; k < 16; ++k) {
      for (unsigned half = 0; half < 2; ++half) of_a[half][k] = a(half * 8 + lane / 4, k);
    }
    for (unsigned i = 0; i < n / 4; ++i) {
      float of_b[16];
      for (unsigned k = 0; k < 16; ++k) of_b[k] = b.at<dtype, transposed_b>(i / 2 * 8 + lane % 4 * 2 + i % 2, k);
      for (unsigned half = 0; half < 2; ++half) {
        float& sum = d[i / 2 * 4 + half * 2 + i % 2];
        if (!adds) sum = 0;
        for (unsigned k = 0; k < 16; ++k) sum += of_a[half][k] * of_b[k];
      }
    }
  }
  template <DType dtype, bool transposed_b, bool transposed_a = false>
  static void shared_shared(float (&d)[n / 2], unsigned long long a, unsigned long long b, bool adds) {
    emulated::defer(emulated::Queue::kWgmma, [&d, a, b, adds] {
      const MatrixInShared of_a(a);
      const unsigned first = threadIdx.x % 128 / 32 * 16;
      add<dtype, transposed_b>(
          d, [&](unsigned row, unsigned k) { return of_a.at<dtype, transposed_a>(first + row, k); }, b, adds);
    });
  }
  template <DType dtype, bool transposed_b>
  static void registers_shared(float (&d)[n / 2], const unsigned (&a)[4], unsigned long long b, bool adds) {
    const OperandOfQuad rows(a);
    emulated::defer(emulated::Queue::kWgmma, [&d, rows, b, adds] {
      add<dtype, transposed_b>(
          d,
          [&](unsigned row, unsigned k) {
            const unsigned pair = rows.word[k % 8 / 2][k / 8 * 2 + row / 8];
            return k % 2 == 0 ? low_to_float<dtype>(pair) : high_to_float<dtype>(pair);
          },
          b, adds);
    });
  }
};
inline void wgmma_fence() {}
inline void wgmma_commit_group() { emulated::commit(emulated::Queue::kWgmma); }
template <int pending>
void wgmma_wait_group() {
  emulated::wait(emulated::Queue::kWgmma, pending);
  emulated::sync_warp();  // it is one instruction of the warp
}
template <int count>
void wgmma_fence_operand(float (&)[count]) {}
template <int count>
void wgmma_discard(float (&d)[count]) {
  for (float& value : d) value = NAN;
}
template <int registers>
void setmaxnreg_dec() {}
template <int registers>
void setmaxnreg_inc() {}

}  // namespace tessera
