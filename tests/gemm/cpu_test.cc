// Every GEMM case on the CPU, against the oracle; and the oracle against values done by hand.
#include <gtest/gtest.h>

#include <cmath>

#include "cpu/products.h"
#include "cpu/threads.h"
#include "tests/isa_limit.h"
#include "tests/verify/expect_all_pass.h"
#include "verify/check.h"
#include "verify/family.h"
#include "verify/gemm/cases.h"

namespace tessera::verify::gemm {
namespace {

void expect_all_pass(const char* name, int repeat) {
  verify::expect_all_pass(suite(name), gemm_case, repeat, [](const Case& c) { return c.sample > 0; });
}

TEST(Cpu, every_quick_case_passes_and_gives_the_same_bits_again) { expect_all_pass("quick", 2); }

// With bf16 operands widened to fp32, too.
TEST(Cpu, every_quick_case_passes_with_older_instructions) {
  for (const cpu::Isa isa : {cpu::Isa::kSse4, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    const cpu::IsaLimit limit(isa, cpu::Bf16Isa::kNone);
    SCOPED_TRACE(name_of(isa));
    expect_all_pass("quick", 1);
  }
}

// With one thread, a task has several blocks of columns and keeps its packed rows for all of them.
TEST(Cpu, products_of_many_columns_on_one_thread) {
  cpu::set_threads(1);
  std::vector<Case> wide = suite("full");
  std::erase_if(wide, [](const Case& c) { return c.problem.n != 2100; });
  EXPECT_EQ(wide.size(), 12u);
  verify::expect_all_pass(wide, gemm_case, 1);
  cpu::set_threads(0);
}

TEST(Cpu, every_hostile_case_passes) { expect_all_pass("hostile", 1); }
TEST(Cpu, every_full_case_passes) { expect_all_pass("full", 1); }

TEST(Oracle, a_product_done_by_hand) {
  Inputs in;
  GemmProblem& p = in.problem;
  p.m = 2, p.n = 1, p.k = 2;
  in.a = HostTensor(1, 1, 2, 2);
  in.a.data = {1, 2, 3, 4};
  in.b = HostTensor(1, 1, 1, 2);
  in.b.data = {5, -1};
  EXPECT_EQ(product(in, {0, 1}).out.data, (std::vector<double>{3, 11}));
  EXPECT_EQ(product(in, {1}).out.data, (std::vector<double>{11}));
  p.a_transposed = true;
  EXPECT_EQ(product(in, {0, 1}).out.data, (std::vector<double>{2, 6}));
  p.bias = p.residual = true;
  in.bias = HostTensor(1, 1, 1, 1);
  in.bias.data = {-4};
  in.residual = HostTensor(1, 1, 2, 1);
  in.residual.data = {10, 20};
  p.activation = kRelu;
  EXPECT_EQ(product(in, {0, 1}).out.data, (std::vector<double>{10, 22}));
}

// The derivative is the limit of differences, and the functions have their known values.
TEST(Oracle, activations_and_their_derivatives) {
  EXPECT_NEAR(activated(kSilu, 1), 1 / (1 + std::exp(-1.0)), 1e-15);
  EXPECT_NEAR(activated(kGeluErf, 1), 0.8413447460685429, 1e-12);
  EXPECT_NEAR(activated(kGeluTanh, 1), 0.8411919906082768, 1e-12);
  for (const int f : {kIdentity, kRelu, kSilu, kGeluTanh, kGeluErf}) {
    for (const double x : {-40.0, -3.1, -0.4, 0.7, 2.2, 40.0}) {
      constexpr double kStep = 1e-5;
      const double slope = (activated(f, x + kStep) - activated(f, x - kStep)) / (2 * kStep);
      EXPECT_NEAR(derivative(f, x), slope, 1e-8) << activation_name(f) << " at " << x;
    }
  }
}

}  // namespace
}  // namespace tessera::verify::gemm
