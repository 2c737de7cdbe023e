#include "cpu/products.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/elements.h"
#include "tests/isa_limit.h"

namespace tessera::cpu {
namespace {

struct Table {
  std::string name;
  const Products* products;
  bool of_bf16;
};

// All that this CPU can run.
std::vector<Table> tables() {
  std::vector<Table> found;
  for (const Isa isa : {Isa::kSse4, Isa::kAvx2, Isa::kAvx512}) {
    const Products* products = isa <= detect_isa() ? fp32_products(isa) : nullptr;
    if (products != nullptr) found.push_back({name_of(isa), products, false});
  }
  for (const Bf16Isa isa : {Bf16Isa::kAvx512Bf16, Bf16Isa::kAmx}) {
    if (isa <= detect_bf16_isa()) found.push_back({name_of(isa), bf16_products(isa), true});
  }
  return found;
}

bool same(float a, float b) { return a == b || (std::isnan(a) && std::isnan(b)); }

TEST(Products, every_16_bit_number_is_widened_to_its_value_as_lhs_and_as_rhs) {
  constexpr std::int64_t kSide = 256;
  std::vector<std::uint16_t> bits(kSide * kSide);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  std::vector<float> packed(kSide * kSide);
  for (const Table& table : tables()) {
    if (table.of_bf16) continue;
    const std::int64_t w = table.products->width;
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const auto value = [&](std::int64_t row, std::int64_t column) {
        return load(dtype, bits.data(), row * kSide + column);
      };
      int wrong = 0;
      const auto expect = [&](auto&& packed_at) {
        for (std::int64_t row = 0; row < kSide; ++row) {
          for (std::int64_t column = 0; column < kSide; ++column) {
            wrong += !same(packed[static_cast<std::size_t>(packed_at(row, column))], value(row, column));
          }
        }
      };
      const Source source{bits.data(), kSide, dtype};
      table.products->pack_lhs(source, kSide, kSide, kSide, packed.data());
      expect([&](std::int64_t row, std::int64_t column) { return (column / w * kSide + row) * w + column % w; });
      table.products->pack_rhs_t(source, kSide, kSide, kSide, packed.data());
      expect([&](std::int64_t row, std::int64_t column) { return (row / w * kSide + column) * w + row % w; });
      EXPECT_EQ(wrong, 0) << table.name << ", " << name_of(dtype);
    }
  }
}

constexpr std::int64_t kMost = 96, kMostTerms = 288;  // rows and columns; terms

// One product in all four forms of its operands, in buffers whose unused parts are NaN.
void expect_product(const Table& table, std::int64_t m, std::int64_t n, std::int64_t k, unsigned seed) {
  constexpr std::int64_t kLines = kMostTerms;
  const Products& ops = *table.products;
  const DType dtype = table.of_bf16 ? DType::kBFloat16 : DType::kFloat32;
  std::mt19937 random(seed);
  const auto matrix = [&](std::int64_t rows, std::int64_t columns) {
    std::vector<float> values(static_cast<std::size_t>(rows * columns));
    for (float& v : values) v = static_cast<float>(static_cast<int>(random() % 9) - 4);
    return values;
  };
  const std::vector<float> a = matrix(m, k), b = matrix(k, n);
  const auto source = [&](const std::vector<float>& values, std::int64_t rows, std::int64_t columns, bool transposed,
                          std::vector<std::byte>& bytes) {
    bytes.resize(values.size() * sizeof(float));
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      const std::int64_t from = transposed ? i % rows * columns + i / rows : i;
      store(dtype, bytes.data(), i, values[static_cast<std::size_t>(from)]);
    }
    return Source{bytes.data(), transposed ? rows : columns, dtype};
  };
  const std::int64_t w = ops.width;
  for (const bool a_transposed : {false, true}) {
    for (const bool b_transposed : {false, true}) {
      const float nan = std::numeric_limits<float>::quiet_NaN();
      std::vector<float> lhs(kLines * kLines, nan), rhs(kLines * kLines, nan), result(kLines * kLines, nan);
      std::vector<std::byte> a_bytes, b_bytes;
      const Source as = source(a, m, k, a_transposed, a_bytes), bs = source(b, k, n, b_transposed, b_bytes);
      std::int64_t stride = kLines * ops.line;
      if (a_transposed) {
        ops.pack_lhs_t(as, k, m, kLines, lhs.data());
        stride = transposed_stride(ops, kLines, m);
      } else {
        ops.pack_lhs(as, m, k, kLines, lhs.data());
      }
      (b_transposed ? ops.pack_rhs_t(bs, n, k, kLines, rhs.data()) : ops.pack_rhs(bs, k, n, kLines, rhs.data()));
      if (ops.enter != nullptr) ops.enter();
      for (const bool again : {false, true}) {
        (a_transposed ? ops.multiply_t : ops.multiply)(lhs.data(), stride, rhs.data(), kLines * w, result.data(),
                                                       kLines * w, m, static_cast<int>((n + w - 1) / w), k, again);
      }
      if (ops.leave != nullptr) ops.leave();
      int wrong = 0;
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n; ++j) {
          float sum = 0;
          for (std::int64_t kk = 0; kk < k; ++kk) {
            sum += a[static_cast<std::size_t>(i * k + kk)] * b[static_cast<std::size_t>(kk * n + j)];
          }
          wrong += result[static_cast<std::size_t>((j / w * kLines + i) * w + j % w)] != 2 * sum;
        }
      }
      EXPECT_EQ(wrong, 0) << table.name << " " << m << " x " << n << " x " << k << (a_transposed ? ", A" : "")
                          << (b_transposed ? ", B" : "");
    }
  }
}

TEST(Products, small_integers_are_multiplied_exactly_in_all_forms_and_sizes) {
  std::mt19937 random(7);
  for (const Table& table : tables()) {
    for (unsigned seed = 0; seed < 60; ++seed) {
      const auto size = [&](std::int64_t most) { return 1 + static_cast<std::int64_t>(random()) % most; };
      const std::int64_t m = size(kMost), n = size(kMost);
      expect_product(table, m, n, size(seed % 2 == 0 ? kMost : kMostTerms), seed);
    }
  }
}

TEST(Products, a_limit_of_the_instruction_set_is_kept) {
  const IsaLimit limit(Isa::kSse4, Bf16Isa::kNone);
  EXPECT_EQ(detect_bf16_isa(), Bf16Isa::kNone);
  EXPECT_EQ(products_for(DType::kBFloat16), fp32_products(detect_isa()));
  EXPECT_LE(detect_isa(), Isa::kSse4);
}

}  // namespace
}  // namespace tessera::cpu
