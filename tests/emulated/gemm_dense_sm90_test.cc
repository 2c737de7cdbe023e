// The Hopper GEMM, whole, on the CPU: its pipeline and every epilogue that passes through shared memory, against fp64.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "device.h"
// Behind it, since its headers replace those that the kernel includes.
#include "gemm/dense_sm90.cuh"

namespace tessera {
namespace {

using Config = GemmDenseSm90Config;
constexpr DType kType = DType::kBFloat16;
constexpr Bits16 kPoison = 0x7fc1;  // a NaN

float value_of(Bits16 bits) { return to_float<kType>(bits); }

// Rows of 16-bit elements, with some behind each row that belong to nobody; one matrix, or one per group.
struct Matrix {
  long rows, columns, layers, stride;
  std::vector<Bits16> data;

  Matrix(long rows_, long columns_, long layers_ = 1)
      : rows(rows_), columns(columns_), layers(layers_), stride((columns_ + 7) / 8 * 8 + 8) {
    data.assign(static_cast<std::size_t>(rows * stride * layers), kPoison);
  }
  void fill(std::mt19937& random, float scale) {
    std::normal_distribution<float> normal(0, scale);
    for (long layer = 0; layer < layers; ++layer) {
      for (long row = 0; row < rows; ++row) {
        for (long column = 0; column < columns; ++column) at(row, column, layer) = from_float<kType>(normal(random));
      }
    }
  }
  Bits16& at(long row, long column, long layer = 0) {
    return data[static_cast<std::size_t>((layer * rows + row) * stride + column)];
  }
  TensorMap map(int box_rows) {
    return map_of({data.data(), {columns, rows, layers, 1}, {1, stride, rows * stride, 0}, {64, box_rows, 1, 1}});
  }
  GemmMatrix view() { return {data.data(), stride, 0}; }
};

struct Shape {
  int n, k;
  std::vector<int> group_rows;  // one: not grouped
  unsigned ctas;
  bool stores_hidden = true;
};

double silu(double x) { return x / (1 + std::exp(-x)); }
double silu_slope(double x) {
  const double s = 1 / (1 + std::exp(-x));
  return s + x * s * (1 - s);
}

template <Config config>
class Product {
 public:
  Product(const Shape& shape, unsigned seed) : shape_(shape), offsets_{0}, random_(seed) {
    for (const int rows : shape.group_rows) offsets_.push_back(offsets_.back() + rows);
    constexpr long kOfNoGroup = 21;
    rows_ = offsets_.back();
    const long m = rows_ + (kRagged ? kOfNoGroup : 0),
               groups = kRagged ? static_cast<long>(shape.group_rows.size()) : 1;
    const auto weights = [&] {
      return config.b_transposed ? Matrix(shape.k, shape.n, groups) : Matrix(shape.n, shape.k, groups);
    };
    a_.assign(2, Matrix(m, shape.k));
    b_.assign(3, weights());
    for (Matrix& a : a_) a.fill(random_, 1);
    for (Matrix& b : b_) b.fill(random_, 1 / std::sqrt(static_cast<float>(shape.k)));
    read_.assign(2, Matrix(m, shape.n));
    written_.assign(3, Matrix(m, shape.n));
    for (Matrix& r : read_) r.fill(random_, 1);
    std::normal_distribution<float> normal;
    for (long row = 0; row < m; ++row) row_weights_.push_back(normal(random_));
    bias_.assign(2, std::vector<Bits16>(static_cast<std::size_t>(shape.n * groups)));
    for (auto& bias : bias_) {
      for (Bits16& b : bias) b = from_float<kType>(normal(random_));
    }
    row_dots_.assign(static_cast<std::size_t>(m * parts()), std::nanf(""));
  }

  const char* run(unsigned seed) {
    GemmDenseSm90ParamsOf<config> p = {};
    constexpr bool kHalves = config.gated || gemm_sm90::shares_b(config);
    constexpr int kRowsOfB = config.b_transposed ? 64 : kHalves ? config.block_n / 2 : config.block_n;
    p.a[0] = a_[0].map(config.block_m);
    p.a2 = a_[1].map(config.block_m);
    p.b[0] = b_[0].map(kRowsOfB);
    p.b2 = b_[1].map(kRowsOfB);
    p.gate = b_[2].map(kRowsOfB);
    constexpr bool kLoads = gemm_sm90::loads_staged(config);
    p.out[0] = written_[0].map(64);
    p.staged[0] = kLoads ? read_[0].map(64) : written_[1].map(64);
    p.staged_gate = kLoads ? read_[1].map(64) : written_[2].map(64);
    p.out_gate = written_[1].map(64);
    p.hidden = written_[2].map(64);
    p.epilogue.saved = p.epilogue.residual = read_[0].view();
    p.epilogue.out = written_[0].view();
    p.epilogue.preactivation = p.pair.out_gate = written_[1].view();
    p.pair.gate_preactivation = written_[2].view();
    if (config.gated_gradient && shape_.stores_hidden) p.pair.hidden = written_[2].view();
    p.epilogue.bias = bias_[0].data();
    p.epilogue.gate_bias = bias_[1].data();
    p.epilogue.bias_group_stride = p.epilogue.gate_bias_group_stride = kRagged ? shape_.n : 0;
    p.pair.row_weights = row_weights_.data();
    p.pair.row_dots = row_dots_.data();
    p.pair.dot_parts = static_cast<int>(parts());
    p.offsets = offsets_.data();
    p.groups = static_cast<int>(shape_.group_rows.size());
    p.m = static_cast<int>(a_[0].rows);
    p.n = shape_.n;
    p.k = shape_.k;
    p.k_steps = (shape_.k + 63) / 64 * (config.sums_two ? 2 : 1);
    constexpr unsigned kRows = config.block_m * config.cluster, kColumns = gemm_sm90::out_columns(config);
    p.order = {(static_cast<unsigned>(p.m) + kRows - 1) / kRows, (static_cast<unsigned>(p.n) + kColumns - 1) / kColumns,
               16};
    p.work_tiles = p.order.row_tiles * p.order.column_tiles;
    const emulated::Launch launch = {.grid = {shape_.ctas},
                                     .threads = gemm_sm90::kThreads,
                                     .cluster = config.cluster,
                                     .shared_bytes = gemm_sm90::layout(config).bytes,
                                     .seed = seed};
    return emulated::run(launch, [&p] { gemm_dense_sm90<config>(p); });
  }

  // How many results differ from fp64 by more than rounding, or were written though they should not be.
  long wrong() {
    long wrong = 0;
    for (long row = 0; row < a_[0].rows; ++row) {
      std::vector<double> dots(static_cast<std::size_t>(parts()));
      for (long column = 0; column < written_[0].stride; ++column) {
        const bool exists = row < rows_ && column < shape_.n;
        double want[3];
        const int count = exists ? expected(row, column, want, dots) : 0;
        for (int i = 0; i < 3; ++i) {
          const Bits16 got = written_[static_cast<std::size_t>(i)].at(row, column);
          const bool fits =
              i < count ? std::abs(value_of(got) - want[i]) <= 0.006 * std::abs(want[i]) + 1e-4 : got == kPoison;
          wrong += fits ? 0 : 1;
        }
      }
      for (long part = 0; config.weighted && part < parts(); ++part) {
        const double want = dots[static_cast<std::size_t>(part)];
        const double got = row_dots_[static_cast<std::size_t>(row * parts() + part)];
        const bool fits = row < rows_ ? std::abs(got - want) <= 1e-4 * (1 + std::abs(want)) : std::isnan(got);
        wrong += fits ? 0 : 1;
      }
    }
    return wrong;
  }

 private:
  static constexpr bool kRagged = config.grouping == kRaggedRows;
  long parts() const { return (shape_.n + kDotColumns - 1) / kDotColumns; }

  long group_of(long row) const {
    long group = 0;
    while (kRagged && offsets_[static_cast<std::size_t>(group) + 1] <= row) ++group;
    return group;
  }
  // Of A, and B or the gate, with its bias.
  double product(std::size_t a, std::size_t b, long row, long column) {
    const long group = group_of(row);
    const auto& bias = bias_[b == 2 ? 1 : 0];
    double sum = config.bias && a == 0 ? value_of(bias[static_cast<std::size_t>(group * shape_.n + column)]) : 0.0f;
    for (long k = 0; k < shape_.k; ++k) {
      const Bits16 weight = config.b_transposed ? b_[b].at(k, column, group) : b_[b].at(column, k, group);
      sum += static_cast<double>(value_of(a_[a].at(row, k))) * value_of(weight);
    }
    return sum;
  }

  // The results that the config has, in the order of written_.
  int expected(long row, long column, double (&want)[3], std::vector<double>& dots) {
    double x = product(0, 0, row, column);
    if (config.sums_two) x += product(1, 1, row, column);
    const double saved = value_of(read_[0].at(row, column)), saved_gate = value_of(read_[1].at(row, column));
    if (config.gated_gradient) {
      const double w = config.weighted ? row_weights_[static_cast<std::size_t>(row)] : 1.0f;
      want[0] = w * x * silu(saved_gate);
      want[1] = w * x * saved * silu_slope(saved_gate);
      want[2] = w * saved * silu(saved_gate);
      dots[static_cast<std::size_t>(column / kDotColumns)] += x * saved * silu(saved_gate);
      return shape_.stores_hidden ? 3 : 2;
    }
    if (config.gated) {
      const double gate = product(0, 2, row, column);
      want[0] = x * silu(gate);
      want[1] = x;
      want[2] = gate;
      return config.preactivation ? 3 : 1;
    }
    want[0] = config.gradient ? x * silu_slope(saved) : config.activation == kSilu ? silu(x) : x;
    if (config.residual) want[0] += saved;
    want[1] = x;
    return config.preactivation ? 2 : 1;
  }

  Shape shape_;
  std::vector<int> offsets_;
  std::mt19937 random_;
  long rows_;
  std::vector<Matrix> a_, b_, read_, written_;
  std::vector<float> row_weights_, row_dots_;
  std::vector<std::vector<Bits16>> bias_;  // of b, of the gate
};

template <Config config>
void expect_right(const Shape& shape) {
  for (unsigned seed = 1; seed <= 3; ++seed) {
    Product<config> product(shape, seed);
    const char* wrong = product.run(seed);
    ASSERT_EQ(wrong, nullptr) << wrong;
    EXPECT_EQ(product.wrong(), 0) << "seed " << seed;
  }
}

constexpr Config tile(int block_m, int block_n, bool ping_pong) {
  Config c = {};
  c.dtype = c.out_dtype = kType;
  c.block_m = block_m;
  c.block_n = block_n;
  c.stages = 2;
  c.ping_pong = ping_pong;
  c.cluster = 1;
  c.tma_store = c.pairs = true;
  c.activation = kIdentity;
  return c;
}
constexpr Config ragged(Config c) {
  c.grouping = kRaggedRows;
  return c;
}
constexpr Config with_residual(Config c) {
  c.residual = true;
  c.staged = kStagedResidual;
  return c;
}
constexpr Config with_gradient(Config c) {
  c.gradient = true;
  c.activation = kSilu;
  c.staged = kStagedSaved;
  return c;
}
constexpr Config with_preactivation(Config c) {
  c.preactivation = true;
  c.activation = kSilu;
  c.staged = kStagedPreactivation;
  return c;
}
constexpr Config with_bias(Config c) {
  c.bias = true;
  return c;
}
constexpr Config gated(Config c) {
  c.gated = true;
  c.activation = kSilu;
  return c;
}
constexpr Config gated_gradient(Config c) {
  c.gated_gradient = c.b_transposed = true;
  c.weighted = c.grouping == kRaggedRows;
  c.activation = kSilu;
  c.staged = kStagedPair;
  return c;
}
constexpr Config in_clusters(Config c) {
  c.cluster = 2;
  return c;
}
constexpr Config of_two(Config c) {
  c.sums_two = c.b_transposed = true;
  return c;
}

const Shape kOne{200, 72, {300}, 2};
// Whole tiles and less, an empty group, and one row.
const Shape kGroups{200, 72, {150, 0, 1, 129, 64}, 2};

TEST(EmulatedGemm, products_and_epilogues_of_one_matrix_are_right) {
  expect_right<tile(128, 200, false)>(kOne);
  expect_right<tile(128, 104, true)>(kOne);
  expect_right<with_residual(tile(128, 104, true))>(kOne);
  expect_right<with_gradient(tile(64, 128, true))>(kOne);
  expect_right<with_preactivation(tile(128, 128, true))>(kOne);
}

TEST(EmulatedGemm, tiles_of_192_rows_are_right) {
  constexpr Config tall = tile(192, 128, true);
  expect_right<tall>(kOne);
  expect_right<in_clusters(tall)>(kOne);
  expect_right<with_residual(tall)>(kOne);
  expect_right<in_clusters(with_preactivation(tall))>(kOne);
  expect_right<ragged(tall)>(kGroups);
  expect_right<ragged(with_preactivation(tall))>(kGroups);
}

// Which only the tuner tries.
TEST(EmulatedGemm, tiles_of_256_rows_are_right) {
  constexpr Config wide = tile(256, 192, false);
  constexpr auto with_silu = [](Config c) {
    c.activation = kSilu;
    return c;
  };
  expect_right<wide>(kOne);
  expect_right<in_clusters(with_silu(tile(256, 112, false)))>(kOne);
  expect_right<ragged(wide)>(kGroups);
  expect_right<in_clusters(of_two(ragged(tile(256, 128, false))))>(kGroups);
}

TEST(EmulatedGemm, groups_of_rows_end_anywhere) {
  expect_right<ragged(tile(128, 200, false))>(kGroups);
  expect_right<ragged(with_residual(tile(128, 104, true)))>(kGroups);
  expect_right<ragged(with_preactivation(tile(64, 128, true)))>(kGroups);
}

TEST(EmulatedGemm, gated_products_store_what_they_multiply) {
  expect_right<gated(tile(128, 160, true))>(kOne);
  expect_right<with_preactivation(gated(tile(128, 256, false)))>(kOne);
  expect_right<ragged(with_bias(with_preactivation(gated(tile(128, 256, false)))))>(kGroups);
  expect_right<ragged(with_preactivation(gated(tile(64, 256, true))))>(kGroups);
}

TEST(EmulatedGemm, gradients_of_gated_pairs_are_right_in_every_tile) {
  expect_right<gated_gradient(tile(128, 128, true))>(kOne);
  expect_right<gated_gradient(ragged(tile(128, 128, true)))>(kGroups);
  expect_right<gated_gradient(ragged(tile(64, 192, true)))>(kGroups);
  expect_right<gated_gradient(ragged(tile(128, 256, false)))>(kGroups);
  Shape without_hidden = kGroups;
  without_hidden.stores_hidden = false;
  expect_right<gated_gradient(ragged(tile(128, 128, true)))>(without_hidden);
}

TEST(EmulatedGemm, the_second_product_is_added) {
  expect_right<of_two(tile(128, 128, true))>(kOne);
  expect_right<of_two(ragged(tile(128, 256, false)))>(kGroups);
}

TEST(EmulatedGemm, ctas_of_a_cluster_load_halves_for_each_other) {
  expect_right<in_clusters(tile(128, 208, false))>(kOne);
  expect_right<in_clusters(with_residual(tile(128, 112, true)))>(kOne);
  expect_right<in_clusters(with_preactivation(gated(tile(128, 256, false))))>(kOne);
  expect_right<in_clusters(gated_gradient(tile(128, 128, true)))>(kOne);
  expect_right<in_clusters(gated_gradient(ragged(tile(128, 128, true))))>(kGroups);
  expect_right<in_clusters(of_two(ragged(tile(128, 128, true))))>(kGroups);
}

}  // namespace
}  // namespace tessera
