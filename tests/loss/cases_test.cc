// Every case of the loss family on the CPU, against the oracle; and the oracle against values done by hand.
#include "verify/loss/cases.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "loss/check.h"
#include "loss/family.h"
#include "tests/verify/expect_all_pass.h"
#include "verify/check.h"
#include "verify/family.h"

namespace tessera::verify::loss {
namespace {

void expect_all_pass(const char* name, int repeat) { verify::expect_all_pass(suite(name), loss_case, repeat); }

TEST(Cpu, every_quick_case_passes_and_gives_the_same_bits_again) { expect_all_pass("quick", 2); }
TEST(Cpu, every_hostile_case_passes) { expect_all_pass("hostile", 1); }
TEST(Cpu, every_full_case_passes) { expect_all_pass("full", 1); }

TEST(LossSuites, every_name_is_unique_and_every_suite_has_cases) {
  for (const std::string& name : suite_names()) {
    std::set<std::string> seen;
    for (const Case& c : suite(name)) EXPECT_TRUE(seen.insert(c.name).second) << c.name;
    EXPECT_FALSE(seen.empty()) << name;
  }
}

TEST(LossSuites, problems_are_those_of_their_tensors) {
  for (const Case& c : suite("full")) {
    const Buffers buffers(c, make_inputs(c));
    const auto checked = tessera::loss::check(TESSERA_LOSS_GMM_NLL, &buffers.args(), Look::kEverything);
    ASSERT_TRUE(checked.ok()) << c.name << ": " << checked.status().message();
    EXPECT_EQ(LossFamily::difference(c.problem, checked->args.problem), "") << c.name;
  }
}

Inputs one_row(std::vector<double> params, double target) {
  Inputs in;
  in.problem.rows = 1;
  in.problem.components = static_cast<std::int64_t>(params.size()) / 3;
  in.problem.gradient = true;
  in.params = HostTensor(1, 1, in.problem.components, 3);
  in.params.data = std::move(params);
  in.target = HostTensor(1, 1, 1, 1);
  in.target.data = {target};
  return in;
}

TEST(Oracle, likelihoods_done_by_hand) {
  constexpr double kHalfLog2Pi = 0.91893853320467274;
  EXPECT_NEAR(expected(one_row({5, 1, 0}, 3)).out.data[0], 2 + kHalfLog2Pi, 1e-12);
  EXPECT_NEAR(expected(one_row({5, 1, std::log(2.0)}, 3)).out.data[0], 0.5 + std::log(2.0) + kHalfLog2Pi, 1e-12);
  // Two equal halves.
  EXPECT_NEAR(expected(one_row({1, -1, 0, 1, 1, 0}, 0)).out.data[0], 0.5 + kHalfLog2Pi, 1e-12);
  // Weights e / (1 + e) and 1 / (1 + e).
  const double e = std::exp(1.0), near = std::exp(-0.5), far = std::exp(-2.0);
  EXPECT_NEAR(expected(one_row({1, 1, 0, 0, 2, 0}, 0)).out.data[0], -std::log((e * near + far) / (1 + e)) + kHalfLog2Pi,
              1e-12);
}

TEST(Oracle, gradients_are_limits_of_differences) {
  Inputs in = one_row({0.3, -0.7, 0.2, -0.4, 0.9, -0.5, 1.1, 0.1, 0.6}, 0.4);
  const Outputs gradients = expected(in);
  for (std::size_t i = 0; i < in.params.data.size(); ++i) {
    constexpr double kStep = 1e-5;
    const double was = in.params.data[i];
    in.params.data[i] = was + kStep;
    const double above = expected(in).out.data[0];
    in.params.data[i] = was - kStep;
    const double below = expected(in).out.data[0];
    in.params.data[i] = was;
    EXPECT_NEAR(gradients.dparams.data[i], (above - below) / (2 * kStep), 1e-9);
  }
}

// What the contract promises beyond fp32's range.
TEST(Oracle, z_beyond_its_limit_gives_the_loss_and_gradient_of_the_limit) {
  const Outputs out = expected(one_row({0, 0, -80}, 1));
  EXPECT_NEAR(out.out.data[0], 0x1p119, 0x1p60);
  EXPECT_EQ(out.dparams.data[0], 0);
  EXPECT_EQ(out.dparams.data[1], -static_cast<double>(std::numeric_limits<float>::max()));
  EXPECT_NEAR(out.dparams.data[2], -0x1p120, 0x1p60);
}

}  // namespace
}  // namespace tessera::verify::loss
