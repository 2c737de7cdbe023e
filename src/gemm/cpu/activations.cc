#include "gemm/cpu/activations.h"

#include <algorithm>

#include "cpu/elements.h"
#include "gemm/epilogue.h"

namespace tessera::gemm::cpu_backend {
namespace {

using tessera::cpu::exponential;
using tessera::cpu::normal_below;
using tessera::cpu::sigmoid;

constexpr float kGeluScale = 0.7978845608028654f, kGeluCubic = 0.044715f;

float gelu_tanh_slope(float x) {
  const float c = std::clamp(x, -10.0f, 10.0f);  // beyond, the slope of the sigmoid is 0 and squares overflow
  const float s = sigmoid(2 * kGeluScale * (c + kGeluCubic * c * c * c));
  return s + c * s * (1 - s) * 2 * kGeluScale * (1 + 3 * kGeluCubic * c * c);
}

// to[i] = f(x[i])
template <class F>
void map(const float* x, std::int64_t count, float* to, F&& f) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = f(x[i]);
}

}  // namespace

TESSERA_CLONED void activated(int activation, const float* x, std::int64_t count, float* to) {
  switch (activation) {
    case kRelu:
      return map(x, count, to, [](float v) { return v < 0 ? 0.0f : v; });
    case kSilu:
      return map(x, count, to, [](float v) { return v * sigmoid(v); });
    case kGeluTanh:
      return map(x, count, to, [](float v) { return v * sigmoid(2 * kGeluScale * (v + kGeluCubic * v * v * v)); });
    case kGeluErf:
      return map(x, count, to, [](float v) { return v * normal_below(v); });
    default:
      return map(x, count, to, [](float v) { return v; });
  }
}

TESSERA_CLONED void derivative(int activation, const float* x, std::int64_t count, float* to) {
  switch (activation) {
    case kRelu:
      return map(x, count, to, [](float v) { return v > 0 ? 1.0f : 0.0f; });
    case kSilu:
      return map(x, count, to, [](float v) {
        const float s = sigmoid(v);
        return s + v * s * (1 - s);
      });
    case kGeluTanh:
      return map(x, count, to, gelu_tanh_slope);
    case kGeluErf:
      return map(x, count, to, [](float v) { return normal_below(v) + v * 0.39894228f * exponential(-0.5f * v * v); });
    default:
      return map(x, count, to, [](float) { return 1.0f; });
  }
}

}  // namespace tessera::gemm::cpu_backend
