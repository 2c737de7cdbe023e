// Takes the place of kernels/ptx/convert.cuh (emulated.h).
#pragma once

#include "emulated.h"
#include "tile/types.h"

namespace tessera {

// bf16 alone.
using Bits16 = unsigned short;
inline float float_from_bits(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned bits_from_float(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
template <DType dtype>
float to_float(Bits16 bits) {
  static_assert(dtype == DType::kBFloat16);
  return float_from_bits(static_cast<unsigned>(bits) << 16);
}
template <DType dtype>
Bits16 from_float(float value) {
  const unsigned bits = bits_from_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<Bits16>(bits >> 16 | 0x40u);
  return static_cast<Bits16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
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
