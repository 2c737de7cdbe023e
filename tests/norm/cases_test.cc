// Every case of the norm family on the CPU, against the oracle; and the oracle against values done by hand.
#include "verify/norm/cases.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "engine/select.h"
#include "norm/check.h"
#include "norm/family.h"
#include "tests/verify/expect_all_pass.h"
#include "verify/check.h"
#include "verify/family.h"

namespace tessera::verify::norm {
namespace {

void expect_all_pass(const char* name, int repeat) { verify::expect_all_pass(suite(name), norm_case, repeat); }

TEST(Cpu, every_quick_case_passes_and_gives_the_same_bits_again) { expect_all_pass("quick", 2); }
TEST(Cpu, every_hostile_case_passes) { expect_all_pass("hostile", 1); }
TEST(Cpu, every_full_case_passes) { expect_all_pass("full", 1); }

TEST(NormSuites, every_name_is_unique_and_every_suite_has_cases) {
  for (const std::string& name : suite_names()) {
    std::set<std::string> seen;
    for (const Case& c : suite(name)) EXPECT_TRUE(seen.insert(c.name).second) << c.name;
    EXPECT_FALSE(seen.empty()) << name;
  }
}

// A case's problem is what the contract's check makes of its tensors if they are on a GPU: explain then answers for it.
TEST(NormSuites, problems_are_those_of_their_tensors) {
  for (const char* name : {"quick", "full", "hostile"}) {
    for (const Case& c : suite(name)) {
      Buffers buffers(c, make_shapes(c));
      for (Buffer* b : buffers.buffers()) {
        b->tensor.device = {TESSERA_CUDA, 0};
        b->tensor.data = nullptr;
      }
      const auto checked = tessera::norm::check(buffers.op(), &buffers.args(), Look::kShapes);
      ASSERT_TRUE(checked.ok()) << c.name << ": " << checked.status().message();
      EXPECT_EQ(NormFamily::difference(c.problem, checked->args.problem), "") << c.name;
      EXPECT_TRUE(c.problem == checked->args.problem) << c.name;
    }
  }
}

TEST(Oracle, norms_of_a_row_done_by_hand) {
  Inputs in;
  NormProblem& p = in.problem;
  p.rows = 1, p.columns = 2;
  p.residual = p.statistics = true;
  in.x = in.residual = HostTensor(1, 1, 1, 2);
  in.x.data = {1, 3};
  in.residual.data = {2, 1};
  in.eps = 0;
  Outputs out = expected(in);
  EXPECT_EQ(out.sum.data, (std::vector<double>{3, 4}));
  EXPECT_NEAR(out.rstd.data[0], 1 / std::sqrt(12.5), 1e-15);
  EXPECT_NEAR(out.out.data[1], 4 / std::sqrt(12.5), 1e-15);
  p.centered = true;
  out = expected(in);
  EXPECT_EQ(out.mean.data[0], 3.5);
  EXPECT_NEAR(out.out.data[0], -1, 1e-15);
  EXPECT_NEAR(out.out.data[1], 1, 1e-15);
}

// The gradient is the limit of differences of sum(dout y).
TEST(Oracle, gradients_are_limits_of_differences) {
  for (const bool centered : {false, true}) {
    Case c;
    NormProblem& p = c.problem;
    p.rows = 3, p.columns = 6;
    p.op = NormOp::kBackward;
    p.weight = p.parameters = true;
    p.centered = centered;
    Inputs in = make_inputs(c);
    const auto loss = [&](const Inputs& at) {
      Inputs forward = at;
      forward.problem.op = NormOp::kForward;
      const Outputs y = expected(forward);
      double sum = 0;
      for (std::size_t i = 0; i < y.out.data.size(); ++i) sum += y.out.data[i] * at.dout.data[i];
      return sum;
    };
    const Outputs gradients = expected(in);
    const auto slope = [&](HostTensor& t, std::size_t i) {
      constexpr double kStep = 1e-5;
      const double was = t.data[i];
      t.data[i] = was + kStep;
      const double above = loss(in);
      t.data[i] = was - kStep;
      const double below = loss(in);
      t.data[i] = was;
      return (above - below) / (2 * kStep);
    };
    // rstd and mean are rounded to fp32.
    for (std::size_t i = 0; i < 18; ++i) EXPECT_NEAR(gradients.dx.data[i], slope(in.x, i), 1e-5);
    for (std::size_t i = 0; i < 6; ++i) EXPECT_NEAR(gradients.dweight.data[i], slope(in.weight, i), 1e-5);
  }
}

TEST(Oracle, rotary_turns_pairs_and_its_inverse_turns_them_back) {
  for (const bool interleaved : {false, true}) {
    Case c;
    NormProblem& p = c.problem;
    p.op = NormOp::kRotary;
    p.batch = 1, p.seq = 3, p.heads = 1, p.columns = 6, p.rotated = 4, p.rows = 3;
    p.interleaved = interleaved;
    Inputs in = make_inputs(c);
    const Outputs turned = expected(in);
    const double cosine = in.cos.at(0, 0, 2, 1), sine = in.sin.at(0, 0, 2, 1);
    const std::int64_t low = interleaved ? 2 : 1, high = 3;
    EXPECT_NEAR(turned.out.at(0, 2, 0, low), in.x.at(0, 2, 0, low) * cosine - in.x.at(0, 2, 0, high) * sine, 1e-12);
    EXPECT_NEAR(turned.out.at(0, 2, 0, high), in.x.at(0, 2, 0, high) * cosine + in.x.at(0, 2, 0, low) * sine, 1e-12);
    EXPECT_EQ(turned.out.at(0, 2, 0, 5), in.x.at(0, 2, 0, 5));
    Inputs back = in;
    back.x = turned.out;
    back.problem.inverse = true;
    const Outputs again = expected(back);
    for (std::size_t i = 0; i < again.out.data.size(); ++i) EXPECT_NEAR(again.out.data[i], in.x.data[i], 1e-6);
  }
}

TEST(Choice, every_offer_has_a_recipe_with_the_workspace_that_it_names) {
  for (const char* arch : {"sm_75", "sm_90a"}) {
    const engine::Device device = *engine::cuda_device(arch);
    for (const Case& c : suite("full")) {
      for (const auto& one : NormFamily::implementations()) {
        if ((one.ops & NormFamily::op_bit(c.problem)) == 0 || one.refuses(c.problem, device)) continue;
        for (const engine::Offer& offer : one.offers(c.problem, device)) {
          const auto recipe = one.recipe(c.problem, device, offer.config);
          ASSERT_TRUE(recipe) << one.name << " " << text_of(offer.config);
          EXPECT_EQ(recipe->workspace, offer.workspace);
        }
      }
    }
  }
}

TEST(Plans, cover_aligned_tensors_if_made_for_unaligned_ones_and_not_the_reverse) {
  NormProblem unaligned;
  const NormProblem aligned = unaligned;
  unaligned.aligned = false;
  EXPECT_TRUE(NormFamily::covers(unaligned, aligned));
  EXPECT_FALSE(NormFamily::covers(aligned, unaligned));
  EXPECT_NE(NormFamily::difference(aligned, unaligned), "");
}

}  // namespace
}  // namespace tessera::verify::norm
