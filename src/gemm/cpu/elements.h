// Elements of matrices as fp32, and activations with their derivatives.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "base/dtype.h"
#include "gemm/epilogue.h"

namespace tessera::gemm::cpu_backend {

inline float load(DType dtype, const void* data, std::int64_t at) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[at];
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
  if ((bits & 0x7c00u) == 0x7c00u) return std::bit_cast<float>(sign | magnitude | 0x7f800000u);
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f));
}

inline std::uint16_t bf16_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
// Round to nearest even. Below the smallest normal number, adding 0.5 aligns the value's last kept bit with fp32's.
inline std::uint16_t fp16_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);  // 65520 and above
  if (magnitude < 0x38800000u) {
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(aligned) - 0x3f000000u));
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return static_cast<std::uint16_t>(sign | (rounded >> 13));
}
inline void store(DType dtype, void* data, std::int64_t at, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<std::uint16_t*>(data)[at] = dtype == DType::kBFloat16 ? bf16_of(value) : fp16_of(value);
  }
}

// A row of `count` elements. One loop for each type, which the compiler can vectorise.
inline void load_row(DType dtype, const void* data, std::int64_t at, std::int64_t count, float* to) {
  if (dtype == DType::kFloat32) {
    std::copy_n(static_cast<const float*>(data) + at, count, to);
  } else if (dtype == DType::kBFloat16) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = load(DType::kBFloat16, data, at + i);
  } else {
    for (std::int64_t i = 0; i < count; ++i) to[i] = load(DType::kFloat16, data, at + i);
  }
}
inline void store_row(DType dtype, void* data, std::int64_t at, std::int64_t count, const float* from) {
  if (dtype == DType::kFloat32) {
    std::copy_n(from, count, static_cast<float*>(data) + at);
  } else if (dtype == DType::kBFloat16) {
    for (std::int64_t i = 0; i < count; ++i) store(DType::kBFloat16, data, at + i, from[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) store(DType::kFloat16, data, at + i, from[i]);
  }
}

constexpr float kGeluScale = 0.7978845608028654f, kGeluCubic = 0.044715f, kSqrtHalf = 0.7071067811865476f;

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

inline float activated(int activation, float x) {
  switch (activation) {
    case kRelu:
      return x < 0 ? 0 : x;
    case kSilu:
      return x * sigmoid(x);
    case kGeluTanh:
      return x * sigmoid(2 * kGeluScale * (x + kGeluCubic * x * x * x));
    case kGeluErf:
      return 0.5f * x * (1 + std::erf(x * kSqrtHalf));
    default:
      return x;
  }
}

inline float derivative(int activation, float x) {
  switch (activation) {
    case kRelu:
      return x > 0 ? 1.0f : 0.0f;
    case kSilu: {
      const float s = sigmoid(x);
      return s + x * s * (1 - s);
    }
    case kGeluTanh: {
      const float c = std::clamp(x, -10.0f, 10.0f);  // beyond, the slope of the sigmoid is 0 and squares overflow
      const float s = sigmoid(2 * kGeluScale * (c + kGeluCubic * c * c * c));
      return s + c * s * (1 - s) * 2 * kGeluScale * (1 + 3 * kGeluCubic * c * c);
    }
    case kGeluErf:
      return 0.5f * (1 + std::erf(x * kSqrtHalf)) + x * 0.3989422804014327f * std::exp(-0.5f * x * x);
    default:
      return 1;
  }
}

}  // namespace tessera::gemm::cpu_backend
