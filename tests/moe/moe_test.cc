// Mixtures of experts: every case on the CPU against the oracle, the oracle itself, the C ABI's messages, and what is chosen.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "engine/select.h"
#include "moe/check.h"
#include "moe/family.h"
#include "tessera/tessera.hpp"
#include "tests/api/expect_refusal.h"
#include "tests/verify/expect_all_pass.h"
#include "verify/check.h"
#include "verify/moe/cases.h"

namespace tessera::verify::moe {
namespace {

using T = MoeTensor;

std::size_t at(T t) { return static_cast<std::size_t>(t); }

void expect_all_pass(const char* name, int repeat) {
  verify::expect_all_pass(suite(name), moe_case, repeat, [](const Case& c) { return c.problem.pairs() > 10000; });
}

TEST(Cpu, every_quick_case_passes_and_gives_the_same_bits_again) { expect_all_pass("quick", 2); }
TEST(Cpu, every_hostile_case_passes) { expect_all_pass("hostile", 1); }
TEST(Cpu, every_full_case_passes) { expect_all_pass("full", 1); }

TEST(MoeSuites, names_are_unique_and_problems_are_those_of_their_tensors) {
  for (const std::string& name : suite_names()) {
    std::set<std::string> seen;
    for (const Case& c : suite(name)) {
      EXPECT_TRUE(seen.insert(c.name).second) << c.name;
      if (name == "bench-gpu") continue;
      Buffers buffers(c, make_inputs(c, Values::kRouter));
      for (Buffer* b : buffers.buffers()) {
        b->tensor.device = {TESSERA_CUDA, 0};
        b->tensor.data = nullptr;
      }
      const auto checked = tessera::moe::check(buffers.op(), &buffers.args(), Look::kShapes);
      ASSERT_TRUE(checked.ok()) << c.name << ": " << checked.status().message();
      EXPECT_TRUE(c.problem == checked->args.problem)
          << c.name << ": " << MoeFamily::difference(c.problem, checked->args.problem);
    }
    EXPECT_FALSE(seen.empty()) << name;
  }
}

// The gradients are limits of differences of out and of the balance loss.
TEST(Oracle, gradients_are_differences) {
  for (const Case& one : suite("full")) {
    Case c = one;
    MoeProblem& p = c.problem;
    if (p.op != MoeOp::kBackward || p.dtype != DType::kFloat32 || p.m < 30 || p.m > 70 || p.top_k > 2) continue;
    if (!p.has(T::kDx) || !p.has(T::kDup) || p.activation == kRelu) continue;
    p.m = 6, p.k = 4, p.hidden = 3, p.experts = 4, p.top_k = 2;
    p.given &= ~(bit_of(T::kBefore) | bit_of(T::kBeforeGate));
    Tensors in = make_inputs(c, Values::kAll);
    MoeProblem forward = p;
    forward.op = MoeOp::kForward;
    forward.given = (p.given & (bit_of(T::kDx) - 1)) | bit_of(T::kOut);
    if (p.has(T::kDbalanceLoss)) forward.given |= bit_of(T::kBalanceLoss);
    // Weights as they are in fp64, not rounded.
    const Tensors made = exact(forward, in, 1);
    if (p.scoring != kMoeGiven) in[at(T::kWeights)] = made[at(T::kWeights)];
    const Tensors got = exact(p, in, 1);
    const auto loss = [&] {
      const Tensors out = exact(forward, in, 1);
      double sum = 0;
      const auto& dout = in[at(T::kDout)].data;
      for (std::size_t i = 0; i < dout.size(); ++i) sum += dout[i] * out[at(T::kOut)].data[i];
      if (p.has(T::kDbalanceLoss)) sum += in[at(T::kDbalanceLoss)].data[0] * out[at(T::kBalanceLoss)].data[0];
      return sum;
    };
    for (const auto& [input, gradient] : {std::pair{T::kX, T::kDx},
                                          {T::kUp, T::kDup},
                                          {T::kDown, T::kDdown},
                                          {T::kGate, T::kDgate},
                                          {T::kLogits, T::kDlogits},
                                          {T::kWeights, T::kDweights}}) {
      if (!p.has(gradient)) continue;
      std::vector<double>& values = in[at(input)].data;
      for (std::size_t i = 0; i < values.size(); ++i) {
        constexpr double kStep = 1e-5;
        const double was = values[i];
        values[i] = was + kStep;
        const double above = loss();
        values[i] = was - kStep;
        const double below = loss();
        values[i] = was;
        EXPECT_NEAR(got[at(gradient)].data[i], (above - below) / (2 * kStep), 1e-6)
            << c.name << " " << name_of(gradient) << " " << i;
      }
    }
  }
}

TEST(Oracle, the_balance_loss_of_equal_shares_is_top_k) {
  Case c = suite("quick").front();
  c.problem.m = 8, c.problem.experts = 4, c.problem.top_k = 4;
  Tensors in = make_inputs(c, Values::kAll);
  in[at(T::kLogits)].data.assign(32, 1.0);
  EXPECT_DOUBLE_EQ(routed(c.problem, in)[at(T::kBalanceLoss)].data[0], 4.0);
}

// Two tokens, two experts that add 1 and 10 times x, with logits that tie for the first token.
struct Small {
  std::vector<float> x{1, 2}, logits{0, 0, 0, 1}, up{1, 1}, down{1, 10}, out{-1, -1}, weights{-1, -1}, loss{-1};
  std::vector<float> dout{1, 1}, dx{-1, -1}, dlogits{-1, -1, -1, -1};
  std::vector<std::int32_t> experts{-7, -7}, positions{-7, -7}, offsets{-7, -7, -7};

  Moe args() {
    Moe m;
    m.x = {x.data(), kFloat32, {2, 1}};
    m.logits = {logits.data(), kFloat32, {2, 2}};
    m.up = {up.data(), kFloat32, {2, 1, 1}};
    m.down = {down.data(), kFloat32, {2, 1, 1}};
    m.out = {out.data(), kFloat32, {2, 1}};
    m.experts = {experts.data(), kInt32, {2, 1}};
    m.weights = {weights.data(), kFloat32, {2, 1}};
    m.positions = {positions.data(), kInt32, {2, 1}};
    m.offsets = {offsets.data(), kInt32, {3}};
    m.balance_loss = {loss.data(), kFloat32, {1}};
    m.activation = TESSERA_ACTIVATION_NONE;
    return m;
  }
};

TEST(Api, runs_in_one_call_and_by_a_plan) {
  Small s;
  moe_forward(s.args());
  const float second = 1 / (1 + std::exp(-1.0f));
  EXPECT_EQ(s.experts, (std::vector<std::int32_t>{0, 1}));
  EXPECT_EQ(s.offsets, (std::vector<std::int32_t>{0, 1, 2}));
  EXPECT_EQ(s.positions, (std::vector<std::int32_t>{0, 1}));
  EXPECT_FLOAT_EQ(s.out[0], 0.5f);
  EXPECT_FLOAT_EQ(s.out[1], second * 20);
  EXPECT_FLOAT_EQ(s.loss[0], 1.0f);
  s.out = {-1, -1};
  const MoePlan plan(TESSERA_MOE_FORWARD, s.args());
  std::vector<std::byte> workspace(plan.workspace());
  plan.run(s.args(), workspace.data(), workspace.size());
  EXPECT_FLOAT_EQ(s.out[1], second * 20);
  EXPECT_NE(plan.explain().find("moe_chained"), std::string::npos) << plan.explain();
  Moe backward = s.args();
  backward.out = backward.balance_loss = {};
  backward.dout = {s.dout.data(), kFloat32, {2, 1}};
  backward.dx = {s.dx.data(), kFloat32, {2, 1}};
  backward.dlogits = {s.dlogits.data(), kFloat32, {2, 2}};
  moe_backward(backward);
  EXPECT_FLOAT_EQ(s.dx[0], 0.5f);
  EXPECT_FLOAT_EQ(s.dx[1], second * 10);
  EXPECT_FLOAT_EQ(s.dlogits[3], second * (1 - second) * 20);
}

TEST(Api, skips_experts_that_there_are_not) {
  Small s;
  s.experts = {2, -1};
  s.weights = {1, 1};
  Moe m = s.args();
  m.logits = m.balance_loss = {};
  moe_forward(m);
  EXPECT_EQ(s.out, (std::vector<float>{0, 0}));
  EXPECT_EQ(s.positions, (std::vector<std::int32_t>{-1, -1}));
  EXPECT_EQ(s.offsets, (std::vector<std::int32_t>{0, 0, 0}));
}

TEST(Api, refuses_with_a_message_that_names_the_argument_and_writes_nothing) {
  const struct {
    std::function<void(Small&, Moe&)> spoil;
    const char* names;
  } bad[] = {
      {[](Small&, Moe& m) { m.x = {}; }, "x is null"},
      {[](Small&, Moe& m) { m.offsets = {}; }, "offsets is null; moe_forward needs it"},
      {[](Small& s, Moe& m) {
         m.down = {s.down.data(), kFloat32, {1, 1, 2}};
       },
       "down is [1, 1, 2]; [2, 1, 1] is accepted, since x is [2, 1], up is [2, 1, 1] and experts is [2, 1]"},
      {[](Small& s, Moe& m) {
         m.experts = {s.offsets.data(), kInt32, {1, 3}};
       },
       "experts has 3 columns, but up has 2 experts"},
      {[](Small& s, Moe& m) {
         m.experts = {s.x.data(), kFloat32, {2, 1}};
       },
       "experts"},
      {[](Small&, Moe& m) { m.logits = {}; }, "balance_loss is given without logits"},
      {[](Small& s, Moe& m) {
         m.before_gate = {s.dx.data(), kFloat32, {2, 1}};
       },
       "before_gate is given without gate"},
      {[](Small& s, Moe& m) {
         m.dx = {s.dx.data(), kFloat32, {2, 1}};
       },
       "dx is given; only the backward takes it"},
      {[](Small&, Moe& m) { m.scoring = static_cast<tessera_moe_scoring>(4); }, "scoring is 4"},
      {[](Small&, Moe& m) { m.activation = static_cast<tessera_activation>(7); }, "activation is 7"},
  };
  for (const auto& one : bad) {
    Small s;
    Moe m = s.args();
    one.spoil(s, m);
    const detail::LoweredMoe held(m);
    expect_refusal(tessera_moe_run(TESSERA_MOE_FORWARD, held.get(), nullptr, 0, nullptr), one.names, one.names);
    EXPECT_EQ(s.out, (std::vector<float>{-1, -1})) << one.names;
    EXPECT_EQ(s.offsets[0], -7) << one.names;
  }
  Small s;
  const detail::LoweredMoe held(s.args());
  EXPECT_EQ(tessera_moe_run(static_cast<tessera_moe_op>(5), held.get(), nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
}

TEST(Choice, products_are_grouped_kernels_of_gemm_and_offsets_stay_on_the_device) {
  const auto device = *engine::cuda_device("sm_90a");
  for (const Case& c : suite("bench-gpu")) {
    const auto options = moe_case(c)->explain(device).options;
    ASSERT_FALSE(options.empty()) << c.name;
    int products = 0;
    for (const auto& kernel : moe_case(c)->kernels_of({options[0].kernel, options[0].config}, device)) {
      if (kernel.header.rfind("gemm/", 0) != 0) continue;
      ++products;
      EXPECT_NE(kernel.name.find("_ragged_"), std::string::npos) << kernel.name;
      EXPECT_EQ(kernel.header, "gemm/dense_sm90.cuh") << kernel.name;
    }
    EXPECT_EQ(products, c.problem.op == MoeOp::kBackward ? 5 : 2) << c.name;
  }
}

// The elements of gated pairs are epilogues, and dx is one product, where the products can do that.
TEST(Choice, gated_pairs_have_steps_of_their_own_where_products_cannot_move_them) {
  const auto steps = [](const Case& c, const char* arch) {
    const auto device = *engine::cuda_device(arch);
    const auto options = moe_case(c)->explain(device).options;
    std::string names;
    for (const auto& step : options.at(0).config) names += step.step + " ";
    for (const auto& kernel : moe_case(c)->kernels_of({options[0].kernel, options[0].config}, device)) {
      if (kernel.header == "moe/elements.cuh" || kernel.header == "mlp/gated.cuh") names += kernel.entry + " ";
    }
    return names;
  };
  for (const Case& c : suite("bench-gpu")) {
    if (!c.problem.has(T::kBefore)) continue;
    const bool backward = c.problem.op == MoeOp::kBackward;
    Case unaligned = c;
    unaligned.problem.aligned &= ~(bit_of(T::kBefore) | bit_of(T::kBeforeGate));
    EXPECT_EQ(steps(c, "sm_90a"), backward ? "dhidden ddown dup dgate dx " : "up down ") << c.name;
    const char* apart = backward ? "dhidden ddown dup dgate dx dx_of_gate moe_elements " : "up gate down mlp_gated ";
    EXPECT_EQ(steps(c, "sm_80"), apart) << c.name;
    EXPECT_EQ(steps(unaligned, "sm_90a"), backward ? "dhidden ddown dup dgate dx moe_elements " : apart) << c.name;
  }
}

TEST(Choice, too_many_experts_for_a_gpu_are_refused_with_the_limit) {
  Case c = suite("bench-gpu").front();
  c.problem.experts = 513;
  const auto refusals = moe_case(c)->explain(*engine::cuda_device("sm_90a")).refusals;
  ASSERT_EQ(refusals.size(), 1U);
  EXPECT_NE(refusals[0].reason.find("512 experts"), std::string::npos) << refusals[0].reason;
  EXPECT_FALSE(moe_case(c)->explain(engine::cpu_device(1)).options.empty());
}

TEST(Plans, cover_aligned_tensors_if_made_for_unaligned_ones_and_not_the_reverse) {
  MoeProblem aligned = suite("bench-gpu").front().problem, unaligned = aligned;
  unaligned.aligned &= ~bit_of(T::kX);
  EXPECT_TRUE(MoeFamily::covers(unaligned, aligned));
  EXPECT_FALSE(MoeFamily::covers(aligned, unaligned));
  EXPECT_NE(MoeFamily::difference(aligned, unaligned).find("x has rows"), std::string::npos);
}

}  // namespace
}  // namespace tessera::verify::moe
