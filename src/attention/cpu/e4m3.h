// e4m3 on the CPU: sign, 4 bits of exponent with bias 7, 3 of fraction; all ones is NaN, and there is no infinity.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/dtype.h"

namespace tessera::cpu {

inline float from_e4m3(int bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if (exponent == 15 && fraction == 7) return std::numeric_limits<float>::quiet_NaN();
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                   : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return (bits & 128) != 0 ? -size : size;
}

// To nearest, ties to even; beyond the largest value, to the largest.
inline unsigned char to_e4m3(float value) {
  constexpr float kLargest = 448, kLeastNormal = 1.0f / 64;
  const unsigned sign = std::signbit(value) ? 128u : 0u;
  if (std::isnan(value)) return static_cast<unsigned char>(sign | 127u);
  const float size = std::min(std::abs(value), kLargest);
  if (size < kLeastNormal) {
    return static_cast<unsigned char>(sign | static_cast<unsigned>(std::nearbyint(size * 512)));  // 8: the least normal
  }
  // Drops 20 of 23 bits of the fraction; a carry into the exponent is right.
  auto bits = std::bit_cast<std::uint32_t>(size);
  bits += 0x7ffffu + (bits >> 20 & 1u);
  return static_cast<unsigned char>(sign | ((bits >> 20) - (120u << 3)));
}

// As kernels/attention/quantize_fp8_sm90.cuh has it.
inline int fp8_scale_exponent(float amax) {
  constexpr int kBound = 60;
  if (amax == 0) return 0;
  const auto bits = std::bit_cast<std::uint32_t>(amax);
  return std::clamp(static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0), -kBound, kBound);
}

inline float load_element(const void* data, DType dtype, std::int64_t at) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[at];
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  float size = 0;
  if (exponent == 31) {
    size = fraction == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  } else {
    size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                         : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -size : size;
}

}  // namespace tessera::cpu
