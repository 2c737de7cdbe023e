// Elements as fp32, rows of them, and functions of fp32 without branches, whose loops compilers vectorise.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "base/dtype.h"

// Functions that are compiled for several levels of x86, with what they call that is inline; the loader chooses. Sanitizers
// are not ready when it does.
#if defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TESSERA_CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), flatten))
#else
#define TESSERA_CLONED
#endif

namespace tessera::cpu {

inline float float_of_half(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
  const bool special = (bits & 0x7c00u) == 0x7c00u;
  const auto scaled = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  return std::bit_cast<float>(sign | (special ? magnitude | 0x7f800000u : scaled));
}
inline float float_of_bfloat(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// Round to nearest even.
inline std::uint16_t bfloat_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}
// Below the smallest normal number, adding 0.5 aligns the value's last kept bit with fp32's.
inline std::uint16_t half_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const std::uint32_t small = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  const std::uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  const std::uint32_t finite = magnitude < 0x38800000u ? small : normal;
  const std::uint32_t large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  return static_cast<std::uint16_t>(sign | (magnitude >= 0x477ff000u ? large : finite));
}

inline float load(DType dtype, const void* data, std::int64_t at) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[at];
  return dtype == DType::kBFloat16 ? float_of_bfloat(bits) : float_of_half(bits);
}
inline void store(DType dtype, void* data, std::int64_t at, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<std::uint16_t*>(data)[at] = dtype == DType::kBFloat16 ? bfloat_of(value) : half_of(value);
  }
}

// `count` elements from data[at] on.
void load_row(DType dtype, const void* data, std::int64_t at, std::int64_t count, float* to);
void store_row(DType dtype, void* data, std::int64_t at, std::int64_t count, const float* from);

// The sum of term(i), in lanes that compilers put into vector registers.
template <class Term>
float sum_of(std::int64_t count, Term&& term) {
  constexpr std::int64_t kLanes = 16;
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(i + lane);
  }
  float sum = 0;
  for (; i < count; ++i) sum += term(i);
  for (const float lane : lanes) sum += lane;
  return sum;
}

// e^x to 1.5 units in the last place: 2^n e^r with |r| <= log(2) / 2. Infinite from 88.73 on, 0 below -103.98; NaN stays.
inline float exponential(float x) {
  x = x > 89.0f ? 89.0f : x;
  x = x < -104.0f ? -104.0f : x;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const float shifted = x * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // log(2) in two parts, the first with few bits
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const std::int32_t power = std::bit_cast<std::int32_t>(shifted) - std::bit_cast<std::int32_t>(kRound);
  const std::int32_t first = power >> 1, second = power - first;  // 2^power may be no normal number
  const auto two_to = [](std::int32_t e) { return std::bit_cast<float>(static_cast<std::uint32_t>(e + 127) << 23); };
  return p * two_to(first) * two_to(second);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// The part of a normal distribution below x: to 5e-7 of itself from -1 on, 2e-6 from -4 on, 2e-5 from -13 on.
inline float normal_below(float x) {
  const float z = std::abs(x) * 0.70710678f;
  const float t = 1.0f / (1.0f + 0.45f * z);
  // erfc(z) exp(z^2) / t, fitted for t from 0.19 to 1
  float p = -0.03295234590768814f;
  p = p * t + 0.14564140141010284f;
  p = p * t - 0.1971253752708435f;
  p = p * t + 0.008656254969537258f;
  p = p * t + 0.08452244102954865f;
  p = p * t + 0.06539447605609894f;
  p = p * t + 0.19297568500041962f;
  p = p * t + 0.22474923729896545f;
  p = p * t + 0.25427088141441345f;
  p = p * t + 0.25386732816696167f;
  const float beyond = 0.5f * p * t * exponential(-z * z);
  return x < 0 ? beyond : 1.0f - beyond;
}

}  // namespace tessera::cpu
