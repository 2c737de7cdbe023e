// Cross-entropy of rows of logits on the CPU: a task is a row.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/thread_pool.h"
#include "gemm/cpu/elements.h"
#include "loss/cross_entropy.h"

namespace tessera::loss::cpu_backend {
namespace {

bool is_class(const LossProblem& p, std::int32_t target) { return target >= 0 && target < p.classes; }

// Returns the row's loss.
float of_row(const LossArgs& args, void* row, std::int64_t first, std::int32_t target, float dout) {
  using gemm::cpu_backend::load;
  using gemm::cpu_backend::store;
  const LossProblem& p = args.problem;
  // What fp16 cannot hold is its largest number.
  const float most_of_type = p.dtype == DType::kFloat16 ? 65504.0f : std::numeric_limits<float>::infinity();
  const auto logit = [&](std::int64_t i) {
    const float x = load(p.dtype, row, first + i);
    return x > most_of_type ? most_of_type : x < -most_of_type ? -most_of_type : x;
  };
  float most = -std::numeric_limits<float>::max();
  for (std::int64_t i = 0; i < p.classes; ++i) most = std::max(most, logit(i));
  float sum = 0;
  for (std::int64_t i = 0; i < p.classes; ++i) sum += std::exp(logit(i) - most);
  const float loss = (most - logit(target)) + std::log(sum);
  if (!p.dhidden && !p.dweight) return loss;
  for (std::int64_t i = 0; i < p.classes; ++i) {
    const float softmax = std::exp(logit(i) - most) / sum;
    store(p.dtype, row, first + i, (i == target ? softmax - 1 : softmax) * dout);
  }
  return loss;
}

}  // namespace

void cross_entropy(const LossArgs& args, const LogitRows& rows, float* losses, int threads) {
  const LossProblem& p = args.problem;
  tessera::cpu::parallel_for(rows.count, std::max(threads, 1), [&](std::int64_t i, int) {
    const std::int64_t row = rows.first + i, at = i * rows.row_stride;
    const std::int32_t target = static_cast<const std::int32_t*>(args.target.data)[row];
    if (is_class(p, target)) {
      losses[row] =
          of_row(args, rows.data, at, target, p.weighted ? static_cast<const float*>(args.dout.data)[row] : 1.0f);
      return;
    }
    losses[row] = 0;
    for (std::int64_t c = 0; c < p.classes; ++c) gemm::cpu_backend::store(p.dtype, rows.data, at + c, 0.0f);
  });
}

// Stretches of rows are summed apart, so that many losses do not disappear beside their sum.
void reduce_rows(const LossArgs& args, const float* losses) {
  constexpr std::int64_t kStretch = 256;
  const LossProblem& p = args.problem;
  float sum = 0;
  std::int64_t count = 0;
  for (std::int64_t first = 0; first < p.rows; first += kStretch) {
    float part = 0;
    for (std::int64_t row = first; row < std::min(first + kStretch, p.rows); ++row) {
      part += losses[row];
      count += is_class(p, static_cast<const std::int32_t*>(args.target.data)[row]) ? 1 : 0;
    }
    sum += part;
  }
  if (p.reduction == Reduction::kMean) sum /= static_cast<float>(std::max<std::int64_t>(count, 1));
  *static_cast<float*>(args.out.data) = sum;
}

}  // namespace tessera::loss::cpu_backend
