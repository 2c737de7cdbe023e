// Rounding to e4m3 with a scale that is a power of two. sm_89 and newer.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/global.cuh"

namespace tessera {

constexpr int kLeastScaleExponent = -60;  // bounds, so that products of scales are finite

// The exponent of the scale for a largest value: the least with value <= 448 * 2^exponent, 448 being 1.75 * 2^8. Beyond
// the bounds, values saturate or lose bits.
__forceinline__ int fp8_scale_exponent(float amax) {
  const unsigned bits = bits_from_float(amax);
  const int exponent = static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  return amax == 0.0f ? 0 : max(kLeastScaleExponent, min(exponent, -kLeastScaleExponent));
}
__forceinline__ float power_of_two(int exponent) {
  return float_from_bits(static_cast<unsigned>(exponent + 127) << 23);
}
__forceinline__ float inverse_power_of_two(float power) {
  return float_from_bits((254u << 23) - bits_from_float(power));
}
// Of a row by itself. Zeros take the least, so that they do not count beside rows that have values.
__forceinline__ float fp8_row_scale(float amax) {
  return power_of_two(amax == 0.0f ? kLeastScaleExponent : fp8_scale_exponent(amax));
}

// Of both halves of pairs of fp16: a b + c.
__forceinline__ unsigned fma_half(unsigned a, unsigned b, unsigned c) {
  unsigned sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// The larger of a and |b|, of each half; NaN is ignored.
template <DType dtype>
__forceinline__ unsigned max_abs(unsigned a, unsigned b) {
  unsigned larger;
  if constexpr (dtype == DType::kFloat16) {
    asm("{\n.reg .b32 size;\nabs.f16x2 size, %2;\nmax.f16x2 %0, %1, size;\n}\n" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("{\n.reg .b32 size;\nabs.bf16x2 size, %2;\nmax.bf16x2 %0, %1, size;\n}\n" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}
// Of both halves.
template <DType dtype>
__forceinline__ float larger_half(unsigned pair) {
  return fmaxf(low_to_float<dtype>(pair), high_to_float<dtype>(pair));
}

// Pairs of bf16 times a power of two.
__forceinline__ unsigned multiply_bf16(unsigned pair, unsigned by) {
  constexpr unsigned kMinusZeros = 0x80008000u;
  unsigned product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(pair), "r"(by), "r"(kMinusZeros));
  return product;
}

template <DType dtype>
__forceinline__ void unpack_8(const Words4& from, float (&x)[8]) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    x[2 * w] = low_to_float<dtype>(from.word[w]);
    x[2 * w + 1] = high_to_float<dtype>(from.word[w]);
  }
}

// 8 values times the inverse of their scale.
template <DType dtype>
__forceinline__ Words2 round_8(const Words4& from, float inverse) {
  float x[8];
  if constexpr (dtype == DType::kBFloat16) {
    const unsigned by = bits_from_float(inverse) | bits_from_float(inverse) >> 16;
    Words4 products;
#pragma unroll
    for (int w = 0; w < 4; ++w) products.word[w] = multiply_bf16(from.word[w], by);
    unpack_8<dtype>(products, x);
    return {pack_e4m3(x[0], x[1], x[2], x[3]), pack_e4m3(x[4], x[5], x[6], x[7])};
  }
  unpack_8<dtype>(from, x);
  return {pack_e4m3(x[0] * inverse, x[1] * inverse, x[2] * inverse, x[3] * inverse),
          pack_e4m3(x[4] * inverse, x[5] * inverse, x[6] * inverse, x[7] * inverse)};
}

}  // namespace tessera
