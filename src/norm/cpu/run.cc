// A task is a stretch of rows. Each row is widened to fp32 in scratch memory and stays in the L1 or L2 cache for its passes.
#include "norm/cpu/run.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/arithmetic.h"
#include "cpu/elements.h"
#include "cpu/thread_pool.h"

namespace tessera::norm::cpu_backend {
namespace {

using tessera::cpu::load_row;
using tessera::cpu::store_row;
using tessera::cpu::sum_of;

// Stretches of rows whose parameter gradients are summed apart and then added in order.
constexpr std::int64_t kStretches = 64;

// Rows of fp32 that a thread needs: x, another, and the weight, the bias.
constexpr std::int64_t kScratchRows = 5;

// From the beginning of scratch memory: the weight and the bias, then rows of each thread, then sums of stretches.
class Norms {
 public:
  Norms(const NormArgs& args, float* scratch)
      : args_(args), p_(args.problem), n_(p_.columns), weight_(scratch), bias_(scratch + n_), rows_(scratch + 2 * n_) {
    std::fill_n(weight_, n_, 1.0f);
    std::fill_n(bias_, n_, 0.0f);
    if (p_.weight) load_row(p_.dtype, args.weight.data, 0, n_, weight_);
    if (p_.bias) load_row(p_.dtype, args.bias.data, 0, n_, bias_);
  }

  TESSERA_CLONED void forward(std::int64_t row, int slot) const {
    float* h = rows_ + slot * kScratchRows * n_;
    float* other = h + n_;
    load_row(p_.dtype, args_.x.data, row * args_.x.row_stride, n_, h);
    if (p_.residual) {
      load_row(p_.dtype, args_.residual.data, row * args_.residual.row_stride, n_, other);
      for (std::int64_t i = 0; i < n_; ++i) h[i] += other[i];
      store_row(p_.dtype, args_.sum.data, row * args_.sum.row_stride, n_, h);
      load_row(p_.dtype, args_.sum.data, row * args_.sum.row_stride, n_, h);
    }
    const auto count = static_cast<float>(n_);
    const float mean = p_.centered ? sum_of(n_, [&](std::int64_t i) { return h[i]; }) / count : 0.0f;
    const float squares = sum_of(n_, [&](std::int64_t i) { return (h[i] - mean) * (h[i] - mean); });
    const float rstd = 1.0f / std::sqrt(squares / count + args_.eps);
    if (p_.statistics) {
      static_cast<float*>(args_.rstd.data)[row] = rstd;
      if (p_.centered) static_cast<float*>(args_.mean.data)[row] = mean;
    }
    for (std::int64_t i = 0; i < n_; ++i) h[i] = (h[i] - mean) * rstd * weight_[i] + bias_[i];
    store_row(p_.dtype, args_.out.data, row * args_.out.row_stride, n_, h);
  }

  // dweight, dbias: the sums of this stretch; null if not wanted.
  TESSERA_CLONED void backward(std::int64_t row, int slot, float* dweight, float* dbias) const {
    float* x = rows_ + slot * kScratchRows * n_;
    float* dout = x + n_;
    float* dsum = dout + n_;
    load_row(p_.dtype, args_.x.data, row * args_.x.row_stride, n_, x);
    load_row(p_.dtype, args_.dout.data, row * args_.dout.row_stride, n_, dout);
    if (p_.residual) {
      load_row(p_.dtype, args_.dsum.data, row * args_.dsum.row_stride, n_, dsum);
    } else {
      std::fill_n(dsum, n_, 0.0f);
    }
    const float rstd = static_cast<const float*>(args_.rstd.data)[row];
    const float mean = p_.centered ? static_cast<const float*>(args_.mean.data)[row] : 0.0f;
    for (std::int64_t i = 0; i < n_; ++i) x[i] = (x[i] - mean) * rstd;
    if (dweight != nullptr) {
      for (std::int64_t i = 0; i < n_; ++i) dweight[i] += dout[i] * x[i];
      for (std::int64_t i = 0; i < n_; ++i) dbias[i] += dout[i];
    }
    const auto count = static_cast<float>(n_);
    const float products = sum_of(n_, [&](std::int64_t i) { return dout[i] * weight_[i] * x[i]; }) / count;
    const float sums = p_.centered ? sum_of(n_, [&](std::int64_t i) { return dout[i] * weight_[i]; }) / count : 0.0f;
    for (std::int64_t i = 0; i < n_; ++i) dsum[i] += rstd * (dout[i] * weight_[i] - x[i] * products - sums);
    store_row(p_.dtype, args_.dx.data, row * args_.dx.row_stride, n_, dsum);
  }

  // sums: [kStretches, 2, n].
  void add_parameters(float* sums) const {
    for (std::int64_t stretch = 1; stretch < kStretches; ++stretch) {
      for (std::int64_t i = 0; i < 2 * n_; ++i) sums[i] += sums[stretch * 2 * n_ + i];
    }
    if (args_.dweight.data != nullptr) store_row(p_.dtype, args_.dweight.data, 0, n_, sums);
    if (args_.dbias.data != nullptr) store_row(p_.dtype, args_.dbias.data, 0, n_, sums + n_);
  }

 private:
  const NormArgs& args_;
  const NormProblem& p_;
  const std::int64_t n_;
  float* weight_;
  float* bias_;
  float* rows_;
};

// scratch: kScratchRows rows.
TESSERA_CLONED void rotate_token(const NormArgs& args, std::int64_t token, float* scratch) {
  const NormProblem& p = args.problem;
  const std::int64_t b = token / p.seq, s = token % p.seq, half = p.rotated / 2;
  float* x = scratch;
  float* cos = scratch + p.columns;
  float* sin = cos + p.columns;
  std::int64_t position = s;
  if (p.positions) {
    position = static_cast<const std::int32_t*>(args.positions.data)[b * args.positions.batch_stride + s];
  }
  if (position >= 0 && position < args.table_rows) {
    load_row(p.table_dtype, args.cos.data, position * args.cos.row_stride, half, cos);
    load_row(p.table_dtype, args.sin.data, position * args.sin.row_stride, half, sin);
  } else {
    std::fill_n(cos, half, std::numeric_limits<float>::quiet_NaN());
    std::fill_n(sin, half, std::numeric_limits<float>::quiet_NaN());
  }
  const float sign = p.inverse ? -1.0f : 1.0f;
  const std::int64_t step = p.interleaved ? 2 : 1, apart = p.interleaved ? 1 : half;
  for (std::int64_t head = 0; head < p.heads; ++head) {
    load_row(p.dtype, args.x.data, b * args.x.batch_stride + s * args.x.row_stride + head * args.x.head_stride,
             p.columns, x);
    for (std::int64_t i = 0; i < half; ++i) {
      float& low = x[i * step];
      float& high = x[i * step + apart];
      const float was = low;
      low = was * cos[i] - high * sign * sin[i];
      high = high * cos[i] + was * sign * sin[i];
    }
    store_row(p.dtype, args.out.data, b * args.out.batch_stride + s * args.out.row_stride + head * args.out.head_stride,
              p.columns, x);
  }
}

std::int64_t scratch_floats(const NormProblem& p, int threads) {
  return saturating_product(p.columns, 2 + std::int64_t{std::max(threads, 1)} * kScratchRows);
}

}  // namespace

std::size_t workspace_bytes(const NormProblem& p, int threads) {
  const std::int64_t sums = p.parameters ? saturating_product(p.columns, 2, kStretches) : 0;
  return static_cast<std::size_t>(saturating_product(scratch_floats(p, threads) + sums, sizeof(float)));
}

Status run(const NormArgs& args, int threads, void* workspace) {
  const NormProblem& p = args.problem;
  auto* scratch = static_cast<float*>(workspace);
  const int used = std::max(threads, 1);
  if (p.op == NormOp::kRotary) {
    const std::int64_t tokens = p.heads == 0 ? 0 : p.batch * p.seq;
    const std::int64_t tasks = std::min(tokens, kStretches);
    tessera::cpu::parallel_for(tasks, used, [&](std::int64_t task, int slot) {
      for (std::int64_t t = task * tokens / tasks; t < (task + 1) * tokens / tasks; ++t) {
        rotate_token(args, t, scratch + slot * kScratchRows * p.columns);
      }
    });
    return {};
  }
  const Norms norms(args, scratch);
  float* const sums = p.parameters ? scratch + scratch_floats(p, threads) : nullptr;
  tessera::cpu::parallel_for(kStretches, used, [&](std::int64_t task, int slot) {
    float* dweight = p.parameters ? sums + task * 2 * p.columns : nullptr;
    if (p.parameters) std::fill_n(dweight, 2 * p.columns, 0.0f);
    const std::int64_t begin = task * p.rows / kStretches, end = (task + 1) * p.rows / kStretches;
    for (std::int64_t row = begin; row < end; ++row) {
      if (p.op == NormOp::kForward) {
        norms.forward(row, slot);
      } else {
        norms.backward(row, slot, dweight, p.parameters ? dweight + p.columns : nullptr);
      }
    }
  });
  if (p.parameters) norms.add_parameters(sums);
  return {};
}

}  // namespace tessera::norm::cpu_backend
