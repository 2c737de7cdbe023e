// The MLP family: every case on the CPU against the oracle, the oracle itself, the C ABI's messages, and what is chosen.
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "engine/select.h"
#include "mlp/check.h"
#include "mlp/family.h"
#include "tessera/tessera.hpp"
#include "tests/api/expect_refusal.h"
#include "tests/verify/expect_all_pass.h"
#include "verify/check.h"
#include "verify/mlp/buffers.h"

namespace tessera::verify::mlp {
namespace {

using T = MlpTensor;

void expect_all_pass(const char* name, int repeat) {
  verify::expect_all_pass(suite(name), mlp_case, repeat, [](const Case& c) { return c.problem.m > 1000; });
}

TEST(Cpu, every_quick_case_passes_and_gives_the_same_bits_again) { expect_all_pass("quick", 2); }
TEST(Cpu, every_hostile_case_passes) { expect_all_pass("hostile", 1); }
TEST(Cpu, every_full_case_passes) { expect_all_pass("full", 1); }

TEST(MlpSuites, names_are_unique_and_problems_are_those_of_their_tensors) {
  for (const std::string& name : suite_names()) {
    std::set<std::string> seen;
    for (const Case& c : suite(name)) {
      EXPECT_TRUE(seen.insert(c.name).second) << c.name;
      if (name == "bench-gpu") continue;
      const Tensors shapes = make_shapes(c);
      Buffers buffers(c, shapes);
      for (Buffer* b : buffers.buffers()) {
        b->tensor.device = {TESSERA_CUDA, 0};
        b->tensor.data = nullptr;
      }
      const auto checked = tessera::mlp::check(buffers.op(), &buffers.args(), Look::kShapes);
      ASSERT_TRUE(checked.ok()) << c.name << ": " << checked.status().message();
      EXPECT_TRUE(c.problem == checked->args.problem)
          << c.name << ": " << MlpFamily::difference(c.problem, checked->args.problem);
    }
    EXPECT_FALSE(seen.empty()) << name;
  }
}

// The gradients are limits of differences of the forward.
TEST(Oracle, gradients_are_differences) {
  for (const bool gated : {false, true}) {
    for (const Case& one : suite("quick")) {
      if (one.problem.op != MlpOp::kBackward || one.problem.has(T::kGate) != gated ||
          one.problem.dtype != DType::kFloat32) {
        continue;
      }
      Case c = one;
      MlpProblem& p = c.problem;
      p.m = 3, p.k = 4, p.hidden = 5, p.n = 2;
      p.given &= ~(bit_of(T::kBefore) | bit_of(T::kBeforeGate) | bit_of(T::kHidden));
      Tensors in = make_inputs(c);
      const Tensors got = exact(p, in, 1);
      MlpProblem forward = p;
      forward.op = MlpOp::kForward;
      forward.given |= bit_of(T::kOut);
      const auto loss = [&] {
        const Tensors out = exact(forward, in, 1);
        double sum = 0;
        const auto& dout = in[static_cast<std::size_t>(T::kDout)].data;
        for (std::size_t i = 0; i < dout.size(); ++i) sum += dout[i] * out[static_cast<std::size_t>(T::kOut)].data[i];
        return sum;
      };
      for (const auto& [input, gradient] :
           {std::pair{T::kX, T::kDx}, {T::kUp, T::kDup}, {T::kDown, T::kDdown}, {T::kGate, T::kDgate}}) {
        if (!p.has(gradient)) continue;
        std::vector<double>& values = in[static_cast<std::size_t>(input)].data;
        for (std::size_t i = 0; i < values.size(); ++i) {
          constexpr double kStep = 1e-5;
          const double was = values[i];
          values[i] = was + kStep;
          const double above = loss();
          values[i] = was - kStep;
          const double below = loss();
          values[i] = was;
          EXPECT_NEAR(got[static_cast<std::size_t>(gradient)].data[i], (above - below) / (2 * kStep), 1e-7)
              << name_of(gradient) << " " << i;
        }
      }
    }
  }
}

// x [1, 2], up [1, 2], down [1, 1]: relu(1 * 3 + 2 * 4) * 2 = 22.
struct Small {
  std::vector<float> x{1, 2}, up{3, 4}, down{2}, out{-1}, dout{1}, dx{-1, -1}, more{-1}, bias{0};

  Mlp args() {
    Mlp m;
    m.x = {x.data(), kFloat32, {1, 2}};
    m.up = {up.data(), kFloat32, {1, 2}};
    m.down = {down.data(), kFloat32, {1, 1}};
    m.out = {out.data(), kFloat32, {1, 1}};
    m.activation = TESSERA_ACTIVATION_RELU;
    return m;
  }
};

TEST(Api, runs_in_one_call_and_by_a_plan) {
  Small s;
  mlp_forward(s.args());
  EXPECT_EQ(s.out[0], 22);
  s.out[0] = -1;
  const MlpPlan plan(TESSERA_MLP_FORWARD, s.args());
  std::vector<std::byte> workspace(plan.workspace());
  plan.run(s.args(), workspace.data(), workspace.size());
  EXPECT_EQ(s.out[0], 22);
  EXPECT_NE(plan.explain().find("mlp_chained"), std::string::npos) << plan.explain();
  Mlp backward = s.args();
  backward.out = {};
  backward.dout = {s.dout.data(), kFloat32, {1, 1}};
  backward.dx = {s.dx.data(), kFloat32, {1, 2}};
  mlp_backward(backward);
  EXPECT_EQ(s.dx, (std::vector<float>{6, 8}));
}

TEST(Api, refuses_with_a_message_that_names_the_argument_and_writes_nothing) {
  const struct {
    std::function<void(Small&, Mlp&)> spoil;
    const char* names;
  } bad[] = {
      {[](Small&, Mlp& m) { m.x = {}; }, "x is null"},
      {[](Small&, Mlp& m) { m.out = {}; }, "out is null; mlp_forward needs it"},
      {[](Small& s, Mlp& m) {
         m.up = {s.up.data(), kFloat32, {2, 1}};
       },
       "up has size = 1 in dim 1, but x gives 2"},
      {[](Small& s, Mlp& m) {
         m.down = {s.down.data(), kFloat16, {1, 1}};
       },
       "down is fp16, but x is fp32"},
      {[](Small& s, Mlp& m) {
         m.dout = {s.dout.data(), kFloat32, {1, 1}};
       },
       "dout is given; only the backward takes it"},
      {[](Small& s, Mlp& m) {
         m.before = {s.more.data(), kFloat32, {1, 1}};
       },
       "before is given without hidden"},
      {[](Small& s, Mlp& m) {
         m.gate = m.up;
         m.hidden = {s.more.data(), kFloat32, {1, 1}};
       },
       "hidden is given with gate"},
      {[](Small& s, Mlp& m) {
         m.gate = m.up;
         m.up_bias = {s.bias.data(), kFloat32, {1}};
       },
       "gate_bias is null"},
      {[](Small&, Mlp& m) { m.activation = static_cast<tessera_activation>(7); }, "activation is 7"},
      {[](Small& s, Mlp& m) {
         m.before = {s.more.data(), kFloat32, {1, 1}};
         m.hidden = {reinterpret_cast<char*>(s.more.data()) + 4, kFloat32, {1, 1}};
         m.hidden_padded = true;
       },
       "hidden has rows that do not start at multiples of 16 bytes"},
  };
  for (const auto& one : bad) {
    Small s;
    Mlp m = s.args();
    one.spoil(s, m);
    const detail::LoweredMlp held(m);
    expect_refusal(tessera_mlp_run(TESSERA_MLP_FORWARD, held.get(), nullptr, 0, nullptr), one.names, one.names);
    EXPECT_EQ(s.out[0], -1) << one.names;
  }
  Small s;
  Mlp m = s.args();
  const detail::LoweredMlp held(m);
  EXPECT_EQ(tessera_mlp_run(static_cast<tessera_mlp_op>(5), held.get(), nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  m.out = {};
  m.dout = {s.dout.data(), kFloat32, {1, 1}};
  m.dx = {s.dx.data(), kFloat32, {1, 2}};
  m.dgate = {s.up.data(), kFloat32, {1, 2}};
  const detail::LoweredMlp backward(m);
  EXPECT_EQ(tessera_mlp_run(TESSERA_MLP_BACKWARD, backward.get(), nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(tessera_last_error()), "dgate is given without gate");
}

TEST(Choice, every_step_is_a_kernel_of_gemm_and_hidden_rows_are_padded) {
  Case c;
  for (const Case& one : suite("bench-gpu")) {
    if (one.problem.hidden == 1365 && one.problem.op == MlpOp::kForward && !one.problem.has(T::kBefore)) c = one;
  }
  const auto device = *engine::cuda_device("sm_90a");
  const auto chosen = mlp_case(c)->explain(device).options.front();
  EXPECT_EQ(chosen.kernel, "mlp_chained");
  EXPECT_NE(chosen.why.find("down"), std::string::npos) << chosen.why;
  EXPECT_GE(chosen.workspace, std::size_t{36096} * 1368 * 2);
  const auto kernels = mlp_case(c)->kernels_of({chosen.kernel, chosen.config}, device);
  for (const auto& kernel : kernels) EXPECT_EQ(kernel.header.rfind("gemm/", 0), 0U) << kernel.name;
  // 1365 columns at a stride of 1368: only the weight is copied.
  // Hidden rows are stored by TMA, into their padding.
  for (const auto& kernel : kernels) {
    EXPECT_EQ(kernel.name.find("strided"), std::string::npos) << kernel.name;
    if (kernel.entry == "gemm_dense_sm90") {
      EXPECT_EQ(kernel.name.find("_rows"), std::string::npos) << kernel.name;
    }
  }
}

// Few rows need the parts of K that products with pairs, and sums of two, do not have.
TEST(Choice, gated_pairs_are_epilogues_where_that_is_faster) {
  const auto device = *engine::cuda_device("sm_90a");
  const auto steps_of = [&](const Case& c) {
    const auto options = mlp_case(c)->explain(device).options;
    std::string steps;
    for (const auto& step : options.at(0).config) {
      if (step.step.find('_') == std::string::npos || step.step == "dx_of_gate") steps += step.step + " ";
    }
    return steps;
  };
  int seen = 0;
  for (const Case& one : suite("bench-gpu")) {
    if (!one.problem.has(T::kGate) || !one.problem.has(T::kBefore)) continue;
    const bool backward = one.problem.op == MlpOp::kBackward;
    EXPECT_EQ(steps_of(one), backward ? "dhidden ddown dup dgate dx " : "up down ") << one.name;
    Case few = one;
    few.problem.m = 128;
    if (!backward) few.problem.hidden = 512;
    EXPECT_EQ(steps_of(few), backward ? "dhidden ddown dup dgate dx dx_of_gate " : "up gate down ") << one.name;
    ++seen;
  }
  EXPECT_EQ(seen, 2);
}

// Heads side by side: one kernel, which needs no memory for hidden rows. What it does not compute is chained.
TEST(Choice, few_output_columns_are_one_kernel) {
  const auto device = *engine::cuda_device("sm_90a");
  const auto chosen = [&](const MlpProblem& p) {
    Case c;
    c.problem = p;
    return mlp_case(c)->explain(device).options.front();
  };
  Case heads;
  for (const Case& one : suite("bench-gpu")) {
    if (one.problem.n == 32) heads = one;
  }
  EXPECT_EQ(chosen(heads.problem).kernel, "mlp_narrow_sm90");
  EXPECT_EQ(chosen(heads.problem).workspace, 0U);
  MlpProblem p = heads.problem;
  p.n = 40;
  EXPECT_EQ(chosen(p).kernel, "mlp_chained");
  p = heads.problem;
  p.k = 520;
  EXPECT_EQ(chosen(p).kernel, "mlp_chained");
  p = heads.problem;
  p.aligned &= ~bit_of(T::kDown);
  EXPECT_EQ(chosen(p).kernel, "mlp_chained");
  for (const T t : {T::kUpBias, T::kDownBias, T::kResidual}) {
    p = heads.problem;
    p.given |= bit_of(t);
    EXPECT_EQ(chosen(p).kernel, "mlp_chained");
  }
  p = heads.problem;
  p.m = 256;  // two row tiles leave most of the GPU idle
  EXPECT_EQ(chosen(p).kernel, "mlp_chained");
}

TEST(Plans, cover_aligned_tensors_if_made_for_unaligned_ones_and_not_the_reverse) {
  MlpProblem aligned = suite("bench-gpu").front().problem, unaligned = aligned;
  unaligned.aligned &= ~bit_of(T::kX);
  EXPECT_TRUE(MlpFamily::covers(unaligned, aligned));
  EXPECT_FALSE(MlpFamily::covers(aligned, unaligned));
  EXPECT_NE(MlpFamily::difference(aligned, unaligned).find("x has rows"), std::string::npos);
}

}  // namespace
}  // namespace tessera::verify::mlp
