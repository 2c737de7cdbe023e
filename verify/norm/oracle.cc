#include "verify/norm/oracle.h"

#include <algorithm>
#include <cmath>

#include "verify/parallel.h"

namespace tessera::verify::norm {
namespace {

template <class Real>
Real at(const HostTensor& vector, std::int64_t i, Real otherwise) {
  return vector.empty() ? otherwise : static_cast<Real>(vector.data[static_cast<std::size_t>(i)]);
}

// The largest of what the rows report: threads may finish in any order.
struct RowMaxima {
  std::vector<double> of_row;
  explicit RowMaxima(std::int64_t rows) : of_row(static_cast<std::size_t>(rows), 0.0) {}
  double& operator[](std::int64_t row) { return of_row[static_cast<std::size_t>(row)]; }
  double largest() const { return of_row.empty() ? 0 : *std::max_element(of_row.begin(), of_row.end()); }
};

template <class Real>
void forward(const Inputs& in, int threads, Outputs& out) {
  const NormProblem& p = in.problem;
  const std::int64_t n = p.columns;
  const auto count = static_cast<Real>(n);
  out.out = HostTensor(1, 1, p.rows, n);
  if (p.residual) out.sum = HostTensor(1, 1, p.rows, n);
  if (p.statistics) out.rstd = HostTensor(1, 1, 1, p.rows);
  if (p.statistics && p.centered) out.mean = HostTensor(1, 1, 1, p.rows);
  RowMaxima terms(p.rows);
  in_parallel(p.rows, threads, [&](std::int64_t row) {
    std::vector<Real> h(static_cast<std::size_t>(n));
    double most = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      Real& value = h[static_cast<std::size_t>(i)];
      value = static_cast<Real>(in.x.at(0, 0, row, i));
      if (p.residual) {
        value += static_cast<Real>(in.residual.at(0, 0, row, i));
        out.sum.at(0, 0, row, i) = static_cast<double>(value);
        value = static_cast<Real>(round_to(p.dtype, static_cast<double>(value)));
      }
      most = std::max(most, std::abs(static_cast<double>(value)));
    }
    Real mean = 0, squares = 0;
    if (p.centered) {
      for (const Real value : h) mean += value / count;
    }
    for (const Real value : h) squares += (value - mean) * (value - mean);
    const Real rstd = 1 / std::sqrt(squares / count + static_cast<Real>(in.eps));
    if (p.statistics) out.rstd.at(0, 0, 0, row) = static_cast<double>(rstd);
    if (p.statistics && p.centered) out.mean.at(0, 0, 0, row) = static_cast<double>(mean);
    for (std::int64_t i = 0; i < n; ++i) {
      out.out.at(0, 0, row, i) = static_cast<double>(
          (h[static_cast<std::size_t>(i)] - mean) * rstd * at<Real>(in.weight, i, 1) + at<Real>(in.bias, i, 0));
    }
    terms[row] = (most + std::abs(static_cast<double>(mean))) * static_cast<double>(rstd);
  });
  out.out.terms = terms.largest() * (in.weight.empty() ? 1 : largest(in.weight)) + largest(in.bias);
  out.sum.terms = largest(in.x) + largest(in.residual);
  out.mean.terms = out.sum.terms;
}

template <class Real>
void backward(const Inputs& in, int threads, Outputs& out) {
  const NormProblem& p = in.problem;
  const std::int64_t n = p.columns;
  const auto count = static_cast<Real>(n);
  const auto normalized = [&](std::int64_t row, std::int64_t i) {
    const auto mean = p.centered ? static_cast<Real>(in.mean.data[static_cast<std::size_t>(row)]) : Real(0);
    return (static_cast<Real>(in.x.at(0, 0, row, i)) - mean) *
           static_cast<Real>(in.rstd.data[static_cast<std::size_t>(row)]);
  };
  out.dx = HostTensor(1, 1, p.rows, n);
  RowMaxima terms(p.rows);
  in_parallel(p.rows, threads, [&](std::int64_t row) {
    const auto rstd = static_cast<Real>(in.rstd.data[static_cast<std::size_t>(row)]);
    Real products = 0, sum = 0;
    double most = 0, absolute = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const Real g = static_cast<Real>(in.dout.at(0, 0, row, i)) * at<Real>(in.weight, i, 1);
      const Real x = normalized(row, i);
      products += g * x / count;
      if (p.centered) sum += g / count;
      most = std::max({most, std::abs(static_cast<double>(x)), 1.0});
      absolute = std::max(absolute, std::abs(static_cast<double>(g)));
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const Real g = static_cast<Real>(in.dout.at(0, 0, row, i)) * at<Real>(in.weight, i, 1);
      Real dx = rstd * (g - normalized(row, i) * products - sum);
      if (p.residual) dx += static_cast<Real>(in.dsum.at(0, 0, row, i));
      out.dx.at(0, 0, row, i) = static_cast<double>(dx);
    }
    terms[row] = static_cast<double>(rstd) * absolute * most;
  });
  out.dx.terms = 3 * terms.largest() + largest(in.dsum);
  if (!p.parameters) return;
  out.dweight = out.dbias = HostTensor(1, 1, 1, n);
  RowMaxima dweight_terms(n), dbias_terms(n);
  in_parallel(n, threads, [&](std::int64_t i) {
    Real dweight = 0, dbias = 0;
    for (std::int64_t row = 0; row < p.rows; ++row) {
      const auto dout = static_cast<Real>(in.dout.at(0, 0, row, i));
      const Real term = dout * normalized(row, i);
      dweight += term;
      dbias += dout;
      dweight_terms[i] += std::abs(static_cast<double>(term));
      dbias_terms[i] += std::abs(static_cast<double>(dout));
    }
    out.dweight.at(0, 0, 0, i) = static_cast<double>(dweight);
    out.dbias.at(0, 0, 0, i) = static_cast<double>(dbias);
  });
  out.dweight.terms = dweight_terms.largest();
  out.dbias.terms = dbias_terms.largest();
}

template <class Real>
void rotary(const Inputs& in, int threads, Outputs& out) {
  const NormProblem& p = in.problem;
  out.out = in.x;
  in_parallel(p.batch * p.seq, threads, [&](std::int64_t token) {
    const std::int64_t b = token / p.seq, s = token % p.seq, half = p.rotated / 2;
    const std::int64_t position = p.positions ? in.positions[static_cast<std::size_t>(token)] : s;
    for (std::int64_t head = 0; head < p.heads; ++head) {
      for (std::int64_t i = 0; i < half; ++i) {
        const std::int64_t low = p.interleaved ? 2 * i : i, high = p.interleaved ? 2 * i + 1 : i + half;
        const auto c = static_cast<Real>(in.cos.at(0, 0, position, i));
        const Real sn = static_cast<Real>(in.sin.at(0, 0, position, i)) * (p.inverse ? -1 : 1);
        const auto x = static_cast<Real>(in.x.at(b, s, head, low)), y = static_cast<Real>(in.x.at(b, s, head, high));
        out.out.at(b, s, head, low) = static_cast<double>(x * c - y * sn);
        out.out.at(b, s, head, high) = static_cast<double>(y * c + x * sn);
      }
    }
  });
  out.out.terms = 2 * largest(in.x) * std::max(largest(in.cos), largest(in.sin));
}

template <class Real>
Outputs compute(const Inputs& in, int threads) {
  Outputs out;
  switch (in.problem.op) {
    case NormOp::kForward:
      forward<Real>(in, threads, out);
      break;
    case NormOp::kBackward:
      backward<Real>(in, threads, out);
      break;
    case NormOp::kRotary:
      rotary<Real>(in, threads, out);
      break;
  }
  return out;
}

}  // namespace

Outputs expected(const Inputs& inputs, int threads) { return compute<double>(inputs, threads); }

Outputs plain(const Inputs& inputs, int threads) {
  Outputs out = compute<float>(inputs, threads);
  for (HostTensor* t : {&out.out, &out.sum, &out.dx, &out.dweight, &out.dbias}) round_all(inputs.problem.dtype, *t);
  return out;
}

}  // namespace tessera::verify::norm
