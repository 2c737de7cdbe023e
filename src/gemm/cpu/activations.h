// Activations and their derivatives, without branches.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/elements.h"
#include "gemm/epilogue.h"

namespace tessera::gemm::cpu_backend {

constexpr float kGeluScale = 0.7978845608028654f, kGeluCubic = 0.044715f;

template <int kActivation>
float activated(float x) {
  using namespace tessera::cpu;
  if constexpr (kActivation == kRelu) return x < 0 ? 0.0f : x;
  if constexpr (kActivation == kSilu) return x * sigmoid(x);
  if constexpr (kActivation == kGeluTanh) return x * sigmoid(2 * kGeluScale * (x + kGeluCubic * x * x * x));
  if constexpr (kActivation == kGeluErf) return x * normal_below(x);
  return x;
}

template <int kActivation>
float derivative(float x) {
  using namespace tessera::cpu;
  if constexpr (kActivation == kRelu) return x > 0 ? 1.0f : 0.0f;
  if constexpr (kActivation == kSilu) {
    const float s = sigmoid(x);
    return s + x * s * (1 - s);
  }
  if constexpr (kActivation == kGeluTanh) {
    const float c = std::clamp(x, -10.0f, 10.0f);  // beyond, the slope of the sigmoid is 0 and squares overflow
    const float s = sigmoid(2 * kGeluScale * (c + kGeluCubic * c * c * c));
    return s + c * s * (1 - s) * 2 * kGeluScale * (1 + 3 * kGeluCubic * c * c);
  }
  if constexpr (kActivation == kGeluErf) return normal_below(x) + x * 0.39894228f * exponential(-0.5f * x * x);
  return 1;
}

// visit(std::integral_constant of the activation): loops are compiled for each.
template <class Visit>
void with_activation(int activation, Visit&& visit) {
  switch (activation) {
    case kRelu:
      return visit(std::integral_constant<int, kRelu>());
    case kSilu:
      return visit(std::integral_constant<int, kSilu>());
    case kGeluTanh:
      return visit(std::integral_constant<int, kGeluTanh>());
    case kGeluErf:
      return visit(std::integral_constant<int, kGeluErf>());
    default:
      return visit(std::integral_constant<int, kIdentity>());
  }
}

}  // namespace tessera::gemm::cpu_backend
