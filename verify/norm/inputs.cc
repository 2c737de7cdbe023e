// Values for a case, by its seed (verify/random.h).
#include <cmath>

#include "verify/norm/cases.h"
#include "verify/parallel.h"
#include "verify/random.h"

namespace tessera::verify::norm {
namespace {

// Rows of a case's distribution.
double value_of(const Case& c, double unit, std::int64_t row, std::int64_t column) {
  switch (c.distribution) {
    case Distribution::kOffset:
      return 300 + unit;
    case Distribution::kConstant:
      return 0.25 + static_cast<double>(row % 5);
    case Distribution::kOutlier:
      return column == row * 7 % c.problem.columns ? 1000 * unit : unit;
    case Distribution::kTiny:
      return std::ldexp(unit, -12);
    case Distribution::kNormal:
      break;
  }
  return unit;
}

HostTensor tensor_of(bool with_values, std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
  if (with_values) return {a, b, c, d};
  HostTensor t;
  t.shape = {a, b, c, d};
  return t;
}

Inputs make(const Case& c, bool with_values) {
  const NormProblem& p = c.problem;
  Inputs in;
  in.problem = p;
  in.eps = static_cast<double>(1e-5f);
  const auto fill = [&](HostTensor& t, std::uint64_t stream, auto value) {
    const RandomStream values(c.seed, stream);
    over_range(t.size(), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t n = begin; n < end; ++n) {
        t.data[static_cast<std::size_t>(n)] = value(values.normal(n), n / t.shape[3], n % t.shape[3]);
      }
    });
    round_all(p.dtype, t);
  };
  const auto unit = [](double x, std::int64_t, std::int64_t) { return x; };
  const auto near_one = [](double x, std::int64_t, std::int64_t) { return 1 + x / 4; };
  const auto row = [&](double x, std::int64_t i, std::int64_t j) { return value_of(c, x, i, j); };

  if (p.op == NormOp::kRotary) {
    in.x = tensor_of(with_values, p.batch, p.seq, p.heads, p.columns);
    fill(in.x, 0, unit);
    const std::int64_t table = p.positions ? 2 * p.seq + 3 : p.seq;
    in.cos = in.sin = HostTensor(1, 1, table, p.rotated / 2);
    for (std::int64_t t = 0; t < table; ++t) {
      for (std::int64_t i = 0; i < p.rotated / 2; ++i) {
        const double angle =
            static_cast<double>(t) * std::pow(10000.0, -2 * static_cast<double>(i) / static_cast<double>(p.rotated));
        in.cos.at(0, 0, t, i) = std::cos(angle);
        in.sin.at(0, 0, t, i) = std::sin(angle);
      }
    }
    round_all(p.table_dtype, in.cos);
    round_all(p.table_dtype, in.sin);
    if (p.positions) {
      const RandomStream random(c.seed, 9);
      in.positions.resize(static_cast<std::size_t>(p.batch * p.seq));
      for (std::size_t i = 0; i < in.positions.size(); ++i) {
        in.positions[i] =
            static_cast<std::int32_t>(random.bits(static_cast<std::int64_t>(i)) % static_cast<std::uint64_t>(table));
      }
    }
    return in;
  }

  const auto rows = [&] { return tensor_of(with_values, 1, 1, p.rows, p.columns); };
  const auto vector = [&](bool given, std::uint64_t stream, auto value) {
    HostTensor t;
    if (given) t = HostTensor(1, 1, 1, p.columns);
    fill(t, stream, value);
    return t;
  };
  in.x = rows();
  fill(in.x, 0, row);
  in.weight = vector(p.weight, 1, near_one);
  in.bias = vector(p.bias, 2, unit);
  if (p.op == NormOp::kForward) {
    if (!p.residual) return in;
    in.residual = rows();
    fill(in.residual, 3, unit);
    return in;
  }
  in.dout = rows();
  fill(in.dout, 4, unit);
  if (p.residual) {
    in.dsum = rows();
    fill(in.dsum, 5, unit);
  }
  // What a forward would have written.
  in.rstd = HostTensor(1, 1, 1, p.rows);
  if (p.centered) in.mean = HostTensor(1, 1, 1, p.rows);
  std::fill(in.rstd.data.begin(), in.rstd.data.end(), 1.0);
  if (!with_values) return in;
  in_parallel(p.rows, 0, [&](std::int64_t r) {
    double mean = 0, squares = 0;
    for (std::int64_t i = 0; i < p.columns; ++i) mean += in.x.at(0, 0, r, i) / static_cast<double>(p.columns);
    if (!p.centered) mean = 0;
    for (std::int64_t i = 0; i < p.columns; ++i) squares += std::pow(in.x.at(0, 0, r, i) - mean, 2);
    in.rstd.data[static_cast<std::size_t>(r)] = 1 / std::sqrt(squares / static_cast<double>(p.columns) + in.eps);
    if (p.centered) in.mean.data[static_cast<std::size_t>(r)] = mean;
  });
  round_all(DType::kFloat32, in.rstd);
  round_all(DType::kFloat32, in.mean);
  return in;
}

}  // namespace

Inputs make_inputs(const Case& c) { return make(c, true); }
Inputs make_shapes(const Case& c) { return make(c, false); }

}  // namespace tessera::verify::norm
