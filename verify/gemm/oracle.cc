#include "verify/gemm/oracle.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "verify/parallel.h"

namespace tessera::verify::gemm {
namespace {

// Element (m, k) of A and (k, n) of B, whichever way they are stored.
double a_at(const Inputs& in, std::int64_t m, std::int64_t k) {
  return in.problem.a_transposed ? in.a.at(0, 0, k, m) : in.a.at(0, 0, m, k);
}

// B as [K, N], so that the inner loop is over neighbours.
template <class Real>
std::vector<Real> by_rows_of_k(const GemmProblem& p, const HostTensor& b) {
  std::vector<Real> rows(static_cast<std::size_t>(p.k * p.n));
  for (std::int64_t k = 0; k < p.k; ++k) {
    for (std::int64_t n = 0; n < p.n; ++n) {
      rows[static_cast<std::size_t>(k * p.n + n)] =
          static_cast<Real>(p.b_transposed ? b.at(0, 0, k, n) : b.at(0, 0, n, k));
    }
  }
  return rows;
}

template <class Real>
void multiply_row(const Inputs& in, std::int64_t m, const std::vector<Real>& b, std::vector<Real>& sums) {
  const GemmProblem& p = in.problem;
  std::fill(sums.begin(), sums.end(), Real(0));
  for (std::int64_t k = 0; k < p.k; ++k) {
    const auto left = static_cast<Real>(a_at(in, m, k));
    const Real* right = b.data() + k * p.n;
    for (std::int64_t n = 0; n < p.n; ++n) sums[static_cast<std::size_t>(n)] += left * right[n];
  }
}

template <class Real>
Real f(int activation, Real x) {
  switch (activation) {
    case kRelu:
      return x > 0 ? x : Real(0);
    case kSilu:
      return x / (1 + std::exp(-x));
    case kGeluTanh:
      return Real(0.5) * x *
             (1 + std::tanh(std::sqrt(Real(2) / std::numbers::pi_v<Real>) * (x + Real(0.044715) * x * x * x)));
    case kGeluErf:
      return Real(0.5) * x * std::erfc(-x / std::numbers::sqrt2_v<Real>);
    default:
      return x;
  }
}

template <class Real>
Real f_prime(int activation, Real x) {
  const Real root = std::sqrt(Real(2) / std::numbers::pi_v<Real>);
  switch (activation) {
    case kRelu:
      return x > 0 ? Real(1) : Real(0);
    case kSilu: {
      const Real s = 1 / (1 + std::exp(-x));
      return s * (1 + x * (1 - s));
    }
    case kGeluTanh: {
      const Real t = std::tanh(root * (x + Real(0.044715) * x * x * x));
      return Real(0.5) * (1 + t) + Real(0.5) * x * (1 - t * t) * root * (1 + 3 * Real(0.044715) * x * x);
    }
    case kGeluErf:
      return Real(0.5) * std::erfc(-x / std::numbers::sqrt2_v<Real>) +
             x * std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi_v<Real>);
    default:
      return Real(1);
  }
}

// A bound of the sums of absolute terms: by Cauchy and Schwarz, that of a product is the product of the norms.
struct Terms {
  double preactivation = 0, out = 0;
};
Terms terms_of(const Inputs& in, double largest_x, double largest_gate) {
  const GemmProblem& p = in.problem;
  constexpr double kSteepest = 1.2;  // of all activations
  const double a = largest_norm(in.a, p.a_transposed);
  const double x = a * largest_norm(in.b, p.b_transposed) + largest(in.bias);
  Terms terms{x, x};
  if (p.gated) {
    const double gate = a * largest_norm(in.gate, p.b_transposed) + largest(in.gate_bias);
    terms.out = x * std::max(largest_gate, 1.0) + largest_x * kSteepest * gate;
  } else if (p.activation != kIdentity) {
    terms.out = kSteepest * x;
  }
  terms.out += largest(in.residual);
  return terms;
}

template <class Real>
Outputs compute(const Inputs& in, const std::vector<std::int64_t>& rows, int threads) {
  const GemmProblem& p = in.problem;
  constexpr bool kPlain = sizeof(Real) == sizeof(float);
  const auto count = static_cast<std::int64_t>(rows.size());
  Outputs outputs;
  outputs.out = HostTensor(1, 1, count, p.n);
  if (p.preactivation) outputs.preactivation = HostTensor(1, 1, count, p.n);
  HostTensor xs(1, 1, count, p.n), gates(1, 1, count, p.gated ? p.n : 0);
  const std::vector<Real> b = by_rows_of_k<Real>(p, in.b);
  const std::vector<Real> g = p.gated ? by_rows_of_k<Real>(p, in.gate) : std::vector<Real>();
  in_parallel(count, threads, [&](std::int64_t i) {
    const std::int64_t m = rows[static_cast<std::size_t>(i)];
    std::vector<Real> x(static_cast<std::size_t>(p.n)), gate(static_cast<std::size_t>(p.gated ? p.n : 0));
    multiply_row(in, m, b, x);
    if (p.gated) multiply_row(in, m, g, gate);
    for (std::int64_t n = 0; n < p.n; ++n) {
      const auto at = static_cast<std::size_t>(n);
      if (p.bias) x[at] += static_cast<Real>(in.bias.data[at]);
      if (p.preactivation) outputs.preactivation.at(0, 0, i, n) = static_cast<double>(x[at]);
      Real y = 0;
      if (p.gradient) {
        y = x[at] * f_prime(p.activation, static_cast<Real>(in.saved.at(0, 0, m, n)));
      } else if (p.gated) {
        if (p.bias) gate[at] += static_cast<Real>(in.gate_bias.data[at]);
        y = f(p.activation, gate[at]);
        gates.at(0, 0, i, n) = static_cast<double>(y);
        y *= x[at];
      } else {
        y = f(p.activation, x[at]);
      }
      if (p.residual) y += static_cast<Real>(in.residual.at(0, 0, m, n));
      xs.at(0, 0, i, n) = static_cast<double>(x[at]);
      outputs.out.at(0, 0, i, n) = static_cast<double>(y);
    }
  });
  if (kPlain) {
    round_all(p.out_dtype, outputs.out);
    round_all(p.dtype, outputs.preactivation);
  } else {
    const Terms terms = terms_of(in, largest(xs), largest(gates));
    outputs.out.terms = terms.out;
    outputs.preactivation.terms = terms.preactivation;
  }
  return outputs;
}

HostTensor rows_of(const HostTensor& t, std::int64_t layer, std::int64_t first, std::int64_t count) {
  HostTensor part(1, 1, count, t.shape[3]);
  std::copy_n(t.data.begin() + t.offset(0, layer, first), part.size(), part.data.begin());
  return part;
}

// The product of one group, as an ungrouped one.
Inputs group_of(const Inputs& in, std::int64_t g) {
  const GemmProblem& p = in.problem;
  Inputs one;
  one.problem = p;
  one.problem.grouping = kUngrouped;
  const bool ragged = !in.offsets.empty();
  const auto at = static_cast<std::size_t>(g);
  const std::int64_t first = ragged ? in.offsets[at] : 0, count = ragged ? in.offsets[at + 1] - first : 0;
  (p.grouping == kRaggedSums ? one.problem.k : one.problem.m) = ragged ? count : p.m;
  const auto layer = [&](const HostTensor& t) { return t.shape[1] > 1 ? g : 0; };
  const auto whole = [&](const HostTensor& t) { return rows_of(t, layer(t), 0, t.shape[2]); };
  const auto some = [&](const HostTensor& t) { return rows_of(t, layer(t), first, count); };
  const auto like_out = [&](const HostTensor& t) {
    return t.empty() ? HostTensor() : p.grouping == kRaggedRows ? some(t) : whole(t);
  };
  one.a = ragged ? some(in.a) : whole(in.a);
  one.b = p.grouping == kRaggedSums ? some(in.b) : whole(in.b);
  if (p.gated) one.gate = p.grouping == kRaggedSums ? some(in.gate) : whole(in.gate);
  if (p.bias) one.bias = rows_of(in.bias, 0, g, 1);
  if (p.bias && p.gated) one.gate_bias = rows_of(in.gate_bias, 0, g, 1);
  one.saved = like_out(in.saved);
  one.residual = like_out(in.residual);
  return one;
}

template <class Real>
Outputs compute_groups(const Inputs& in, const std::vector<std::int64_t>& rows, int threads) {
  const GemmProblem& p = in.problem;
  Outputs all;
  all.out = HostTensor(1, 1, static_cast<std::int64_t>(rows.size()), p.n);
  if (p.preactivation) all.preactivation = all.out;
  for (std::int64_t g = 0; g < p.groups; ++g) {
    const auto at = static_cast<std::size_t>(g);
    const std::int64_t begin = p.grouping == kRaggedRows ? in.offsets[at] : g * p.m;
    const std::int64_t end = p.grouping == kRaggedRows ? in.offsets[at + 1] : begin + p.m;
    const auto first = std::lower_bound(rows.begin(), rows.end(), begin);
    std::vector<std::int64_t> own(first, std::lower_bound(first, rows.end(), end));
    if (own.empty()) continue;
    for (std::int64_t& row : own) row -= begin;
    const Outputs part = compute<Real>(group_of(in, g), own, threads);
    const auto put = [&](const HostTensor& from, HostTensor& to) {
      std::copy(from.data.begin(), from.data.end(), to.data.begin() + to.offset(0, 0, first - rows.begin()));
      to.terms = std::max(to.terms, from.terms);
    };
    put(part.out, all.out);
    if (p.preactivation) put(part.preactivation, all.preactivation);
  }
  return all;
}

}  // namespace

double activated(int activation, double x) { return f(activation, x); }
double derivative(int activation, double x) { return f_prime(activation, x); }

Outputs product(const Inputs& inputs, const std::vector<std::int64_t>& rows, int threads) {
  return inputs.problem.op == GemmOp::kGrouped ? compute_groups<double>(inputs, rows, threads)
                                               : compute<double>(inputs, rows, threads);
}
Outputs plain_product(const Inputs& inputs, const std::vector<std::int64_t>& rows, int threads) {
  return inputs.problem.op == GemmOp::kGrouped ? compute_groups<float>(inputs, rows, threads)
                                               : compute<float>(inputs, rows, threads);
}

}  // namespace tessera::verify::gemm
