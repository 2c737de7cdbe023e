// A task is a stretch of rows, whose losses it sums in order; the sums of stretches are added in order.
#include "loss/cpu/run.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/arithmetic.h"
#include "cpu/elements.h"
#include "cpu/thread_pool.h"

namespace tessera::loss::cpu_backend {
namespace {

constexpr std::int64_t kStretches = 64;

using tessera::cpu::exponential;
using tessera::cpu::load;

// Limited to the type's finite numbers.
void store(DType dtype, void* data, std::int64_t at, float value) {
  const float most = dtype == DType::kFloat32   ? std::numeric_limits<float>::max()
                     : dtype == DType::kFloat16 ? 65504.0f
                                                : std::bit_cast<float>(0x7f7f0000u);
  tessera::cpu::store(dtype, data, at, std::clamp(value, -most, most));
}

constexpr std::int64_t kLanes = 16;  // scratch has components in whole vectors of these

std::int64_t in_lanes(std::int64_t components) { return ceil_div(components, kLanes) * kLanes; }

// The loss of a row; its gradient, if wanted. scratch: [4, in_lanes(K)].
TESSERA_CLONED float gmm_nll(const LossArgs& args, std::int64_t row, float* scratch) {
  constexpr float kMostPrecision = 87.0f, kMostZ = 0x1p60f, kHalfLog2Pi = 0.9189385332046727f;
  constexpr float kMost = std::numeric_limits<float>::max();
  const LossProblem& p = args.problem;
  const std::int64_t n = p.components, lanes = in_lanes(n);
  float* logit = scratch;
  float* a = logit + lanes;
  float* z = a + lanes;
  float* precision = z + lanes;
  const float target = load(p.target_dtype, args.target.data, row * args.target.row_stride);
  for (std::int64_t k = 0; k < n; ++k) {
    const std::int64_t at = row * args.params.row_stride + k * args.params.component_stride;
    logit[k] = load(p.dtype, args.params.data, at);
    z[k] = load(p.dtype, args.params.data, at + 1);
    a[k] = load(p.dtype, args.params.data, at + 2);
  }
  for (float* values : {logit, z, a}) std::fill(values + n, values + lanes, 0.0f);
  for (std::int64_t k = 0; k < lanes; ++k) {
    const float mu = z[k], log_sigma = a[k];
    precision[k] = exponential(-log_sigma > kMostPrecision ? kMostPrecision : -log_sigma);
    const float difference = std::clamp(target - mu, -kMost, kMost);
    z[k] = std::clamp(difference * precision[k], -kMostZ, kMostZ);
    a[k] = logit[k] - 0.5f * z[k] * z[k] - log_sigma;
  }
  float logit_max = -kMost, a_max = -kMost;
  for (std::int64_t k = 0; k < n; ++k) {
    logit_max = std::max(logit_max, logit[k]);
    a_max = std::max(a_max, a[k]);
  }
  for (std::int64_t k = 0; k < lanes; ++k) {
    logit[k] = exponential(logit[k] - logit_max);
    a[k] = exponential(a[k] - a_max);
  }
  float logit_sum = 0, a_sum = 0;
  for (std::int64_t k = 0; k < n; ++k) {
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
  const std::int64_t scratch = saturating_product(ceil_div(p.components, kLanes), 4 * kLanes, std::max(threads, 1));
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
      const float loss = gmm_nll(args, row, scratch + slot * 4 * in_lanes(p.components));
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
