// The C ABI of losses: results through every entry, and messages for what is not accepted.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "tessera/tessera.hpp"
#include "tests/api/expect_refusal.h"

namespace tessera::loss {
namespace {

constexpr float kHalfLog2Pi = 0.9189385332f;

// Two rows with one component of sigma 1: losses of 2 and 0, and log(2 pi) / 2.
struct Small {
  std::vector<float> params{5, 1, 0, 7, 2, 0}, target{3, 2}, out{-1, -1}, dparams = std::vector<float>(6, -1);

  Loss args() {
    Loss l;
    l.params = {params.data(), kFloat32, {2, 1, 3}};
    l.target = {target.data(), kFloat32, {2}};
    l.out = {out.data(), kFloat32, {1}};
    l.dparams = {dparams.data(), kFloat32, {2, 1, 3}};
    return l;
  }
};

TEST(Api, runs_in_one_call_and_by_a_plan) {
  Small s;
  loss_gmm_nll(s.args());
  EXPECT_FLOAT_EQ(s.out[0], 1 + kHalfLog2Pi);
  EXPECT_EQ(s.dparams, (std::vector<float>{0, -2, -3, 0, 0, 1}));
  Small again;
  const LossPlan plan(TESSERA_LOSS_GMM_NLL, again.args());
  std::vector<std::byte> workspace(plan.workspace());
  plan.run(again.args(), workspace.data(), workspace.size());
  EXPECT_FLOAT_EQ(again.out[0], 1 + kHalfLog2Pi);
  EXPECT_NE(plan.explain().find("cpu_loss"), std::string::npos) << plan.explain();
}

TEST(Api, every_reduction) {
  Small s;
  Loss l = s.args();
  l.dparams = {};
  l.reduction = TESSERA_REDUCTION_SUM;
  loss_gmm_nll(l);
  EXPECT_FLOAT_EQ(s.out[0], 2 + 2 * kHalfLog2Pi);
  l.reduction = TESSERA_REDUCTION_NONE;
  l.out = {s.out.data(), kFloat32, {2}};
  loss_gmm_nll(l);
  EXPECT_FLOAT_EQ(s.out[0], 2 + kHalfLog2Pi);
  EXPECT_FLOAT_EQ(s.out[1], kHalfLog2Pi);
  EXPECT_EQ(s.dparams, std::vector<float>(6, -1));
}

TEST(Api, nan_stays_nan) {
  Small s;
  s.target[0] = std::nanf("");
  loss_gmm_nll(s.args());
  EXPECT_TRUE(std::isnan(s.out[0]));
  EXPECT_TRUE(std::isnan(s.dparams[1]));
}

struct BadInput {
  const char* promise;
  std::function<void(Small&, Loss&)> spoil;
  const char* names;
};

TEST(Api, refuses_with_a_message_that_names_the_argument_and_writes_nothing) {
  const BadInput bad[] = {
      {"no params", [](Small&, Loss& l) { l.params = {}; }, "params is null"},
      {"two values per component",
       [](Small& s, Loss& l) {
         l.params = {s.params.data(), kFloat32, {1, 3, 2}};
       },
       "params has size 2 in dim 2; 3 is expected"},
      {"targets",
       [](Small& s, Loss& l) {
         l.target = {s.target.data(), kFloat32, {1}};
       },
       "target has size 1 in dim 0; 2 is expected"},
      {"a row of losses for a mean",
       [](Small& s, Loss& l) {
         l.out = {s.out.data(), kFloat32, {2}};
       },
       "out has size 2 in dim 0; 1 is expected"},
      {"type of out",
       [](Small& s, Loss& l) {
         l.out = {s.out.data(), kFloat16, {1}};
       },
       "out is fp16"},
      {"type of target",
       [](Small& s, Loss& l) {
         l.target = {s.target.data(), kFloat16, {2}};
       },
       "target is fp16, but params is fp32"},
      {"gradient",
       [](Small& s, Loss& l) {
         l.dparams = {s.dparams.data(), kFloat32, {1, 2, 3}};
       },
       "dparams has size 1 in dim 0"},
      {"the gradient's type",
       [](Small& s, Loss& l) {
         l.dparams = {s.dparams.data(), kFloat16, {2, 1, 3}};
       },
       "dparams is fp16, but params is fp32; they must be the same"},
      {"no component",
       [](Small& s, Loss& l) {
         l.params = {s.params.data(), kFloat32, {2, 0, 3}};
       },
       "params has 0 components"},
      {"no row",
       [](Small& s, Loss& l) {
         l.params = l.dparams = {s.params.data(), kFloat32, {0, 1, 3}};
         l.target = {s.target.data(), kFloat32, {0}};
       },
       "no rows"},
      {"reduction", [](Small&, Loss& l) { l.reduction = static_cast<tessera_reduction>(7); }, "reduction is 7"},
  };
  for (const BadInput& one : bad) {
    Small s;
    Loss l = s.args();
    one.spoil(s, l);
    expect_refusal(tessera_loss_run(TESSERA_LOSS_GMM_NLL, detail::LoweredLoss(l).get(), nullptr, 0, nullptr), one.names,
                   one.promise);
    EXPECT_EQ(s.out, std::vector<float>(2, -1)) << one.promise;
    EXPECT_EQ(s.dparams, std::vector<float>(6, -1)) << one.promise;
  }
}

TEST(Api, refuses_unknown_ops_flags_and_sizes_of_the_struct) {
  Small s;
  Loss l = s.args();
  const detail::LoweredLoss held(l);
  tessera_loss args = *held.get();
  EXPECT_EQ(tessera_loss_run(static_cast<tessera_loss_op>(3), &args, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  args.flags = 2;
  EXPECT_EQ(tessera_loss_run(TESSERA_LOSS_GMM_NLL, &args, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), "flags is 0x2; 0 is accepted");
  args.flags = 0;
  args.struct_size = 8;
  EXPECT_EQ(tessera_loss_run(TESSERA_LOSS_GMM_NLL, &args, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace tessera::loss
