// The likelihood of an MLP's mixtures: every case on the CPU against the oracle, the C ABI's messages, and what is chosen.
#include "verify/loss/mlp_gmm_nll.h"

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

namespace tessera::verify::mlp_gmm_nll {
namespace {

void expect_all_pass(const char* name, int repeat) { verify::expect_all_pass(suite(name), mlp_gmm_nll_case, repeat); }

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
      const auto checked = tessera::loss::check(TESSERA_LOSS_MLP_GMM_NLL, &buffers.args(), Look::kShapes);
      ASSERT_TRUE(checked.ok()) << c.name << ": " << checked.status().message();
      EXPECT_EQ(LossFamily::difference(c.problem, checked->args.problem), "") << c.name;
      EXPECT_TRUE(c.problem == checked->args.problem) << c.name;
    }
    EXPECT_FALSE(seen.empty()) << name;
  }
}

// Losses of rounded hidden values and parameters lie around the exact ones as the oracle expects.
TEST(Oracle, knows_what_rounding_does_to_a_loss) {
  double squares = 0, most = 0;
  constexpr int kCases = 300;
  for (int seed = 1; seed <= kCases; ++seed) {
    Case c;
    LossProblem& p = c.problem;
    p.dtype = DType::kBFloat16;
    p.reduction = Reduction::kNone;
    p.rows = 1;
    p.components = 5;
    p.mlp.k = 30 + seed % 50;
    p.mlp.hidden = 20 + seed % 70;
    c.seed = static_cast<std::uint64_t>(seed);
    complete(c);
    const Inputs in = make_inputs(c);
    const double rounded = plain(p, in).out.data[0];
    const loss::Outputs exact = expected(p, in);
    ASSERT_EQ(exact.out.row_noise.size(), 1U);
    const double error = std::abs(rounded - exact.out.data[0]) / exact.out.row_noise[0];
    squares += error * error;
    most = std::max(most, error);
  }
  EXPECT_NEAR(std::sqrt(squares / kCases), 1, 0.1);
  EXPECT_LT(most, 4);
}

// Two rows, one hidden column that is twice x, and one component of logit 0, mu = hidden and log sigma 0.
struct Small {
  std::vector<float> x{1, 2}, up{2}, down{0, 1, 0}, target{2, 5}, out{-1, -1}, dparams{-1, -1, -1, -1, -1, -1};

  Loss args() {
    Loss l;
    l.x = {x.data(), kFloat32, {2, 1}};
    l.up = {up.data(), kFloat32, {1, 1}};
    l.down = {down.data(), kFloat32, {3, 1}};
    l.target = {target.data(), kFloat32, {2}};
    l.out = {out.data(), kFloat32, {1}};
    l.dparams = {dparams.data(), kFloat32, {2, 1, 3}};
    l.activation = TESSERA_ACTIVATION_NONE;
    return l;
  }
};

// Targets are 0 and 1 sigma away from their mu of 2 and 4.
TEST(Api, runs_in_one_call_and_by_a_plan) {
  Small s;
  loss_mlp_gmm_nll(s.args());
  EXPECT_NEAR(s.out[0], 0.9189385 + 0.25, 1e-6);
  EXPECT_EQ(s.dparams, (std::vector<float>{0, 0, 1, 0, -1, 0}));
  Small again;
  const LossPlan plan(TESSERA_LOSS_MLP_GMM_NLL, again.args());
  std::vector<std::byte> workspace(plan.workspace());
  plan.run(again.args(), workspace.data(), workspace.size());
  EXPECT_EQ(again.out[0], s.out[0]);
  EXPECT_NE(plan.explain().find("loss_mlp_gmm_nll"), std::string::npos) << plan.explain();
  Small other;
  Loss l = other.args();
  l.activation = TESSERA_ACTIVATION_RELU;
  EXPECT_THROW(plan.run(l, workspace.data(), workspace.size()), Error);
  EXPECT_EQ(other.out[0], -1);
}

TEST(Api, refuses_with_a_message_that_names_the_argument_and_writes_nothing) {
  const struct {
    std::function<void(Small&, Loss&)> spoil;
    const char* names;
  } bad[] = {
      {[](Small&, Loss& l) { l.x = {}; }, "x is null"},
      {[](Small&, Loss& l) { l.down = {}; }, "down is null"},
      {[](Small&, Loss& l) { l.target = {}; }, "target is null"},
      {[](Small& s, Loss& l) {
         l.params = {s.dparams.data(), kFloat32, {2, 1, 3}};
       },
       "params is given; loss_mlp_gmm_nll does not take it"},
      {[](Small& s, Loss& l) {
         l.down = {s.down.data(), kFloat32, {2, 1}};
       },
       "down has 2 rows"},
      {[](Small& s, Loss& l) {
         l.down = {s.down.data(), kFloat32, {0, 1}};
         l.dparams = {};
       },
       "down has 0 rows"},
      {[](Small& s, Loss& l) {
         l.up = {s.x.data(), kFloat32, {1, 2}};
       },
       "up has size = 2 in dim 1, but x gives 1"},
      {[](Small& s, Loss& l) {
         l.x = {s.x.data(), kFloat32, {2}};
       },
       "x has"},
      {[](Small& s, Loss& l) {
         l.target = {s.target.data(), kFloat16, {2}};
       },
       "target is fp16, but x is fp32"},
      {[](Small& s, Loss& l) {
         l.target = {s.target.data(), kFloat32, {1}};
       },
       "target has size 1 in dim 0; 2 is expected"},
      {[](Small& s, Loss& l) {
         l.dparams = {s.dparams.data(), kFloat32, {2, 3, 1}};
       },
       "dparams has size 3 in dim 1; 1 is expected"},
      {[](Small& s, Loss& l) {
         l.x = {s.x.data(), kFloat32, {0, 1}};
         l.target = {s.target.data(), kFloat32, {0}};
         l.dparams = {};
       },
       "x has no rows, which have no mean"},
      {[](Small&, Loss& l) { l.activation = static_cast<tessera_activation>(9); }, "activation is 9"},
      {[](Small&, Loss& l) { l.reduction = static_cast<tessera_reduction>(7); }, "reduction is 7"},
  };
  for (const auto& one : bad) {
    Small s;
    Loss l = s.args();
    one.spoil(s, l);
    expect_refusal(tessera_loss_run(TESSERA_LOSS_MLP_GMM_NLL, detail::LoweredLoss(l).get(), nullptr, 0, nullptr),
                   one.names, one.names);
    EXPECT_EQ(s.out, std::vector<float>(2, -1)) << one.names;
    EXPECT_EQ(s.dparams, std::vector<float>(6, -1)) << one.names;
  }
}

// Ten heads are one kernel on Hopper, which needs a sum per warp and row tile; a gradient, rows that start anywhere, more components
// and other GPUs have the MLP and the likelihood one after the other.
TEST(Choice, the_likelihood_is_an_epilogue_where_it_can_be) {
  for (const Case& c : suite("bench-gpu")) {
    const auto chosen = mlp_gmm_nll_case(c)->explain(*engine::cuda_device("sm_90a")).options.front();
    EXPECT_EQ(chosen.kernel, c.problem.gradient ? "loss_mlp_gmm_nll" : "loss_mlp_gmm_nll_sm90");
    if (!c.problem.gradient) EXPECT_LE(chosen.workspace, std::size_t{250} * 8 * sizeof(float)) << c.name;
    EXPECT_EQ(mlp_gmm_nll_case(c)->explain(*engine::cuda_device("sm_80")).options.front().kernel, "loss_mlp_gmm_nll");
    Case unaligned = c, many = c;
    unaligned.unaligned = true;
    many.problem.components = 11;
    for (Case* other : {&unaligned, &many}) {
      complete(*other);
      const auto apart = mlp_gmm_nll_case(*other)->explain(*engine::cuda_device("sm_90a")).options.front();
      EXPECT_EQ(apart.kernel, "loss_mlp_gmm_nll") << other->name;
    }
  }
}

}  // namespace
}  // namespace tessera::verify::mlp_gmm_nll
