// A task is a stretch of rows, whose losses it sums in order; the sums of stretches are added in order.
#include "loss/cpu/run.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/arithmetic.h"
#include "cpu/thread_pool.h"

namespace tessera::loss::cpu_backend {
namespace {

constexpr std::int64_t kStretches = 64;

float load(DType dtype, const void* data, std::int64_t at) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[at];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[at];
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t magnitude = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
  if ((bits & 0x7c00u) == 0x7c00u) return std::bit_cast<float>(sign | magnitude | 0x7f800000u);
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f));
}

// Rounded to nearest even, and limited to the type's finite numbers.
void store(DType dtype, void* data, std::int64_t at, float value) {
  const float most = dtype == DType::kFloat32   ? std::numeric_limits<float>::max()
                     : dtype == DType::kFloat16 ? 65504.0f
                                                : std::bit_cast<float>(0x7f7f0000u);
  value = std::clamp(value, -most, most);
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[at] = value;
    return;
  }
  const auto bits = std::bit_cast<std::uint32_t>(value);
  std::uint32_t rounded = 0;
  if (dtype == DType::kBFloat16) {
    rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    if (std::isnan(value)) rounded = (bits >> 16) | 0x40u;
  } else {
    const std::uint32_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    rounded = magnitude < 0x38800000u  // subnormal: adding 0.5 aligns the last kept bit with fp32's
                  ? std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u
                  : (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    rounded = sign | (std::isnan(value) ? 0x7e00u : rounded);
  }
  static_cast<std::uint16_t*>(data)[at] = static_cast<std::uint16_t>(rounded);
}

// The loss of a row; its gradient, if wanted. scratch: [4, K].
float gmm_nll(const LossArgs& args, std::int64_t row, float* scratch) {
  constexpr float kMostPrecision = 87.0f, kMostZ = 0x1p60f, kHalfLog2Pi = 0.9189385332046727f;
  constexpr float kMost = std::numeric_limits<float>::max();
  const LossProblem& p = args.problem;
  const std::int64_t n = p.components;
  float* logit = scratch;
  float* a = logit + n;
  float* z = a + n;
  float* precision = z + n;
  const float target = load(p.target_dtype, args.target.data, row * args.target.row_stride);
  float logit_max = -kMost, a_max = -kMost;
  for (std::int64_t k = 0; k < n; ++k) {
    const std::int64_t at = row * args.params.row_stride + k * args.params.component_stride;
    logit[k] = load(p.dtype, args.params.data, at);
    const float log_sigma = load(p.dtype, args.params.data, at + 2);
    precision[k] = std::exp(-log_sigma > kMostPrecision ? kMostPrecision : -log_sigma);
    const float difference = std::clamp(target - load(p.dtype, args.params.data, at + 1), -kMost, kMost);
    z[k] = std::clamp(difference * precision[k], -kMostZ, kMostZ);
    a[k] = logit[k] - 0.5f * z[k] * z[k] - log_sigma;
    logit_max = std::max(logit_max, logit[k]);
    a_max = std::max(a_max, a[k]);
  }
  float logit_sum = 0, a_sum = 0;
  for (std::int64_t k = 0; k < n; ++k) {
    logit[k] = std::exp(logit[k] - logit_max);
    a[k] = std::exp(a[k] - a_max);
    logit_sum += logit[k];
    a_sum += a[k];
  }
  if (p.gradient) {
    for (std::int64_t k = 0; k < n; ++k) {
      const std::int64_t at = row * args.dparams.row_stride + k * args.dparams.component_stride;
      const float r = a[k] / a_sum;
      store(p.dtype, args.dparams.data, at, logit[k] / logit_sum - r);
      store(p.dtype, args.dparams.data, at + 1, -(r * z[k]) * precision[k]);
      store(p.dtype, args.dparams.data, at + 2, r * (1 - z[k] * z[k]));
    }
  }
  return (logit_max - a_max) + (std::log(logit_sum) - std::log(a_sum)) + kHalfLog2Pi;
}

}  // namespace

std::size_t workspace_bytes(const LossProblem& p, int threads) {
  const std::int64_t scratch = saturating_product(p.components, 4, std::max(threads, 1));
  return static_cast<std::size_t>(saturating_product(scratch + kStretches, sizeof(float)));
}

Status run(const LossArgs& args, int threads, void* workspace) {
  const LossProblem& p = args.problem;
  auto* sums = static_cast<float*>(workspace);
  float* scratch = sums + kStretches;
  auto* out = static_cast<float*>(args.out.data);
  const float scale = p.reduction == Reduction::kMean ? 1.0f / static_cast<float>(p.rows) : 1.0f;
  tessera::cpu::parallel_for(kStretches, std::max(threads, 1), [&](std::int64_t task, int slot) {
    float sum = 0;
    for (std::int64_t row = task * p.rows / kStretches; row < (task + 1) * p.rows / kStretches; ++row) {
      const float loss = gmm_nll(args, row, scratch + slot * 4 * p.components);
      if (p.reduction == Reduction::kNone) {
        out[row] = loss;
      } else {
        sum += loss * scale;
      }
    }
    sums[task] = sum;
  });
  if (p.reduction == Reduction::kNone) return {};
  float sum = 0;
  for (std::int64_t task = 0; task < kStretches; ++task) sum += sums[task];
  *out = sum;
  return {};
}

}  // namespace tessera::loss::cpu_backend
