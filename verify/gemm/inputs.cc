// Values for a case, by its seed (verify/random.h).
#include <cmath>

#include "verify/gemm/cases.h"
#include "verify/parallel.h"
#include "verify/random.h"

namespace tessera::verify::gemm {
namespace {

template <class F>
void fill(HostTensor& t, F value) {  // value(row, column, n)
  over_range(t.size(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      t.data[static_cast<std::size_t>(n)] = value(n / t.shape[3], n % t.shape[3], n);
    }
  });
}

HostTensor tensor_of(bool with_values, std::int64_t rows, std::int64_t columns) {
  if (with_values) return {1, 1, rows, columns};
  HostTensor t;
  t.shape = {1, 1, rows, columns};
  return t;
}

// Sizes of A's and B's elements.
struct Sizes {
  double a = 1, b = 1;
};
Sizes sizes_of(const Case& c) {
  const double unit = 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(c.problem.k, 1)));
  switch (c.distribution) {
    case Distribution::kSaturated:
      return {1, 300 * unit};
    case Distribution::kTiny:
      return {std::ldexp(1.0, -7), std::ldexp(unit, -7)};
    case Distribution::kCancel:
      return {16, 16 * unit};
    case Distribution::kOneHot:
      return {1, 1};
    case Distribution::kNormal:
      break;
  }
  return {1, unit};
}

Inputs make(const Case& c, bool with_values) {
  const GemmProblem& p = c.problem;
  const Sizes size = sizes_of(c);
  Inputs in;
  in.problem = p;
  const auto normal = [&](HostTensor& t, std::uint64_t stream, double scale) {
    const RandomStream values(c.seed, stream);
    fill(t, [&](std::int64_t, std::int64_t, std::int64_t n) { return scale * values.normal(n); });
  };
  // Element (i, k) of an operand, i being a row of A or a column of B.
  const auto operand = [&](bool by_rows_of_k, std::int64_t count, std::uint64_t stream, double scale, bool is_a) {
    HostTensor t = by_rows_of_k ? tensor_of(with_values, p.k, count) : tensor_of(with_values, count, p.k);
    const RandomStream values(c.seed, stream);
    fill(t, [&](std::int64_t row, std::int64_t column, std::int64_t n) {
      const std::int64_t i = by_rows_of_k ? column : row, k = by_rows_of_k ? row : column;
      if (c.distribution == Distribution::kOneHot && is_a) return k == i * 7 % p.k ? 1.0 : 0.0;
      // Terms 2 k and 2 k + 1 are opposite but for noise.
      if (c.distribution == Distribution::kCancel) {
        const double sign = is_a && k % 2 == 1 ? -1 : 1;
        return scale * sign * (1 + values.normal(n) / 64);
      }
      return scale * values.normal(n);
    });
    return t;
  };
  in.a = operand(p.a_transposed, p.m, 0, size.a, true);
  in.b = operand(p.b_transposed, p.n, 1, size.b, false);
  if (p.gated) in.gate = operand(p.b_transposed, p.n, 2, size.b, false);
  if (p.bias) {
    in.bias = tensor_of(true, 1, p.n);
    normal(in.bias, 3, 1);
    if (p.gated) {
      in.gate_bias = tensor_of(true, 1, p.n);
      normal(in.gate_bias, 4, 1);
    }
  }
  if (p.gradient) {
    in.saved = tensor_of(with_values, p.m, p.n);
    normal(in.saved, 5, c.distribution == Distribution::kSaturated ? 300 : 2);
  }
  if (p.residual) {
    in.residual = tensor_of(with_values, p.m, p.n);
    normal(in.residual, 6, 1);
  }
  for (HostTensor* t : {&in.a, &in.b, &in.gate, &in.bias, &in.gate_bias, &in.saved}) round_all(p.dtype, *t);
  round_all(p.out_dtype, in.residual);
  return in;
}

}  // namespace

Inputs make_inputs(const Case& c) { return make(c, true); }
Inputs make_shapes(const Case& c) { return make(c, false); }

}  // namespace tessera::verify::gemm
