// The C ABI of norms: results through every entry, and messages for what is not accepted.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tessera/tessera.hpp"
#include "tests/api/expect_refusal.h"

namespace tessera::norm {
namespace {

// Two rows of two, in fp32: h = (3, 4) and (0, 2).
struct Small {
  std::vector<float> x{1, 3, 0, 1}, residual{2, 1, 0, 1}, weight{1, 10}, bias{5, 6};
  std::vector<float> out = std::vector<float>(4, -1), sum = out, rstd{-1, -1}, mean{-1, -1};

  Norm args() {
    Norm n;
    n.x = {x.data(), kFloat32, {2, 2}};
    n.out = {out.data(), kFloat32, {2, 2}};
    n.weight = {weight.data(), kFloat32, {2}};
    n.residual = {residual.data(), kFloat32, {2, 2}};
    n.sum = {sum.data(), kFloat32, {2, 2}};
    n.rstd = {rstd.data(), kFloat32, {2}};
    n.eps = 0;
    return n;
  }
  void expect_rms() const {
    EXPECT_EQ(sum, (std::vector<float>{3, 4, 0, 2}));
    EXPECT_FLOAT_EQ(rstd[0], 1 / std::sqrt(12.5f));
    EXPECT_FLOAT_EQ(out[0], 3 / std::sqrt(12.5f));
    EXPECT_FLOAT_EQ(out[1], 40 / std::sqrt(12.5f));
    EXPECT_FLOAT_EQ(out[3], 20 / std::sqrt(2.0f));
  }
};

TEST(Api, runs_in_one_call_and_by_a_plan) {
  Small s;
  norm_forward(s.args());
  s.expect_rms();
  Small again;
  const NormPlan plan(TESSERA_NORM_FORWARD, again.args());
  std::vector<std::byte> workspace(plan.workspace());
  plan.run(again.args(), workspace.data(), workspace.size());
  again.expect_rms();
  EXPECT_NE(plan.explain().find("cpu_norm"), std::string::npos) << plan.explain();
  std::size_t bytes = 0;
  ASSERT_EQ(tessera_norm_workspace(TESSERA_NORM_FORWARD, detail::LoweredNorm(s.args()).get(), &bytes), TESSERA_OK);
  EXPECT_EQ(bytes, plan.workspace());
}

TEST(Api, layer_norm_subtracts_the_mean_and_adds_the_bias) {
  Small s;
  Norm n = s.args();
  n.centered = true;
  n.bias = {s.bias.data(), kFloat32, {2}};
  n.mean = {s.mean.data(), kFloat32, {2}};
  norm_forward(n);
  EXPECT_EQ(s.mean, (std::vector<float>{3.5f, 1}));
  EXPECT_EQ(s.out, (std::vector<float>{4, 16, 4, 16}));
}

TEST(Api, a_position_outside_of_the_tables_gives_nan) {
  std::vector<float> x{1, 2, 3, 4, 5, 6}, out(6, -1), cos{1, 0}, sin{0, 1};
  std::vector<std::int32_t> positions{1, 2, -1};
  Norm n;
  n.x = {x.data(), kFloat32, {1, 3, 1, 2}};
  n.out = {out.data(), kFloat32, {1, 3, 1, 2}};
  n.cos = {cos.data(), kFloat32, {2, 1}};
  n.sin = {sin.data(), kFloat32, {2, 1}};
  n.positions = {positions.data(), kInt32, {3}};
  norm_rotary(n);
  EXPECT_EQ(out[0], -2);
  EXPECT_EQ(out[1], 1);
  for (std::size_t i = 2; i < 6; ++i) EXPECT_TRUE(std::isnan(out[i])) << i;
}

TEST(Api, a_plan_of_another_family_or_op_is_refused) {
  Small s;
  tessera_plan* plan = nullptr;
  ASSERT_EQ(tessera_norm_plan_create(TESSERA_NORM_FORWARD, detail::LoweredNorm(s.args()).get(), &plan), TESSERA_OK);
  const tessera_gemm gemm = TESSERA_GEMM_INIT;
  EXPECT_EQ(tessera_gemm_plan_run(plan, &gemm, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), "plan is of norm, not of gemm");
  Norm other = s.args();
  other.residual = other.sum = {};
  EXPECT_EQ(tessera_norm_plan_run(plan, detail::LoweredNorm(other).get(), nullptr, 0, nullptr),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tessera_last_error()).find("residual given is false, not true"), std::string::npos);
  tessera_plan_destroy(plan);
}

struct BadInput {
  const char* promise;
  std::function<void(Small&, Norm&)> spoil;
  const char* names;
};

TEST(Api, refuses_with_a_message_that_names_the_argument_and_writes_nothing) {
  const BadInput bad[] = {
      {"no x", [](Small&, Norm& n) { n.x = {}; }, "x is null"},
      {"rank",
       [](Small& s, Norm& n) {
         n.x = {s.x.data(), kFloat32, {1, 2, 2}};
       },
       "x has 3 dims"},
      {"width",
       [](Small& s, Norm& n) {
         n.weight = {s.weight.data(), kFloat32, {1}};
       },
       "weight has size 1 in dim 0, but x gives 2"},
      {"rows",
       [](Small& s, Norm& n) {
         n.residual = {s.residual.data(), kFloat32, {1, 2}};
       },
       "residual has size 1 in dim 0"},
      {"types",
       [](Small& s, Norm& n) {
         n.weight = {s.weight.data(), kFloat16, {2}};
       },
       "weight is fp16, but x is fp32"},
      {"type of rstd",
       [](Small& s, Norm& n) {
         n.rstd = {s.rstd.data(), kFloat16, {2}};
       },
       "rstd is fp16"},
      {"sum alone", [](Small&, Norm& n) { n.residual = {}; }, "residual is null, but sum is given"},
      {"bias of RMSNorm",
       [](Small& s, Norm& n) {
         n.bias = {s.bias.data(), kFloat32, {2}};
       },
       "bias is given; RMSNorm has none"},
      {"rstd without mean", [](Small&, Norm& n) { n.centered = true; }, "mean is null, but rstd is given"},
      {"dx", [](Small&, Norm& n) { n.dx = n.x; }, "dx is given; norm_forward does not take it"},
      {"eps", [](Small&, Norm& n) { n.eps = -1; }, "eps is -1"},
      {"eps that is NaN", [](Small&, Norm& n) { n.eps = std::nanf(""); }, "eps is nan"},
      {"a flag of rotary", [](Small&, Norm& n) { n.interleaved = true; }, "flags has bits 0x2"},
      {"columns apart",
       [](Small& s, Norm& n) {
         n.x = {s.x.data(), kFloat32, {1, 2}, {4, 2}};
       },
       "last dim"},
      {"rows of nothing",
       [](Small& s, Norm& n) {
         n = Norm{};
         n.x = {s.x.data(), kFloat32, {2, 0}};
         n.out = {s.out.data(), kFloat32, {2, 0}};
       },
       "0 elements"},
  };
  for (const BadInput& one : bad) {
    Small s;
    Norm n = s.args();
    one.spoil(s, n);
    expect_refusal(tessera_norm_run(TESSERA_NORM_FORWARD, detail::LoweredNorm(n).get(), nullptr, 0, nullptr), one.names,
                   one.promise);
    EXPECT_EQ(s.out, std::vector<float>(4, -1)) << one.promise;
    EXPECT_EQ(s.sum, std::vector<float>(4, -1)) << one.promise;
  }
}

TEST(Api, rotary_refuses_tables_that_do_not_fit) {
  std::vector<float> x(12), out(12, -1), table(12);
  std::vector<std::int32_t> positions(3);
  const std::function<void(Norm&)> spoils[] = {
      [&](Norm& n) {
        n.cos = n.sin = {table.data(), kFloat32, {2, 1}};
      },
      [&](Norm& n) {
        n.cos = n.sin = {table.data(), kFloat32, {3, 3}};
      },
      [&](Norm& n) {
        n.sin = {table.data(), kFloat32, {4, 1}};
      },
      [&](Norm& n) {
        n.positions = {positions.data(), kInt32, {2}};
      },
      [&](Norm& n) { n.centered = true; },
      [&](Norm& n) {
        n.weight = {table.data(), kFloat32, {4}};
      },
  };
  const char* names[] = {"cos has 2 rows, but x has 3 tokens", "cos has 3 columns",       "sin has size 4 in dim 0",
                         "positions has size 2 in dim 0",      "flags has bits 0x1 that", "weight is given"};
  for (std::size_t i = 0; i < std::size(names); ++i) {
    Norm n;
    n.x = {x.data(), kFloat32, {1, 3, 1, 4}};
    n.out = {out.data(), kFloat32, {1, 3, 1, 4}};
    n.cos = n.sin = {table.data(), kFloat32, {3, 1}};
    spoils[i](n);
    EXPECT_EQ(tessera_norm_run(TESSERA_NORM_ROTARY, detail::LoweredNorm(n).get(), nullptr, 0, nullptr),
              TESSERA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tessera_last_error()).find(names[i]), std::string::npos) << tessera_last_error();
    EXPECT_EQ(out, std::vector<float>(12, -1));
  }
}

TEST(Api, refuses_unknown_ops_and_sizes_of_the_struct) {
  Small s;
  Norm n = s.args();
  const detail::LoweredNorm held(n);
  tessera_norm args = *held.get();
  EXPECT_EQ(tessera_norm_run(static_cast<tessera_norm_op>(3), &args, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  args.struct_size = 8;
  EXPECT_EQ(tessera_norm_run(TESSERA_NORM_FORWARD, &args, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
}

TEST(Api, explain_needs_no_data_and_no_gpu) {
  Norm n;
  n.x = {nullptr, kBFloat16, {4096, 1365}, {}, {TESSERA_CUDA, 0}};
  n.out = {nullptr, kBFloat16, {4096, 1365}, {}, {TESSERA_CUDA, 0}};
  std::array<char, 8192> text{};
  ASSERT_EQ(tessera_norm_explain(TESSERA_NORM_FORWARD, detail::LoweredNorm(n).get(), "sm_90a", TESSERA_EXPLAIN_TEXT,
                                 text.data(), text.size(), nullptr),
            TESSERA_OK)
      << tessera_last_error();
  EXPECT_NE(std::string(text.data()).find("rows are not aligned to 16 bytes"), std::string::npos) << text.data();
}

}  // namespace
}  // namespace tessera::norm
