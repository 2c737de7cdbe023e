#include "select/attention.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "ops/attention_backward.h"
#include "select/device.h"

namespace tessera::select {
namespace {

AttentionProblem problem(AttentionOp op, std::int64_t seq, std::int64_t dim) {
  AttentionProblem p;
  p.op = op;
  p.dtype = DType::kFloat16;
  p.batch = 2;
  p.seq_q = p.seq_k = seq;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.dim_qk = p.dim_v = dim;
  p.scale = 0.125f;
  return p;
}

std::vector<Device> gpus() {
  std::vector<Device> list;
  for (const std::string& arch : known_archs()) list.push_back(*cuda_device(arch));
  Device newer = *cuda_device("sm_90a");  // an architecture to come, with little shared memory
  newer.name = "sm_120";
  newer.compute = 120;
  newer.shared_memory_per_block = 99 * 1024;
  list.push_back(newer);
  return list;
}

const Refusal* refusal_of(const Selection& selection, const std::string& kernel) {
  for (const Refusal& r : selection.refusals) {
    if (r.kernel == kernel) return &r;
  }
  return nullptr;
}

TEST(Select, every_head_dim_mask_and_mode_has_tiles_that_fit_every_gpu) {
  for (const Device& gpu : gpus()) {
    for (std::int64_t dim = 8; dim <= 256; dim += 8) {
      for (const bool causal : {false, true}) {
        for (const float softcap : {0.0f, 30.0f}) {
          for (const bool deterministic : {false, true}) {
            for (const bool vectors : {true, false}) {
              AttentionProblem p = problem(AttentionOp::kBackward, 300, dim);
              p.causal = causal;
              p.softcap = softcap;
              p.deterministic = deterministic;
              p.vectors = vectors;
              const Selection selection = select_attention(p, gpu);
              ASSERT_FALSE(selection.candidates.empty()) << explain(p, gpu, selection);
              for (const Candidate& c : selection.candidates) {
                const BackwardConfigs& configs = *c.backward;
                EXPECT_LE(backward_layout(configs.main).bytes, gpu.shared_memory_per_block) << c.config;
                EXPECT_EQ(configs.main.adds_dq, !deterministic);
                if (deterministic) {
                  EXPECT_LE(backward_dq_shared_bytes(configs.dq), gpu.shared_memory_per_block);
                }
              }
              p.op = AttentionOp::kForward;
              EXPECT_FALSE(select_attention(p, gpu).candidates.empty());
            }
          }
        }
      }
    }
  }
}

TEST(Select, no_tile_is_offered_twice) {
  for (const Device& gpu : gpus()) {
    for (const std::int64_t dim : {64, 128, 160, 256}) {
      for (const AttentionOp op : {AttentionOp::kForward, AttentionOp::kBackward}) {
        std::vector<std::string> configs;
        for (const Candidate& c : select_attention(problem(op, 16, dim), gpu).candidates) configs.push_back(c.config);
        std::sort(configs.begin(), configs.end());
        EXPECT_EQ(std::adjacent_find(configs.begin(), configs.end()), configs.end()) << gpu.name << " " << dim;
      }
    }
  }
}

TEST(Select, few_queries_get_a_tile_of_few_rows) {
  const Device gpu = *cuda_device("sm_90a");
  EXPECT_EQ(select_attention(problem(AttentionOp::kBackward, 16, 128), gpu).candidates.front().backward->main.block_q,
            16);
  EXPECT_EQ(select_attention(problem(AttentionOp::kBackward, 2048, 128), gpu).candidates.front().backward->main.block_q,
            64);
  EXPECT_TRUE(select_attention(problem(AttentionOp::kForward, 1, 128), gpu).candidates.front().forward->in_halves);
  EXPECT_FALSE(select_attention(problem(AttentionOp::kForward, 512, 64), gpu).candidates.front().forward->in_halves);
}

// dK and dV would have been written by the time the kernel for dQ was found to need too many blocks.
TEST(Select, a_backward_that_no_grid_can_hold_is_refused_before_anything_runs) {
  const Device gpu = *cuda_device("sm_90a");
  AttentionProblem p = problem(AttentionOp::kBackward, 1 << 20, 128);
  p.varlen = true;
  p.batch = 16384;
  p.total_q = p.total_k = 1 << 20;
  p.heads_q = 32;
  for (const bool deterministic : {false, true}) {
    p.deterministic = deterministic;
    p.heads_kv = 1;  // the grid for dK and dV would do
    const Selection selection = select_attention(p, gpu);
    EXPECT_TRUE(selection.candidates.empty());
    const Refusal* refusal = refusal_of(selection, "attention_backward");
    ASSERT_NE(refusal, nullptr);
    EXPECT_NE(refusal->reason.find("grid"), std::string::npos) << refusal->reason;
  }
}

TEST(Select, a_backward_s_workspace_is_linear_in_the_sequence) {
  const Device gpu = *cuda_device("sm_90a");
  const auto bytes = [&](std::int64_t seq, bool deterministic) {
    AttentionProblem p = problem(AttentionOp::kBackward, seq, 80);
    p.deterministic = deterministic;
    return select_attention(p, gpu).candidates.front().workspace;
  };
  EXPECT_EQ(bytes(131072, false), 2 * bytes(65536, false));
  EXPECT_EQ(bytes(131072, true), 2u * 4 * 2 * 4 * 131072);  // delta and LSE, one float each a row
  AttentionProblem packed = problem(AttentionOp::kBackward, 100, 80);
  packed.varlen = true;
  packed.total_q = packed.total_k = 150;
  // Sums of 2 sequences start at multiples of 64 rows: 150 + 2 * 64 rows, rounded down to 64.
  const auto configs = backward_configs(90, DType::kFloat16, 80, 80, 8, false, false, false).front();
  EXPECT_EQ(*backward_workspace(packed, configs), 2u * 2560 + 256 * 80 * 4 * 4);
}

}  // namespace
}  // namespace tessera::select
