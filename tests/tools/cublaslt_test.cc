// Products that cuBLASLt serves, on the stand-in driver and a stand-in cuBLASLt (fake_cublaslt.cc), as if the tuner had chosen it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "engine/tuned.h"
#include "tessera/tessera.hpp"

namespace tessera::test {
namespace {

constexpr tessera_device kGpu{TESSERA_CUDA, 0};
constexpr std::int64_t kM = 248, kN = 264, kK = 256;

std::uint16_t bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>(bits >> 16);
}
float from_bf16(std::uint16_t value) {
  const std::uint32_t bits = std::uint32_t{value} << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// Small integers, so that sums and their rounding are exact.
struct Matrix {
  std::int64_t rows, columns, stride;
  std::vector<std::uint16_t> values;

  Matrix(std::int64_t r, std::int64_t c, int seed, std::int64_t padding = 0)
      : rows(r), columns(c), stride(c + padding), values(static_cast<std::size_t>(r * (c + padding)), 0xffff) {
    for (std::int64_t i = 0; i < r; ++i) {
      for (std::int64_t j = 0; j < c; ++j) {
        values[static_cast<std::size_t>(i * stride + j)] = bf16(static_cast<float>((i * 7 + j * 5 + seed) % 11 == 0));
      }
    }
  }
  float at(std::int64_t row, std::int64_t column) const {
    return from_bf16(values[static_cast<std::size_t>(row * stride + column)]);
  }
  Tensor view() { return {values.data(), kBFloat16, {rows, columns}, {stride, 1}, kGpu}; }
};

struct Product {
  bool a_transposed = false, b_transposed = false;
  Matrix a, b, out{kM, kN, 0}, residual{kM, kN, 3};
  std::vector<std::uint16_t> bias = std::vector<std::uint16_t>(kN);

  explicit Product(bool ta = false, bool tb = false)
      : a_transposed(ta), b_transposed(tb), a(ta ? kK : kM, ta ? kM : kK, 1, 8), b(tb ? kK : kN, tb ? kN : kK, 2) {
    for (std::int64_t i = 0; i < kN; ++i) bias[static_cast<std::size_t>(i)] = bf16(static_cast<float>(i % 5) - 12);
  }
  Gemm arguments() {
    Gemm g;
    g.a = a.view();
    g.b = b.view();
    g.out = out.view();
    g.a_transposed = a_transposed;
    g.b_transposed = b_transposed;
    return g;
  }
  void run(const Gemm& g) {
    const GemmPlan plan(TESSERA_GEMM_DENSE, g);
    EXPECT_NE(plan.explain().find("chosen  gemm_cublaslt: tuned"), std::string::npos) << plan.explain();
    EXPECT_GE(plan.workspace(), 512U);
    gemm_dense(g);
  }
  void expect(bool with_bias, bool relu, bool with_residual) const {
    for (std::int64_t i = 0; i < kM; ++i) {
      for (std::int64_t j = 0; j < kN; ++j) {
        float sum = 0;
        for (std::int64_t k = 0; k < kK; ++k) {
          sum += (a_transposed ? a.at(k, i) : a.at(i, k)) * (b_transposed ? b.at(k, j) : b.at(j, k));
        }
        if (with_bias) sum += from_bf16(bias[static_cast<std::size_t>(j)]);
        if (relu) sum = std::max(sum, 0.0f);
        if (with_residual) sum += residual.at(i, j);
        ASSERT_EQ(out.at(i, j), sum) << i << ", " << j;
      }
    }
  }
};

engine::Tuned tuned(const char* version) {
  return {"gemm_cublaslt", {{"main", {{"algorithm", std::int64_t{0}}, {"cublaslt", std::string(version)}}}}, 1.0, 2.0};
}
struct CublasLt : testing::Test {
  CublasLt() { engine::force(tuned("13.1.2")); }
  ~CublasLt() override { engine::force(std::nullopt); }
};

// Compiles nothing.
std::string explained(const Gemm& g) {
  const detail::LoweredGemm args(g);
  std::string text(8192, '\0');
  const tessera_status status = tessera_gemm_explain(TESSERA_GEMM_DENSE, args.get(), nullptr, TESSERA_EXPLAIN_TEXT,
                                                     text.data(), text.size(), nullptr);
  EXPECT_EQ(status, TESSERA_OK) << tessera_last_error();
  return text.c_str();
}

TEST_F(CublasLt, operands_are_stored_either_way) {
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) {
      Product product(ta, tb);
      product.run(product.arguments());
      product.expect(false, false, false);
    }
  }
}

TEST_F(CublasLt, epilogues) {
  Product product;
  Gemm g = product.arguments();
  g.bias = {product.bias.data(), kBFloat16, {kN}, {}, kGpu};
  g.activation = TESSERA_ACTIVATION_RELU;
  product.run(g);
  product.expect(true, true, false);
  g.activation = TESSERA_ACTIVATION_NONE;
  g.residual = product.residual.view();
  product.run(g);
  product.expect(true, false, true);
}

TEST_F(CublasLt, a_bias_that_starts_anywhere_gets_an_algorithm_for_it) {
  Product product;
  Gemm g = product.arguments();
  std::vector<std::uint16_t> shifted(kN + 1);
  std::copy(product.bias.begin(), product.bias.end(), shifted.begin() + 1);
  g.bias = {shifted.data() + 1, kBFloat16, {kN}, {}, kGpu};
  product.run(g);
  product.expect(true, false, false);
}

TEST_F(CublasLt, what_it_does_not_compute_is_for_tesseras_own_kernels) {
  Product product;
  Gemm g = product.arguments();
  g.activation = TESSERA_ACTIVATION_SILU;
  std::string text = explained(g);
  EXPECT_NE(text.find("chosen  gemm_dense"), std::string::npos) << text;
  EXPECT_NE(text.find("refused gemm_cublaslt: has no SiLU and no exact GELU"), std::string::npos) << text;
  g.activation = TESSERA_ACTIVATION_RELU;
  g.residual = product.residual.view();
  text = explained(g);
  EXPECT_NE(text.find("adds the residual before the activation"), std::string::npos) << text;
}

TEST_F(CublasLt, its_failure_is_an_error) {
  Product product;
  setenv("FAKE_CUBLASLT_FAILS", "13", 1);
  try {
    gemm_dense(product.arguments());
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("cublasLtMatmul: cuBLAS status 13"), std::string::npos) << e.what();
  }
  unsetenv("FAKE_CUBLASLT_FAILS");
}

TEST_F(CublasLt, only_what_was_tuned_with_this_version_is_chosen) {
  Product product;
  engine::force(tuned("12.8.5"));
  std::string text = explained(product.arguments());
  EXPECT_NE(text.find("chosen  gemm_dense"), std::string::npos) << text;
  // Whatever the other kernels are predicted to take: these rows allow them no vectors.
  engine::force(std::nullopt);
  Product slow;
  Gemm g = slow.arguments();
  g.a = {slow.a.values.data(), kBFloat16, {kM, kK - 1}, {kK - 1, 1}, kGpu};
  g.b = {slow.b.values.data(), kBFloat16, {kN, kK - 1}, {kK - 1, 1}, kGpu};
  text = explained(g);
  EXPECT_NE(text.find("chosen  gemm_dense"), std::string::npos) << text;
  EXPECT_EQ(text.find("gemm_cublaslt"), std::string::npos) << text;
}

TEST_F(CublasLt, rows_that_overlap_are_an_error) {
  Product product;
  Gemm g = product.arguments();
  g.a = {product.a.values.data(), kBFloat16, {kM, kK}, {kK / 2, 1}, kGpu};
  try {
    gemm_dense(g);
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("does not take rows that overlap"), std::string::npos) << e.what();
  }
}

// Run with TESSERA_NO_CUBLASLT=1.
struct NoCublasLt : CublasLt {};
TEST_F(NoCublasLt, one_switch_removes_what_was_tuned) {
  Product product;
  const std::string text = explained(product.arguments());
  EXPECT_NE(text.find("chosen  gemm_dense"), std::string::npos) << text;
}

}  // namespace
}  // namespace tessera::test
