// Conversions between fp16 or bf16 and fp32. 16-bit values are held as raw bits, two to a 32-bit register with the
// first in the low half, as in memory.
#pragma once

#include "tile/types.h"

namespace tessera {

using Bits16 = unsigned short;

constexpr unsigned kFloatInfinityBits = 0x7f800000u;

__forceinline__ float float_from_bits(unsigned bits) { return __uint_as_float(bits); }
__forceinline__ unsigned bits_from_float(float value) { return __float_as_uint(value); }
__forceinline__ float infinity() { return float_from_bits(kFloatInfinityBits); }

__forceinline__ float float_from_half(Bits16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__forceinline__ Bits16 half_from_float(float value) {
  Bits16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// bf16 is the upper half of an fp32, so widening needs no conversion instruction on any architecture.
__forceinline__ float float_from_bfloat(Bits16 bits) { return float_from_bits(static_cast<unsigned>(bits) << 16); }

// Below sm_80 there is no cvt to bf16. Round to nearest even by adding half of the last kept bit's value, less one if
// that bit is 0. A NaN keeps its sign and upper payload and is made quiet, so that rounding cannot turn it into inf.
__forceinline__ Bits16 bfloat_from_float(float value) {
#if __CUDA_ARCH__ >= 900
  Bits16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#elif __CUDA_ARCH__ >= 800
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(value));
  return static_cast<Bits16>(pair);
#else
  const unsigned bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > kFloatInfinityBits) return static_cast<Bits16>((bits >> 16) | 0x40u);
  return static_cast<Bits16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}

template <DType dtype>
__forceinline__ float to_float(Bits16 bits) {
  static_assert(dtype == DType::kFloat16 || dtype == DType::kBFloat16);
  if constexpr (dtype == DType::kFloat16) return float_from_half(bits);
  return float_from_bfloat(bits);
}

template <DType dtype>
__forceinline__ Bits16 from_float(float value) {
  static_assert(dtype == DType::kFloat16 || dtype == DType::kBFloat16);
  if constexpr (dtype == DType::kFloat16) return half_from_float(value);
  return bfloat_from_float(value);
}

template <DType dtype>
__forceinline__ float low_to_float(unsigned pair) {
  return to_float<dtype>(static_cast<Bits16>(pair));
}

template <DType dtype>
__forceinline__ float high_to_float(unsigned pair) {
  if constexpr (dtype == DType::kBFloat16) return float_from_bits(pair & 0xffff0000u);
  return to_float<dtype>(static_cast<Bits16>(pair >> 16));
}

template <DType dtype>
__forceinline__ unsigned pack(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned pair;
  if constexpr (dtype == DType::kFloat16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return static_cast<unsigned>(from_float<dtype>(low)) | static_cast<unsigned>(from_float<dtype>(high)) << 16;
#endif
}

}  // namespace tessera
