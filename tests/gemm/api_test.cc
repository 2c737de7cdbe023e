// The C ABI of gemm: results through every entry, and messages for what is not accepted.
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "tessera/tessera.hpp"
#include "tests/api/expect_refusal.h"

namespace tessera::gemm {
namespace {

// A 2 x 3 product with K = 4, in fp32: out = A B^T.
struct Small {
  std::vector<float> a{1, 2, 3, 4, 5, 6, 7, 8}, b{1, 0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1}, out = std::vector<float>(6, -1);
  std::vector<float> bias{10, 20, 30}, more = std::vector<float>(6, 100);

  Gemm args() {
    Gemm g;
    g.a = {a.data(), kFloat32, {2, 4}};
    g.b = {b.data(), kFloat32, {3, 4}};
    g.out = {out.data(), kFloat32, {2, 3}};
    return g;
  }
};
const std::vector<float> kExpected{1, 2, 10, 5, 6, 26};

TEST(Api, runs_in_one_call_and_by_a_plan) {
  Small s;
  gemm_dense(s.args());
  EXPECT_EQ(s.out, kExpected);
  s.out.assign(6, -1);
  const GemmPlan plan(TESSERA_GEMM_DENSE, s.args());
  std::vector<std::byte> workspace(plan.workspace());
  plan.run(s.args(), workspace.data(), workspace.size());
  EXPECT_EQ(s.out, kExpected);
  EXPECT_NE(plan.explain().find("cpu_gemm"), std::string::npos) << plan.explain();
}

TEST(Api, accumulates_if_the_residual_is_the_result_itself) {
  Small s;
  s.out.assign(6, 1000);
  Gemm g = s.args();
  g.residual = g.out;
  gemm_dense(g);
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(s.out[i], kExpected[i] + 1000);
}

TEST(Api, workspace_says_what_a_plan_needs) {
  Small s;
  std::size_t bytes = 0;
  Gemm args = s.args();
  const detail::LoweredGemm held(args);
  ASSERT_EQ(tessera_gemm_workspace(TESSERA_GEMM_DENSE, held.get(), &bytes), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(bytes, GemmPlan(TESSERA_GEMM_DENSE, args).workspace());
}

TEST(Api, a_plan_of_another_family_is_refused) {
  Small s;
  Gemm args = s.args();
  const detail::LoweredGemm held(args);
  tessera_plan* plan = nullptr;
  ASSERT_EQ(tessera_gemm_plan_create(TESSERA_GEMM_DENSE, held.get(), &plan), TESSERA_OK);
  const tessera_attention attention = TESSERA_ATTENTION_INIT;
  EXPECT_EQ(tessera_attention_plan_run(plan, &attention, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), "plan is of gemm, not of attention");
  tessera_plan_destroy(plan);
}

struct BadInput {
  const char* promise;
  std::function<void(Small&, Gemm&)> spoil;
  const char* names;
};

TEST(Api, refuses_with_a_message_that_names_the_argument_and_writes_nothing) {
  const BadInput bad[] = {
      {"no a", [](Small&, Gemm& g) { g.a = {}; }, "a is null"},
      {"rank",
       [](Small& s, Gemm& g) {
         g.a = {s.a.data(), kFloat32, {1, 2, 4}};
       },
       "a has 3 dims"},
      {"K",
       [](Small& s, Gemm& g) {
         g.b = {s.b.data(), kFloat32, {4, 3}};
       },
       "b has size = 3 in dim 1, but a gives 4"},
      {"N of bias",
       [](Small& s, Gemm& g) {
         g.bias = {s.bias.data(), kFloat32, {2}};
       },
       "bias has length = 2"},
      {"M of out",
       [](Small& s, Gemm& g) {
         g.out = {s.out.data(), kFloat32, {1, 3}};
       },
       "out has size = 1"},
      {"rows of out at no multiples of 16 bytes", [](Small&, Gemm& g) { g.out_padded = true; },
       "out has rows that do not start at multiples of 16 bytes; TESSERA_GEMM_OUT_PADDED needs them to"},
      {"types",
       [](Small& s, Gemm& g) {
         g.b = {s.b.data(), kFloat16, {3, 4}};
       },
       "b is fp16, but a is fp32"},
      {"type of out",
       [](Small& s, Gemm& g) {
         g.out = {s.out.data(), kFloat16, {2, 3}};
       },
       "out is fp16"},
      {"gate and saved",
       [](Small& s, Gemm& g) {
         g.gate = g.b;
         g.saved = {s.more.data(), kFloat32, {2, 3}};
       },
       "saved is given with gate"},
      {"preactivation of a gated product",
       [](Small& s, Gemm& g) {
         g.gate = g.b;
         g.preactivation = {s.more.data(), kFloat32, {2, 3}};
       },
       "preactivation is given with gate"},
      {"gate_bias alone",
       [](Small& s, Gemm& g) {
         g.gate_bias = {s.bias.data(), kFloat32, {3}};
       },
       "gate_bias is given"},
      {"bias without gate_bias",
       [](Small& s, Gemm& g) {
         g.gate = g.b;
         g.bias = {s.bias.data(), kFloat32, {3}};
       },
       "gate_bias is null"},
      {"activation", [](Small&, Gemm& g) { g.activation = static_cast<tessera_activation>(9); }, "activation is 9"},
      {"columns apart",
       [](Small& s, Gemm& g) {
         g.a = {s.a.data(), kFloat32, {2, 2}, {4, 2}};
       },
       "last dim"},
      {"result on top of itself",
       [](Small& s, Gemm& g) {
         g.out = {s.out.data(), kFloat32, {2, 3}, {1, 1}};
       },
       "one address"},
  };
  for (const BadInput& one : bad) {
    Small s;
    Gemm g = s.args();
    one.spoil(s, g);
    const detail::LoweredGemm held(g);
    expect_refusal(tessera_gemm_run(TESSERA_GEMM_DENSE, held.get(), nullptr, 0, nullptr), one.names, one.promise);
    EXPECT_EQ(s.out, std::vector<float>(6, -1)) << one.promise;
  }
}

// Rows 0 and 1 of a, then row 2, in two groups; the third is empty.
struct Groups {
  std::vector<float> a{1, 2, 3, 4, 5, 6, 7, 8}, b{1, 0, 0, 1, 1, 1, 1, -1, 9, 9, 9, 9}, out = std::vector<float>(8, -1);
  std::vector<float> sums = std::vector<float>(12, -1);
  std::vector<std::int32_t> offsets{0, 2, 3, 3};

  Gemm args() {
    Gemm g;
    g.a = {a.data(), kFloat32, {4, 2}};
    g.b = {b.data(), kFloat32, {3, 2, 2}};
    g.out = {out.data(), kFloat32, {4, 2}};
    g.offsets = {offsets.data(), kInt32, {4}};
    return g;
  }
};

TEST(Api, groups_of_rows_and_rows_of_no_group) {
  Groups s;
  gemm_grouped(s.args());
  EXPECT_EQ(s.out, (std::vector<float>{1, 2, 3, 4, 11, -1, -1, -1}));
  s.out.assign(8, -1);
  const GemmPlan plan(TESSERA_GEMM_GROUPED, s.args());
  std::vector<std::byte> workspace(plan.workspace());
  plan.run(s.args(), workspace.data(), workspace.size());
  EXPECT_EQ(s.out, (std::vector<float>{1, 2, 3, 4, 11, -1, -1, -1}));
}

TEST(Api, groups_of_terms) {
  Groups s;
  Gemm g = s.args();
  g.b = g.a;
  g.a_transposed = g.b_transposed = true;
  g.out = {s.sums.data(), kFloat32, {3, 2, 2}};
  gemm_grouped(g);
  EXPECT_EQ(s.sums, (std::vector<float>{10, 14, 14, 20, 25, 30, 30, 36, 0, 0, 0, 0}));
}

TEST(Api, groups_may_end_in_more_rows_than_offsets_can_name) {
  Groups s;
  Gemm g = s.args();
  g.a = g.b = {s.a.data(), kFloat32, {std::int64_t{1} << 31, 2}, {0, 1}};  // rows that are all 1, 2
  g.a_transposed = g.b_transposed = true;
  g.out = {s.sums.data(), kFloat32, {3, 2, 2}};
  gemm_grouped(g);
  EXPECT_EQ(s.sums, (std::vector<float>{2, 4, 4, 8, 1, 2, 2, 4, 0, 0, 0, 0}));
}

TEST(Api, groups_that_share_their_rows) {
  Groups s;
  Gemm g = s.args();
  g.offsets = {};
  g.a = {s.a.data(), kFloat32, {1, 2}};
  g.out = {s.sums.data(), kFloat32, {3, 1, 2}};
  gemm_grouped(g);
  EXPECT_EQ(std::vector<float>(s.sums.begin(), s.sums.begin() + 6), (std::vector<float>{1, 2, 3, -1, 27, 27}));
}

TEST(Api, refuses_groups_that_are_not_what_the_contract_says) {
  const struct {
    std::function<void(Groups&, Gemm&)> spoil;
    const char* names;
  } bad[] = {
      {[](Groups& s, Gemm&) { s.offsets[1] = 4; }, "offsets[2] is 3; 4 to 4 is accepted"},
      {[](Groups& s, Gemm&) { s.offsets[0] = 1; }, "offsets[0] is 1"},
      {[](Groups& s, Gemm&) { s.offsets[3] = 5; }, "offsets[3] is 5; 3 to 4 is accepted"},
      {[](Groups& s, Gemm& g) {
         g.offsets = {s.offsets.data(), kInt32, {3}};
       },
       "offsets has length 3, but b has 3 groups"},
      {[](Groups& s, Gemm& g) {
         g.offsets = {s.a.data(), kFloat32, {4}};
       },
       "offsets"},
      {[](Groups&, Gemm& g) { g.a_transposed = true; }, "offsets divide the rows of a"},
      {[](Groups& s, Gemm& g) {
         g.b = {s.b.data(), kFloat32, {2, 2}};
       },
       "offsets divide K"},
      {[](Groups& s, Gemm& g) {
         g.out = {s.out.data(), kFloat32, {1, 4, 2}};
       },
       "out has 3 dims; 2 are accepted if offsets divide the rows of a"},
      {[](Groups& s, Gemm& g) {
         g.bias = {s.a.data(), kFloat32, {2, 2}};
       },
       "bias has size = 2 in dim 0, but there are 3 groups"},
  };
  for (const auto& one : bad) {
    Groups s;
    Gemm g = s.args();
    one.spoil(s, g);
    const detail::LoweredGemm held(g);
    EXPECT_EQ(tessera_gemm_run(TESSERA_GEMM_GROUPED, held.get(), nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT)
        << one.names;
    EXPECT_NE(std::string(tessera_last_error()).find(one.names), std::string::npos) << tessera_last_error();
    EXPECT_EQ(s.out, std::vector<float>(8, -1)) << one.names;
  }
  Groups s;
  const Gemm g = s.args();
  const detail::LoweredGemm held(g);
  EXPECT_EQ(tessera_gemm_run(TESSERA_GEMM_DENSE, held.get(), nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
}

TEST(Api, refuses_unknown_ops_flags_and_sizes_of_the_struct) {
  Small s;
  Gemm g = s.args();
  const detail::LoweredGemm held(g);
  tessera_gemm args = *held.get();
  EXPECT_EQ(tessera_gemm_run(static_cast<tessera_gemm_op>(3), &args, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  args.flags = 1u << 9;
  EXPECT_EQ(tessera_gemm_run(TESSERA_GEMM_DENSE, &args, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tessera_last_error()).find("unknown bits 0x200"), std::string::npos);
  args.flags = 0;
  args.struct_size = 8;
  EXPECT_EQ(tessera_gemm_run(TESSERA_GEMM_DENSE, &args, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  // A struct that ends before the optional fields has none of them.
  args.struct_size = offsetof(tessera_gemm, bias);
  EXPECT_EQ(tessera_gemm_run(TESSERA_GEMM_DENSE, &args, nullptr, 0, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(s.out, kExpected);
}

TEST(Api, out_padded_needs_an_out_of_two_dims) {
  Gemm g;
  g.out_padded = true;
  g.a = {nullptr, kBFloat16, {2, 40, 16}, {}, {TESSERA_CUDA, 0}};
  g.b = {nullptr, kBFloat16, {2, 13, 16}, {}, {TESSERA_CUDA, 0}};
  g.out = {nullptr, kBFloat16, {2, 40, 13}, {40 * 16, 16, 1}, {TESSERA_CUDA, 0}};
  std::array<char, 8192> text{};
  std::size_t needed = 0;
  const auto explained = [&](tessera_gemm_op op) {
    const detail::LoweredGemm held(g);
    return tessera_gemm_explain(op, held.get(), "sm_90a", TESSERA_EXPLAIN_TEXT, text.data(), text.size(), &needed);
  };
  EXPECT_EQ(explained(TESSERA_GEMM_GROUPED), TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tessera_last_error()).find("out has 3 dims; 2 are accepted with it"), std::string::npos);
  g.a = {nullptr, kBFloat16, {40, 16}, {}, {TESSERA_CUDA, 0}};
  g.b = {nullptr, kBFloat16, {13, 16}, {}, {TESSERA_CUDA, 0}};
  g.out = {nullptr, kBFloat16, {40, 13}, {16, 1}, {TESSERA_CUDA, 0}};
  EXPECT_EQ(explained(TESSERA_GEMM_DENSE), TESSERA_OK) << tessera_last_error();
  EXPECT_NE(std::string(text.data()).find("padded out"), std::string::npos) << text.data();
}

TEST(Api, explain_needs_no_data_and_no_gpu) {
  Gemm g;
  g.a = {nullptr, kBFloat16, {4096, 1365}, {}, {TESSERA_CUDA, 0}};
  g.b = {nullptr, kBFloat16, {512, 1365}, {}, {TESSERA_CUDA, 0}};
  g.out = {nullptr, kBFloat16, {4096, 512}, {}, {TESSERA_CUDA, 0}};
  const detail::LoweredGemm held(g);
  std::array<char, 8192> text{};
  std::size_t needed = 0;
  ASSERT_EQ(tessera_gemm_explain(TESSERA_GEMM_DENSE, held.get(), "sm_90a", TESSERA_EXPLAIN_TEXT, text.data(),
                                 text.size(), &needed),
            TESSERA_OK)
      << tessera_last_error();
  EXPECT_NE(std::string(text.data()).find("unaligned: a, b"), std::string::npos) << text.data();
}

}  // namespace
}  // namespace tessera::gemm
