// Values for a case, by its seed (verify/random.h).
#include <algorithm>
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
      t.data[static_cast<std::size_t>(n)] = value(n / t.shape[3] % t.shape[2], n % t.shape[3], n);
    }
  });
}

HostTensor tensor_of(bool with_values, std::int64_t rows, std::int64_t columns, std::int64_t layers = 1) {
  if (with_values) return {1, layers, rows, columns};
  HostTensor t;
  t.shape = {1, layers, rows, columns};
  return t;
}

// Sizes of A's and B's elements.
struct Sizes {
  double a = 1, b = 1;
};
Sizes sizes_of(const Case& c) {
  const std::int64_t groups = c.problem.grouping == kRaggedSums ? std::max<std::int64_t>(c.problem.groups, 1) : 1;
  const double unit = 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(c.problem.k / groups, 1)));
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
  in.offsets = offsets_of(c);
  const auto normal = [&](HostTensor& t, std::uint64_t stream, double scale) {
    const RandomStream values(c.seed, stream);
    fill(t, [&](std::int64_t, std::int64_t, std::int64_t n) { return scale * values.normal(n); });
  };
  // Element (i, k) of an operand, i being a row of A or a column of B.
  const Layers layers = layers_of(p);
  const auto operand = [&](bool by_rows_of_k, std::int64_t count, std::uint64_t stream, double scale, bool is_a) {
    const std::int64_t matrices = is_a ? layers.a : layers.b;
    HostTensor t =
        by_rows_of_k ? tensor_of(with_values, p.k, count, matrices) : tensor_of(with_values, count, p.k, matrices);
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
    const std::int64_t vectors = p.op == GemmOp::kGrouped ? p.groups : 1;
    in.bias = tensor_of(true, vectors, p.n);
    normal(in.bias, 3, 1);
    if (p.gated) {
      in.gate_bias = tensor_of(true, vectors, p.n);
      normal(in.gate_bias, 4, 1);
    }
  }
  if (p.gradient) {
    in.saved = tensor_of(with_values, p.m, p.n, layers.out);
    normal(in.saved, 5, c.distribution == Distribution::kSaturated ? 300 : 2);
  }
  if (p.residual) {
    in.residual = tensor_of(with_values, p.m, p.n, layers.out);
    normal(in.residual, 6, 1);
  }
  for (HostTensor* t : {&in.a, &in.b, &in.gate, &in.bias, &in.gate_bias, &in.saved}) round_all(p.dtype, *t);
  round_all(p.out_dtype, in.residual);
  return in;
}

}  // namespace

Layers layers_of(const GemmProblem& p) {
  Layers layers;
  if (p.grouping == kBatched && !p.a_shared) layers.a = p.groups;
  if (p.grouping == kBatched || p.grouping == kRaggedRows) layers.b = p.groups;
  if (out_has_layers(p.grouping)) layers.out = p.groups;
  return layers;
}

std::vector<std::int32_t> offsets_of(const Case& c) {
  const GemmProblem& p = c.problem;
  std::vector<std::int32_t> offsets;
  if (p.grouping != kRaggedRows && p.grouping != kRaggedSums) return offsets;
  const std::int64_t rows = p.grouping == kRaggedRows ? p.m : p.k;
  const RandomStream random(c.seed, 8);
  const std::int64_t left = c.routing == Routing::kRandom ? rows - rows / 16 : rows;
  std::int64_t at = 0;
  for (std::int64_t g = 0; g < p.groups; ++g) {
    offsets.push_back(static_cast<std::int32_t>(at));
    switch (c.routing) {
      case Routing::kEven:
        at = rows * (g + 1) / p.groups;
        break;
      case Routing::kHalf:
        at = g == 0 ? rows / 2 : rows / 2 + (rows - rows / 2) * g / std::max<std::int64_t>(p.groups - 1, 1);
        break;
      case Routing::kRandom: {
        const std::uint64_t bits = random.bits(g);
        const auto most = static_cast<std::uint64_t>(std::max<std::int64_t>(2 * rows / p.groups, 1));
        const std::int64_t wanted = g % 4 == 1 ? 0 : g % 4 == 3 ? 1 : static_cast<std::int64_t>(bits % most) + 1;
        at = std::min(at + wanted, left);
        break;
      }
    }
  }
  offsets.push_back(static_cast<std::int32_t>(at));
  return offsets;
}

Inputs make_inputs(const Case& c) { return make(c, true); }
Inputs make_shapes(const Case& c) { return make(c, false); }

}  // namespace tessera::verify::gemm
