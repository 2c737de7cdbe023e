// Takes the place of kernels/ptx/convert.cuh (device.h).
#pragma once

#include "device.h"
#include "tile/types.h"

namespace tessera {

using Bits16 = unsigned short;

constexpr unsigned kFloatInfinityBits = 0x7f800000u;
inline float float_from_bits(unsigned bits) { return __uint_as_float(bits); }
inline unsigned bits_from_float(float value) { return __float_as_uint(value); }
inline float infinity() { return float_from_bits(kFloatInfinityBits); }

inline float float_from_half(Bits16 bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
inline Bits16 half_from_float(float value) { return __builtin_bit_cast(Bits16, static_cast<_Float16>(value)); }
inline float float_from_bfloat(Bits16 bits) { return float_from_bits(static_cast<unsigned>(bits) << 16); }
inline Bits16 bfloat_from_float(float value) {
  const unsigned bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > kFloatInfinityBits) return static_cast<Bits16>(bits >> 16 | 0x40u);
  return static_cast<Bits16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
template <DType dtype>
float to_float(Bits16 bits) {
  if constexpr (dtype == DType::kFloat16) return float_from_half(bits);
  return float_from_bfloat(bits);
}
template <DType dtype>
Bits16 from_float(float value) {
  if constexpr (dtype == DType::kFloat16) return half_from_float(value);
  return bfloat_from_float(value);
}
template <DType dtype>
float low_to_float(unsigned pair) {
  return to_float<dtype>(static_cast<Bits16>(pair));
}
template <DType dtype>
float high_to_float(unsigned pair) {
  return to_float<dtype>(static_cast<Bits16>(pair >> 16));
}
template <DType dtype>
unsigned pack(float low, float high) {
  return static_cast<unsigned>(from_float<dtype>(high)) << 16 | from_float<dtype>(low);
}

}  // namespace tessera
