#include <algorithm>
#include <cmath>

#include "verify/gemm/oracle.h"
#include "verify/mlp/cases.h"
#include "verify/parallel.h"

namespace tessera::verify::mlp {
namespace {

using T = MlpTensor;

constexpr double kSteepest = 1.2;  // of all activations, and of their derivatives

// Real: double for the oracle, float for the plain computation, which also rounds every tensor.
template <class Real>
class Computation {
 public:
  static constexpr bool kPlain = sizeof(Real) == sizeof(float);

  Computation(const MlpProblem& p, const Tensors& in, int threads) : p_(p), in_(in), threads_(threads) {}

  Tensors run() {
    if (p_.op == MlpOp::kForward) {
      first_layer();
      HostTensor out = product(hidden_, false, in(T::kDown), true);
      add_vector(out, in(T::kDownBias));
      if (p_.has(T::kResidual)) add(out, in(T::kResidual));
      set(T::kOut, out);
      set(T::kBefore, before_);
      set(T::kHidden, hidden_);
      set(T::kBeforeGate, gate_);
      return std::move(results_);
    }
    if (p_.has(T::kBefore)) {
      before_ = in(T::kBefore);
      if (gated()) gate_ = in(T::kBeforeGate);
      hidden_ = gated() ? elements(before_, gate_, [&](double u, double g) { return u * f(g); }) : in(T::kHidden);
      hidden_.terms = before_.terms = gate_.terms = 0;
    } else {
      first_layer();
    }
    const HostTensor dhidden = finished(product(in(T::kDout), false, in(T::kDown), false), gated());
    HostTensor dbefore, dgate;
    if (gated()) {
      dbefore = elements(dhidden, gate_, [&](double d, double g) { return d * f(g); });
      const HostTensor both = elements(
          dhidden, before_, [](double d, double u) { return d * u; }, false);
      dgate = elements(both, gate_, [&](double b, double g) { return b * slope(g); });
      const double u = std::max(largest(before_), 1.0), g = std::max(kSteepest * largest(gate_), 1.0);
      const double d = largest(dhidden);
      dbefore.terms = dhidden.terms * g + d * kSteepest * gate_.terms;
      dgate.terms = kSteepest * (dhidden.terms * u + d * before_.terms + d * u * gate_.terms);
    } else {
      dbefore = elements(dhidden, before_, [&](double d, double x) { return d * slope(x); });
      dbefore.terms = kSteepest * (dhidden.terms + largest(dhidden) * before_.terms);
    }
    set(T::kDbefore, dbefore);
    set(T::kDbeforeGate, dgate);
    if (p_.has(T::kDdown)) set(T::kDdown, weight_gradient(in(T::kDout), hidden_));
    if (p_.has(T::kDup)) set(T::kDup, weight_gradient(dbefore, in(T::kX)));
    if (p_.has(T::kDgate)) set(T::kDgate, weight_gradient(dgate, in(T::kX)));
    if (p_.has(T::kDx)) {
      HostTensor dx = finished(product(dbefore, false, in(T::kUp), false), gated());
      if (gated()) add(dx, product(dgate, false, in(T::kGate), false));
      set(T::kDx, dx);
    }
    return std::move(results_);
  }

 private:
  bool gated() const { return p_.has(T::kGate); }
  const HostTensor& in(T tensor) const { return in_[static_cast<std::size_t>(tensor)]; }
  double f(double x) const { return gemm::activated(p_.activation, x); }
  double slope(double x) const { return gemm::derivative(p_.activation, x); }

  // A tensor that is stored: rounded in the plain computation.
  HostTensor finished(HostTensor t, bool stored = true) const {
    if (kPlain && stored) round_all(p_.dtype, t);
    return t;
  }
  void set(T tensor, const HostTensor& value) {
    if (is_written(p_, tensor) && p_.has(tensor)) results_[static_cast<std::size_t>(tensor)] = finished(value);
  }

  // A B, either transposed. terms: a bound of the sums of absolute terms, by Cauchy and Schwarz, and of what the errors of A
  // and B add.
  HostTensor product(const HostTensor& a, bool a_transposed, const HostTensor& b, bool b_transposed) const {
    const std::int64_t m = a.shape[a_transposed ? 3 : 2], k = a.shape[a_transposed ? 2 : 3];
    const std::int64_t n = b.shape[b_transposed ? 2 : 3];
    std::vector<Real> right(static_cast<std::size_t>(k * n));
    for (std::int64_t i = 0; i < k; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        right[static_cast<std::size_t>(i * n + j)] =
            static_cast<Real>(b_transposed ? b.at(0, 0, j, i) : b.at(0, 0, i, j));
      }
    }
    HostTensor out(1, 1, m, n);
    in_parallel(m, threads_, [&](std::int64_t row) {
      std::vector<Real> sums(static_cast<std::size_t>(n));
      for (std::int64_t i = 0; i < k; ++i) {
        const auto left = static_cast<Real>(a_transposed ? a.at(0, 0, i, row) : a.at(0, 0, row, i));
        for (std::int64_t j = 0; j < n; ++j) {
          sums[static_cast<std::size_t>(j)] += left * right[static_cast<std::size_t>(i * n + j)];
        }
      }
      for (std::int64_t j = 0; j < n; ++j)
        out.at(0, 0, row, j) = static_cast<double>(sums[static_cast<std::size_t>(j)]);
    });
    const double of_a = largest_norm(a, a_transposed), of_b = largest_norm(b, !b_transposed);
    out.terms = of_a * of_b + std::sqrt(static_cast<double>(k)) * (a.terms * of_b + b.terms * of_a);
    return out;
  }
  // A^T B, one of which was rounded.
  HostTensor weight_gradient(const HostTensor& a, const HostTensor& b) const {
    HostTensor out = product(a, true, b, false);
    if (kPlain) return out;
    std::vector<double>& errors = out.row_rounding;
    errors.assign(static_cast<std::size_t>(a.shape[3]), 0);
    for (std::int64_t i = 0; i < a.shape[2]; ++i) {
      double norm = 0;  // the square
      for (std::int64_t j = 0; j < b.shape[3]; ++j) norm += b.at(0, 0, i, j) * b.at(0, 0, i, j);
      for (std::size_t row = 0; row < errors.size(); ++row) {
        const double left = a.at(0, 0, i, static_cast<std::int64_t>(row));
        errors[row] += left * left * norm;
      }
    }
    for (double& error : errors) error = rounding_error_of(p_.dtype) * std::sqrt(error);
    return out;
  }
  static void add(HostTensor& to, const HostTensor& more) {
    for (std::size_t i = 0; i < to.data.size(); ++i) {
      to.data[i] = static_cast<double>(static_cast<Real>(to.data[i]) + static_cast<Real>(more.data[i]));
    }
    to.terms += more.terms + largest(more);
  }
  static void add_vector(HostTensor& to, const HostTensor& vector) {
    if (vector.empty()) return;
    const auto columns = static_cast<std::size_t>(to.shape[3]);
    for (std::size_t i = 0; i < to.data.size(); ++i) {
      to.data[i] = static_cast<double>(static_cast<Real>(to.data[i]) + static_cast<Real>(vector.data[i % columns]));
    }
    to.terms += largest(vector);
  }
  template <class F>
  HostTensor elements(const HostTensor& x, const HostTensor& y, F value, bool stored = true) const {
    HostTensor out(1, 1, x.shape[2], x.shape[3]);
    for (std::size_t i = 0; i < out.data.size(); ++i) {
      out.data[i] = static_cast<double>(static_cast<Real>(value(x.data[i], y.data[i])));
    }
    return finished(std::move(out), stored);
  }

  void first_layer() {
    HostTensor before = product(in(T::kX), false, in(T::kUp), true);
    add_vector(before, in(T::kUpBias));
    const bool stored = gated() && (p_.has(T::kBefore) || p_.op == MlpOp::kBackward);
    before_ = finished(before, stored);
    if (gated()) {
      HostTensor gate = product(in(T::kX), false, in(T::kGate), true);
      add_vector(gate, in(T::kGateBias));
      gate_ = finished(std::move(gate), stored);
      hidden_ = elements(before_, gate_, [&](double u, double g) { return u * f(g); });
      hidden_.terms =
          before_.terms * std::max(kSteepest * largest(gate_), 1.0) + largest(before_) * kSteepest * gate_.terms;
    } else {
      hidden_ = elements(before_, before_, [&](double x, double) { return f(x); });
      hidden_.terms = kSteepest * before_.terms;
      before_ = finished(std::move(before_));
    }
  }

  const MlpProblem& p_;
  const Tensors& in_;
  int threads_;
  HostTensor before_, gate_, hidden_;
  Tensors results_;
};

}  // namespace

Tensors exact(const MlpProblem& problem, const Tensors& inputs, int threads) {
  return Computation<double>(problem, inputs, threads).run();
}
Tensors plain(const MlpProblem& problem, const Tensors& inputs, int threads) {
  return Computation<float>(problem, inputs, threads).run();
}

}  // namespace tessera::verify::mlp
