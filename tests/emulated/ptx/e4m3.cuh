// Takes the place of kernels/ptx/e4m3.cuh (device.h).
#pragma once

#include "ptx/wgmma.cuh"

namespace tessera {

constexpr float kLargestE4m3 = 448.0f;

inline float float_from_e4m3(unsigned byte) {
  const int exponent = static_cast<int>(byte >> 3 & 15), mantissa = static_cast<int>(byte & 7);
  float size = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                             : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  if ((byte & 0x7f) == 0x7f) size = NAN;
  return (byte & 0x80) != 0 ? -size : size;
}
inline unsigned e4m3_from_float(float value) {
  const unsigned sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return sign | 0x7f;
  const float size = std::fmin(std::fabs(value), kLargestE4m3);
  if (size == 0) return sign;
  int exponent = 0;
  std::frexp(size, &exponent);
  const int step = std::max(exponent - 4, -9);                                        // of the last bit
  const auto units = static_cast<unsigned>(std::nearbyint(std::ldexp(size, -step)));  // 16: the next exponent's 8
  if (step == -9 && units < 8) return sign | units;
  return sign | std::min(static_cast<unsigned>(step + 10) * 8 + units - 8, 0x7eu);
}
inline unsigned pack_e4m3(float v0, float v1, float v2, float v3) {
  return e4m3_from_float(v0) | e4m3_from_float(v1) << 8 | e4m3_from_float(v2) << 16 | e4m3_from_float(v3) << 24;
}
inline void unpack_e4m3(unsigned packed, float (&v)[4]) {
  for (int i = 0; i < 4; ++i) v[i] = float_from_e4m3(packed >> 8 * i & 0xff);
}

// As Wgmma<n>, with steps of 32 along K and both operands along it.
template <int n>
struct WgmmaE4m3 {
  template <class A>
  static void add(float (&d)[n / 2], const A& a, unsigned long long b_descriptor, bool adds) {
    const MatrixInShared b(b_descriptor);
    const unsigned lane = threadIdx.x % 32;
    float of_a[2][32];
    for (unsigned k = 0; k < 32; ++k) {
      for (unsigned half = 0; half < 2; ++half) of_a[half][k] = float_from_e4m3(a(half * 8 + lane / 4, k));
    }
    for (unsigned i = 0; i < n / 4; ++i) {
      float of_b[32];
      for (unsigned k = 0; k < 32; ++k) of_b[k] = float_from_e4m3(b.byte_at(i / 2 * 8 + lane % 4 * 2 + i % 2, k));
      for (unsigned half = 0; half < 2; ++half) {
        float& sum = d[i / 2 * 4 + half * 2 + i % 2];
        if (!adds) sum = 0;
        for (unsigned k = 0; k < 32; ++k) sum += of_a[half][k] * of_b[k];
      }
    }
  }
  static void shared_shared(float (&d)[n / 2], unsigned long long a, unsigned long long b, bool adds) {
    emulated::defer(emulated::Queue::kWgmma, [&d, a, b, adds] {
      const MatrixInShared of_a(a);
      const unsigned first = threadIdx.x % 128 / 32 * 16;
      add(
          d, [&](unsigned row, unsigned k) { return of_a.byte_at(first + row, k); }, b, adds);
    });
  }
  static void registers_shared(float (&d)[n / 2], const unsigned (&a)[4], unsigned long long b, bool adds) {
    const OperandOfQuad rows(a);
    emulated::defer(emulated::Queue::kWgmma, [&d, rows, b, adds] {
      add(
          d, [&](unsigned row, unsigned k) { return rows.word[k % 16 / 4][k / 16 * 2 + row / 8] >> k % 4 * 8 & 0xff; },
          b, adds);
    });
  }
};

// What stands beside its kernel.
inline void halves_from_e4m3(unsigned word, unsigned& low, unsigned& high) {
  float v[4];
  unpack_e4m3(word, v);
  low = pack<DType::kFloat16>(v[0], v[1]);
  high = pack<DType::kFloat16>(v[2], v[3]);
}
// function(a, b, c) of each half of pairs.
template <DType dtype, class Function>
unsigned of_halves(unsigned a, unsigned b, unsigned c, const Function& function) {
  const auto of = [&](int shift) {
    const auto value = [&](unsigned pair) { return to_float<dtype>(static_cast<Bits16>(pair >> shift)); };
    return static_cast<unsigned>(from_float<dtype>(function(value(a), value(b), value(c)))) << shift;
  };
  return of(0) | of(16);
}
inline unsigned fma_half(unsigned a, unsigned b, unsigned c) {
  return of_halves<DType::kFloat16>(a, b, c, [](float x, float y, float z) { return std::fma(x, y, z); });
}
inline unsigned multiply_bf16(unsigned pair, unsigned by) {
  return of_halves<DType::kBFloat16>(pair, by, by, [](float x, float y, float) { return x * y; });
}
template <DType dtype>
unsigned max_abs(unsigned a, unsigned b) {
  return of_halves<dtype>(a, b, b, [](float x, float y, float) { return std::fmax(x, std::fabs(y)); });
}

}  // namespace tessera
