// e4m3 on the CPU: sign, 4 bits of exponent with bias 7, 3 of fraction; all ones is NaN, and there is no infinity.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/quantize_fp8_config.h"
#include "base/dtype.h"

namespace tessera::cpu {

inline float from_e4m3(int bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  if (exponent == 15 && fraction == 7) return std::numeric_limits<float>::quiet_NaN();
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                   : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
  return (bits & 128) != 0 ? -size : size;
}

inline const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values{};
    for (int bits = 0; bits < 256; ++bits) values[static_cast<std::size_t>(bits)] = from_e4m3(bits);
    return values;
  }();
  return table;
}

// To nearest, ties to even; beyond the largest value, to the largest. NaN has no sign, as a GPU's has none.
inline unsigned char to_e4m3(float value) {
  constexpr float kLargest = 448, kLeastNormal = 1.0f / 64;
  const unsigned sign = std::signbit(value) ? 128u : 0u;
  if (std::isnan(value)) return 127;
  const float size = std::min(std::abs(value), kLargest);
  if (size < kLeastNormal) {
    return static_cast<unsigned char>(sign | static_cast<unsigned>(std::nearbyint(size * 512)));  // 8: the least normal
  }
  // Drops 20 of 23 bits of the fraction; a carry into the exponent is right.
  auto bits = std::bit_cast<std::uint32_t>(size);
  bits += 0x7ffffu + (bits >> 20 & 1u);
  return static_cast<unsigned char>(sign | ((bits >> 20) - (120u << 3)));
}

// As kernels/attention/quantize_fp8.cuh has it.
constexpr int kLeastScaleExponent = -60;
inline int fp8_scale_exponent(float amax) {
  if (amax == 0) return 0;
  const auto bits = std::bit_cast<std::uint32_t>(amax);
  return std::clamp(static_cast<int>(bits >> 23) - 127 - 8 + ((bits & 0x7fffffu) > 0x600000u ? 1 : 0),
                    kLeastScaleExponent, -kLeastScaleExponent);
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

// Rounds to the type, ties to even; beyond the largest value, to the largest.
inline void store_element(void* data, DType dtype, std::int64_t at, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[at] = value;
    return;
  }
  const bool bf16 = dtype == DType::kBFloat16;
  const float largest = bf16 ? 3.3895313892515355e38f : 65504.0f;
  auto bits = std::bit_cast<std::uint32_t>(std::clamp(value, -largest, largest));  // NaN stays
  std::uint32_t result = 0;
  if (bf16) {
    result = std::isnan(value) ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  } else if (std::isnan(value)) {
    result = 0x7e00u;
  } else if (const float size = std::abs(std::bit_cast<float>(bits)); size < 0x1p-14f) {
    result = (bits >> 16 & 0x8000u) | static_cast<std::uint32_t>(std::nearbyint(size * 0x1p24f));
  } else {
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    bits = (bits & 0x7fffffffu) + 0xfffu + (bits >> 13 & 1u);
    result = sign | ((bits >> 13) - (112u << 10));
  }
  static_cast<std::uint16_t*>(data)[at] = static_cast<std::uint16_t>(result);
}

// As the kernel does it: blocks of columns times an orthonormal Hadamard matrix.
inline void multiply_by_hadamard(std::vector<float>& row) {
  const std::size_t block = static_cast<std::size_t>(rotation_block(static_cast<int>(row.size())));
  for (std::size_t step = 1; step < block; step *= 2) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      if ((i & step) != 0) continue;
      const float low = row[i], high = row[i + step];
      row[i] = low + high;
      row[i + step] = low - high;
    }
  }
  const int log2 = std::countr_zero(block);
  const float norm = std::ldexp(log2 % 2 != 0 ? 0.70710678118654752f : 1.0f, -(log2 / 2));
  for (float& x : row) x *= norm;
}
inline void change_signs(std::vector<float>& row) {
  for (std::size_t i = 0; i < row.size(); ++i) {
    if (changes_sign(static_cast<int>(i))) row[i] = -row[i];
  }
}
inline void rotate_fp8_row_back(std::vector<float>& row) {
  multiply_by_hadamard(row);
  change_signs(row);
}

// A row as it is rounded to e4m3; a rotated one is rounded to its type first.
inline void load_fp8_row(const void* data, DType dtype, std::int64_t at, bool rotates, std::vector<float>& row) {
  for (std::size_t d = 0; d < row.size(); ++d) {
    row[d] = load_element(data, dtype, at + static_cast<std::int64_t>(d));
  }
  if (!rotates) return;
  change_signs(row);
  multiply_by_hadamard(row);
  if (dtype == DType::kFloat32) return;
  for (float& x : row) {
    std::uint16_t bits = 0;
    store_element(&bits, dtype, 0, x);
    x = load_element(&bits, dtype, 0);
  }
}

}  // namespace tessera::cpu
