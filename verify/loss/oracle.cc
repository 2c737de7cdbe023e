#include "verify/loss/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "verify/parallel.h"

namespace tessera::verify::loss {
namespace {

// Beyond, loss and gradient are those of the limit.
constexpr double kMostPrecision = 87, kMostZ = 0x1p60;

double largest_of(DType dtype) {
  return dtype == DType::kFloat32   ? static_cast<double>(std::numeric_limits<float>::max())
         : dtype == DType::kFloat16 ? 65504
                                    : 0x1.fep127;
}

template <class Real>
struct Row {
  Real loss;
  double loss_terms, gradient_terms;
};

template <class Real>
Row<Real> likelihood(const Inputs& in, std::int64_t row, HostTensor& dparams) {
  const LossProblem& p = in.problem;
  const auto n = static_cast<std::size_t>(p.components);
  const auto target = static_cast<Real>(in.target.data[static_cast<std::size_t>(row)]);
  std::vector<Real> logit(n), a(n), z(n), precision(n);
  double terms = 0;
  for (std::size_t k = 0; k < n; ++k) {
    const auto at = static_cast<std::int64_t>(k);
    logit[k] = static_cast<Real>(in.params.at(0, row, at, 0));
    const auto mu = static_cast<Real>(in.params.at(0, row, at, 1));
    const auto log_sigma = static_cast<Real>(in.params.at(0, row, at, 2));
    precision[k] = std::exp(std::min(-log_sigma, static_cast<Real>(kMostPrecision)));
    z[k] = std::clamp((target - mu) * precision[k], static_cast<Real>(-kMostZ), static_cast<Real>(kMostZ));
    a[k] = logit[k] - z[k] * z[k] / 2 - log_sigma;
    terms = std::max({terms, static_cast<double>(std::abs(a[k])), static_cast<double>(std::abs(logit[k]))});
  }
  // The maximum apart from the rest, which it would absorb if it is large.
  struct LogSumExp {
    Real most, sum;
  };
  const auto log_sum_exp = [](const std::vector<Real>& x) {
    LogSumExp result{*std::max_element(x.begin(), x.end()), 0};
    for (const Real value : x) result.sum += std::exp(value - result.most);
    return result;
  };
  const LogSumExp of_logits = log_sum_exp(logit), of_all = log_sum_exp(a);
  Row<Real> result{(of_logits.most - of_all.most) + (std::log(of_logits.sum) - std::log(of_all.sum)) +
                       std::log(2 * std::numbers::pi_v<Real>) / 2,
                   static_cast<double>(std::abs(of_logits.most) + std::abs(of_all.most)), 0};
  if (!p.gradient) return result;
  for (std::size_t k = 0; k < n; ++k) {
    const Real r = std::exp(a[k] - of_all.most) / of_all.sum;
    const Real factors[3] = {1, z[k] * precision[k], 1 - z[k] * z[k]};
    const Real values[3] = {std::exp(logit[k] - of_logits.most) / of_logits.sum - r, -r * factors[1], r * factors[2]};
    for (int i = 0; i < 3; ++i) {
      const double most = largest_of(p.dtype);
      double value = static_cast<double>(values[i]);
      value = std::clamp(value, -most, most);
      dparams.at(0, 0, row, 3 * static_cast<std::int64_t>(k) + i) = value;
      // What an error of r's exponent, relative to its terms, does; none if one component is all of the mixture.
      const double share = static_cast<double>(r) * (1 + 4 * (1 - static_cast<double>(r)) * terms);
      result.gradient_terms =
          std::max(result.gradient_terms, std::min(share * static_cast<double>(std::abs(factors[i])), most));
    }
  }
  return result;
}

template <class Real>
Outputs compute(const Inputs& in, int threads) {
  const LossProblem& p = in.problem;
  Outputs out;
  if (p.gradient) out.dparams = HostTensor(1, 1, p.rows, 3 * p.components);
  std::vector<Row<Real>> rows(static_cast<std::size_t>(p.rows));
  in_parallel(p.rows, threads,
              [&](std::int64_t row) { rows[static_cast<std::size_t>(row)] = likelihood<Real>(in, row, out.dparams); });
  out.out = HostTensor(1, 1, 1, p.reduction == Reduction::kNone ? p.rows : 1);
  Real sum = 0;
  double terms = 0;
  const Real scale = p.reduction == Reduction::kMean ? 1 / static_cast<Real>(p.rows) : Real(1);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    out.dparams.terms = std::max(out.dparams.terms, rows[row].gradient_terms);
    if (p.reduction == Reduction::kNone) {
      out.out.data[row] = static_cast<double>(rows[row].loss);
      out.out.terms = std::max(out.out.terms, rows[row].loss_terms);
    } else {
      sum += rows[row].loss * scale;
      terms += rows[row].loss_terms * static_cast<double>(scale);
    }
  }
  if (p.reduction == Reduction::kNone) return out;
  out.out.data[0] = static_cast<double>(sum);
  out.out.terms = terms;
  return out;
}

}  // namespace

Outputs expected(const Inputs& inputs, int threads) { return compute<double>(inputs, threads); }

Outputs plain(const Inputs& inputs, int threads) {
  Outputs out = compute<float>(inputs, threads);
  round_all(inputs.problem.dtype, out.dparams);
  return out;
}

}  // namespace tessera::verify::loss
