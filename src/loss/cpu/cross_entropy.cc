// Cross-entropy of rows of logits on the CPU: a task is a row.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/elements.h"
#include "cpu/thread_pool.h"
#include "loss/cross_entropy.h"

namespace tessera::loss::cpu_backend {
namespace {

bool is_class(const LossProblem& p, std::int32_t target) { return target >= 0 && target < p.classes; }

constexpr std::int64_t kChunk = 512;  // logits that are widened to fp32 at a time

// visit(first, count, logits) for each chunk of the row. What fp16 cannot hold is its largest number.
template <class Visit>
void for_chunks(const LossProblem& p, const void* row, std::int64_t first, Visit&& visit) {
  const float most = p.dtype == DType::kFloat16 ? 65504.0f : std::numeric_limits<float>::infinity();
  float x[kChunk];
  for (std::int64_t i = 0; i < p.classes; i += kChunk) {
    const std::int64_t count = std::min(kChunk, p.classes - i);
    tessera::cpu::load_row(p.dtype, row, first + i, count, x);
    for (std::int64_t j = 0; j < count; ++j) x[j] = x[j] > most ? most : x[j] < -most ? -most : x[j];
    visit(i, count, x);
  }
}

// Returns the row's loss.
TESSERA_CLONED float of_row(const LossArgs& args, void* row, std::int64_t first, std::int32_t target, float dout) {
  using tessera::cpu::exponential;
  const LossProblem& p = args.problem;
  constexpr std::int64_t kLanes = 16;
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, -std::numeric_limits<float>::max());
  float of_target = 0;
  for_chunks(p, row, first, [&](std::int64_t i, std::int64_t count, const float* x) {
    std::int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
      for (std::int64_t lane = 0; lane < kLanes; ++lane)
        lanes[lane] = lanes[lane] < x[j + lane] ? x[j + lane] : lanes[lane];
    }
    for (; j < count; ++j) lanes[0] = std::max(lanes[0], x[j]);
    if (target >= i && target < i + count) of_target = x[target - i];
  });
  const float most = *std::max_element(lanes, lanes + kLanes);
  float sum = 0;
  for_chunks(p, row, first, [&](std::int64_t, std::int64_t count, const float* x) {
    sum += tessera::cpu::sum_of(count, [&](std::int64_t j) { return exponential(x[j] - most); });
  });
  const float loss = (most - of_target) + std::log(sum);
  if (!p.dhidden && !p.dweight) return loss;
  for_chunks(p, row, first, [&](std::int64_t i, std::int64_t count, float* x) {
    for (std::int64_t j = 0; j < count; ++j) x[j] = exponential(x[j] - most) / sum;
    if (target >= i && target < i + count) x[target - i] -= 1;
    for (std::int64_t j = 0; j < count; ++j) x[j] *= dout;
    tessera::cpu::store_row(p.dtype, row, first + i, count, x);
  });
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
    for (std::int64_t c = 0; c < p.classes; ++c) tessera::cpu::store(p.dtype, rows.data, at + c, 0.0f);
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
