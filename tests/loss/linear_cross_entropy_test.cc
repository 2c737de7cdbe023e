// Linear cross-entropy: every case on the CPU against the oracle, the oracle itself, the C ABI's messages, and what is chosen.
#include "verify/loss/linear_cross_entropy.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>

#include "loss/check.h"
#include "loss/family.h"
#include "tessera/tessera.hpp"
#include "tests/api/expect_refusal.h"
#include "tests/verify/expect_all_pass.h"
#include "verify/check.h"

namespace tessera::verify::linear_cross_entropy {
namespace {

void expect_all_pass(const char* name, int repeat) {
  verify::expect_all_pass(suite(name), linear_cross_entropy_case, repeat);
}

TEST(Cpu, every_quick_case_passes_and_gives_the_same_bits_again) { expect_all_pass("quick", 2); }
TEST(Cpu, every_hostile_case_passes) { expect_all_pass("hostile", 1); }
TEST(Cpu, every_full_case_passes) { expect_all_pass("full", 1); }

TEST(Suites, names_are_unique_and_problems_are_those_of_their_tensors) {
  for (const char* name : {"quick", "full", "hostile", "sanitize"}) {
    std::set<std::string> seen;
    for (const Case& c : suite(name)) {
      EXPECT_TRUE(seen.insert(c.name).second) << c.name;
      Buffers buffers(c, make_inputs(c));
      for (Buffer* b : buffers.buffers()) {
        b->tensor.device = {TESSERA_CUDA, 0};
        b->tensor.data = nullptr;
      }
      const auto checked = tessera::loss::check(TESSERA_LOSS_LINEAR_CROSS_ENTROPY, &buffers.args(), Look::kShapes);
      ASSERT_TRUE(checked.ok()) << c.name << ": " << checked.status().message();
      EXPECT_EQ(LossFamily::difference(c.problem, checked->args.problem), "") << c.name;
      EXPECT_TRUE(c.problem == checked->args.problem) << c.name;
    }
    EXPECT_FALSE(seen.empty()) << name;
  }
}

// Two rows of two classes. Logits (1, 2) and (3, 0).
TEST(Oracle, losses_done_by_hand) {
  LossProblem p;
  p.op = LossOp::kLinearCrossEntropy;
  p.rows = 2, p.width = 1, p.classes = 2;
  Inputs in;
  in.hidden = HostTensor(1, 1, 2, 1);
  in.hidden.data = {1, 1};
  in.weight = HostTensor(1, 1, 2, 1);
  in.weight.data = {1, 2};
  in.target = {1, 0};
  const double one = std::log(1 + std::exp(-1.0)), other = std::log(1 + std::exp(1.0));
  EXPECT_NEAR(expected(p, in).out.data[0], (one + other) / 2, 1e-12);
  in.target = {1, -100};
  EXPECT_NEAR(expected(p, in).out.data[0], one, 1e-12);
  p.reduction = Reduction::kNone;
  EXPECT_EQ(expected(p, in).out.data[1], 0);
}

TEST(Oracle, gradients_are_limits_of_differences) {
  Case c;
  LossProblem& p = c.problem;
  p.op = LossOp::kLinearCrossEntropy;
  p.rows = 6, p.width = 3, p.classes = 5;
  p.reduction = Reduction::kNone;
  p.dhidden = p.dweight = p.weighted = true;
  Inputs in = make_inputs(c);
  const Outputs got = expected(p, in);
  const auto loss = [&] {
    const Outputs out = expected(p, in);
    double sum = 0;
    for (std::size_t i = 0; i < out.out.data.size(); ++i) sum += out.out.data[i] * in.dout.data[i];
    return sum;
  };
  for (const auto& [values, gradient] :
       {std::pair{&in.hidden.data, &got.dhidden.data}, std::pair{&in.weight.data, &got.dweight.data}}) {
    for (std::size_t i = 0; i < values->size(); ++i) {
      constexpr double kStep = 1e-5;
      const double was = (*values)[i];
      (*values)[i] = was + kStep;
      const double above = loss();
      (*values)[i] = was - kStep;
      const double below = loss();
      (*values)[i] = was;
      EXPECT_NEAR((*gradient)[i], (above - below) / (2 * kStep), 1e-8);
    }
  }
}

// hidden [2, 1], weight [2, 1]: logits (1, 2) twice; the second row is ignored.
struct Small {
  std::vector<float> hidden{1, 1}, weight{1, 2}, out{-1, -1}, dhidden{-1, -1}, dweight{-1, -1}, dout{1, 1};
  std::vector<std::int32_t> target{1, -100};

  Loss args() {
    Loss l;
    l.hidden = {hidden.data(), kFloat32, {2, 1}};
    l.weight = {weight.data(), kFloat32, {2, 1}};
    l.target = {target.data(), kInt32, {2}};
    l.out = {out.data(), kFloat32, {1}};
    l.dhidden = {dhidden.data(), kFloat32, {2, 1}};
    l.dweight = {dweight.data(), kFloat32, {2, 1}};
    return l;
  }
};

TEST(Api, runs_in_one_call_and_by_a_plan) {
  const float softmax = 1 / (1 + std::exp(1.0f));  // of the first class
  Small s;
  loss_linear_cross_entropy(s.args());
  EXPECT_FLOAT_EQ(s.out[0], std::log(1 + std::exp(-1.0f)));
  EXPECT_NEAR(s.dhidden[0], softmax - 2 * softmax, 1e-6);
  EXPECT_EQ(s.dhidden[1], 0);
  EXPECT_NEAR(s.dweight[0], softmax, 1e-6);
  EXPECT_NEAR(s.dweight[1], -softmax, 1e-6);
  Small again;
  const LossPlan plan(TESSERA_LOSS_LINEAR_CROSS_ENTROPY, again.args());
  std::vector<std::byte> workspace(plan.workspace());
  plan.run(again.args(), workspace.data(), workspace.size());
  EXPECT_EQ(again.out[0], s.out[0]);
  EXPECT_NE(plan.explain().find("loss_linear_cross_entropy"), std::string::npos) << plan.explain();
}

TEST(Api, refuses_with_a_message_that_names_the_argument_and_writes_nothing) {
  const struct {
    std::function<void(Small&, Loss&)> spoil;
    const char* names;
  } bad[] = {
      {[](Small&, Loss& l) { l.hidden = {}; }, "hidden is null"},
      {[](Small&, Loss& l) { l.target = {}; }, "target is null"},
      {[](Small& s, Loss& l) {
         l.params = {s.hidden.data(), kFloat32, {2, 1, 1}};
       },
       "params is given; loss_linear_cross_entropy does not take it"},
      {[](Small& s, Loss& l) {
         l.weight = {s.weight.data(), kFloat32, {1, 2}};
       },
       "weight has size 2 in dim 1; 1 is expected"},
      {[](Small& s, Loss& l) {
         l.weight = {s.weight.data(), kFloat32, {0, 1}};
         l.dweight = {};
       },
       "weight has no rows"},
      {[](Small& s, Loss& l) {
         l.weight = {s.weight.data(), kFloat16, {2, 1}};
       },
       "weight is fp16, but hidden is fp32"},
      {[](Small& s, Loss& l) {
         l.target = {s.target.data(), kInt32, {1}};
       },
       "target has size 1 in dim 0; 2 is expected"},
      {[](Small& s, Loss& l) {
         l.target = {s.dout.data(), kFloat32, {2}};
       },
       "target is fp32"},
      {[](Small& s, Loss& l) {
         l.dout = {s.dout.data(), kFloat32, {1}};
       },
       "dout has size 1 in dim 0; 2 is expected"},
      {[](Small& s, Loss& l) {
         l.out = {s.out.data(), kFloat32, {2}};
       },
       "out has size 2 in dim 0; 1 is expected"},
      {[](Small& s, Loss& l) {
         l.dweight = {s.dweight.data(), kFloat32, {1, 1}};
       },
       "dweight has size 1 in dim 0; 2 is expected"},
      {[](Small&, Loss& l) { l.reduction = static_cast<tessera_reduction>(7); }, "reduction is 7"},
  };
  for (const auto& one : bad) {
    Small s;
    Loss l = s.args();
    one.spoil(s, l);
    expect_refusal(
        tessera_loss_run(TESSERA_LOSS_LINEAR_CROSS_ENTROPY, detail::LoweredLoss(l).get(), nullptr, 0, nullptr),
        one.names, one.names);
    EXPECT_EQ(s.out, std::vector<float>(2, -1)) << one.names;
    EXPECT_EQ(s.dhidden, std::vector<float>(2, -1)) << one.names;
  }
  Small s;
  Loss gmm = s.args();
  EXPECT_EQ(tessera_loss_run(TESSERA_LOSS_GMM_NLL, detail::LoweredLoss(gmm).get(), nullptr, 0, nullptr),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), "hidden is given; loss_gmm_nll does not take it");
}

// 8192 rows of 131,072 logits are 2 GiB, and PyTorch needs three matrices of that size.
TEST(Choice, the_workspace_is_below_a_tenth_of_the_unfused_one) {
  for (const Case& c : suite("bench-gpu")) {
    const auto chosen = linear_cross_entropy_case(c)->explain(*engine::cuda_device("sm_90a")).options.front();
    EXPECT_EQ(chosen.kernel, "loss_linear_cross_entropy");
    EXPECT_LE(chosen.workspace, (std::size_t{3} << 31) / 10) << c.name;
  }
}

}  // namespace
}  // namespace tessera::verify::linear_cross_entropy
