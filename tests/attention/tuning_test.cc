// Which attention problems share what the tuner finds, and the problems it is checked on.
#include <gtest/gtest.h>

#include <functional>

#include "attention/family.h"
#include "engine/tuned.h"
#include "verify/attention/cases.h"
#include "verify/attention/family.h"

namespace tessera::attention {
namespace {

AttentionProblem problem() {
  AttentionProblem p;
  p.dtype = DType::kBFloat16;
  p.batch = 2;
  p.seq_q = p.seq_k = 8192;
  p.heads_q = p.heads_kv = 16;
  p.dim_qk = p.dim_v = 128;
  p.scale = 0.1f;
  p.causal = true;
  return p;
}

TEST(TuningClass, is_written_for_people) {
  EXPECT_EQ(AttentionFamily::tuning_class(problem(), 132), "attention_forward bf16 d128x128 masked q2^13 k2^13 many");
}

TEST(TuningClass, is_shared_by_problems_of_about_the_same_size) {
  const auto shares = [](const std::function<void(AttentionProblem&)>& change) {
    AttentionProblem p = problem();
    change(p);
    return AttentionFamily::tuning_class(p, 132) == AttentionFamily::tuning_class(problem(), 132);
  };
  EXPECT_TRUE(shares([](AttentionProblem& p) { p.seq_q = p.seq_k = 7000, p.batch = 3; }));
  EXPECT_TRUE(shares([](AttentionProblem& p) { p.with_lse = true; }));
  EXPECT_TRUE(shares([](AttentionProblem& p) { p.causal = false, p.window_right = 8192; })) << "masked, too";
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.dtype = DType::kFloat16; }));
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.dim_qk = 192; }));
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.dim_v = 64; }));
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.causal = false; }));
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.softcap = 30; }));
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.alibi = true; }));
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.deterministic = true; }));
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.heads_kv = 4; }));
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.seq_q = 2048; }));
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.seq_k = 2048; }));
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.window_left = 512; })) << "few of the keys are seen";
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.batch = p.heads_q = 1; })) << "64 tiles, 132 multiprocessors";
  EXPECT_FALSE(shares([](AttentionProblem& p) { p.op = AttentionOp::kBackward; }));
}

TEST(TuningKey, changes_with_the_kernels_that_compete) {
  const engine::TuningKey forward = engine::tuning_key<AttentionFamily>(problem(), 132);
  EXPECT_EQ(forward.family, "attention");
  std::vector<std::string> headers;  // of all forwards, whichever would be chosen
  for (const auto& one : AttentionFamily::implementations()) {
    if ((one.ops & AttentionFamily::bit_of(AttentionOp::kForward)) == 0) continue;
    headers.insert(headers.end(), one.headers.begin(), one.headers.end());
  }
  EXPECT_GT(headers.size(), 2U);
  EXPECT_EQ(forward.source, engine::source_hash(headers));
  AttentionProblem backward = problem();
  backward.op = AttentionOp::kBackward;
  EXPECT_NE(engine::tuning_key<AttentionFamily>(backward, 132).source, forward.source);
  EXPECT_NE(engine::source_hash({"attention/forward.cuh"}), forward.source);
}

TEST(TuningChecks, take_every_config_of_the_problem_s_search_space) {
  const engine::Device hopper = *engine::cuda_device("sm_90a");
  for (const std::int64_t heads_kv : {32, 16, 4, 1}) {
    cases::Case c;
    c.problem = problem();
    c.problem.seq_q = 4;
    c.problem.seq_k = 4096;
    c.problem.heads_q = 32;
    c.problem.heads_kv = heads_kv;
    c.problem.alignment = Alignment::kBottomRight;
    const auto large = verify::attention_case(c);
    const engine::SearchSpace space = large->search_space(hopper);
    EXPECT_GT(space.choices.size(), static_cast<std::size_t>(space.offered));
    const auto checks = large->tuning_checks();
    EXPECT_FALSE(checks.empty());
    for (const auto& check : checks) {
      for (const engine::Choice& choice : space.choices) {
        EXPECT_FALSE(check->kernels_of(choice, hopper).empty())
            << check->name << " " << choice.kernel << " " << text_of(choice.config) << " " << heads_kv;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::attention
