#include "select/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <set>

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
                if (c.backward_sm90) {
                  EXPECT_LE(backward_sm90_layout(*c.backward_sm90).bytes, gpu.shared_memory_per_block) << c.config;
                  EXPECT_TRUE(dim <= 128 && vectors && !deterministic && softcap == 0) << c.config;
                  continue;
                }
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
  const Device gpu = *cuda_device("sm_90");  // without Hopper's own kernels
  EXPECT_EQ(select_attention(problem(AttentionOp::kBackward, 16, 128), gpu).candidates.front().backward->main.block_q,
            16);
  EXPECT_EQ(select_attention(problem(AttentionOp::kBackward, 2048, 128), gpu).candidates.front().backward->main.block_q,
            64);
  EXPECT_TRUE(select_attention(problem(AttentionOp::kForward, 1, 128), gpu).candidates.front().forward->in_halves);
  const Candidate many = select_attention(problem(AttentionOp::kForward, 512, 64), gpu).candidates.front();
  EXPECT_FALSE(many.forward && many.forward->in_halves);
}

TEST(Select, few_queries_are_joined_on_hopper_where_heads_share_keys) {
  const Device gpu = *cuda_device("sm_90a");
  AttentionProblem p = problem(AttentionOp::kForward, 1, 128);
  p.heads_q = 32;
  p.heads_kv = 8;
  p.seq_k = 4096;
  const Candidate joined = select_attention(p, gpu).candidates.front();
  EXPECT_TRUE(joined.forward_sm90 && joined.forward_sm90->joined);
  p.heads_kv = 32;
  EXPECT_TRUE(select_attention(p, gpu).candidates.front().forward) << "a tile of one row is the portable kernel's";
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

AttentionForwardSm90Config& hopper(ForwardConfig& config) { return std::get<AttentionForwardSm90Config>(config); }

ForwardConfig some_hopper_config(const AttentionProblem& p) {
  return forward_sm90_configs(p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v), p.causal, false).front();
}

TEST(SearchSpace, every_config_fits_and_comes_once_for_every_head_dim_and_gpu) {
  for (const Device& gpu : gpus()) {
    for (std::int64_t dim = 8; dim <= 256; dim += 8) {
      for (const bool causal : {false, true}) {
        for (const float softcap : {0.0f, 30.0f}) {
          AttentionProblem p = problem(AttentionOp::kForward, 2048, dim);
          p.causal = causal;
          p.softcap = softcap;
          std::vector<std::string> texts;
          for (const ForwardConfig& config : forward_search_space(p, gpu)) {
            EXPECT_TRUE(fits(config, p, gpu)) << instance_of(config).config;
            EXPECT_LE(instance_of(config).dynamic_smem_bytes, gpu.shared_memory_per_block);
            texts.push_back(instance_of(config).config);
          }
          ASSERT_FALSE(texts.empty());
          EXPECT_EQ(texts.front(), select_attention(p, gpu).candidates.front().config) << "the default comes first";
          std::sort(texts.begin(), texts.end());
          EXPECT_EQ(std::adjacent_find(texts.begin(), texts.end()), texts.end()) << gpu.name << " " << dim;
        }
      }
    }
  }
}

TEST(SearchSpace, has_every_choice_of_the_hopper_kernel_and_only_what_its_registers_hold) {
  const Device gpu = *cuda_device("sm_90a");
  std::set<int> consumers, stages, q_stages, blocks, panels, polynomials, ping_pong, tickets, portable;
  std::set<std::pair<int, int>> split;  // consumers, places of each
  for (ForwardConfig& config : forward_search_space(problem(AttentionOp::kForward, 2048, 80), gpu)) {
    if (std::holds_alternative<AttentionForwardConfig>(config)) {
      portable.insert(std::get<AttentionForwardConfig>(config).block_q);
      continue;
    }
    const AttentionForwardSm90Config& c = hopper(config);
    consumers.insert(c.consumers);
    stages.insert(c.stages);
    q_stages.insert(c.q_stages);
    blocks.insert(c.blocks);
    panels.insert(c.narrowest_panel);
    polynomials.insert(c.polynomial);
    ping_pong.insert(c.ping_pong ? 1 : 0);
    tickets.insert(c.tickets ? 1 : 0);
    if (c.split) {
      split.insert({c.consumers, c.stages / c.consumers});
      EXPECT_EQ(c.stages % c.consumers, 0);
      EXPECT_FALSE(c.ping_pong);
    }
    EXPECT_EQ(c.block_k % 16, 0);
    EXPECT_TRUE(c.blocks == 1 || c.consumers == 1);
    EXPECT_FALSE(c.ping_pong && c.consumers == 1);
    EXPECT_LE(c.block_k / 2 + c.block_k / 4 + c.dim_v / 2 + 32, c.consumers == 3 ? 160
                                                                : c.blocks == 3  ? 136
                                                                                 : 255)
        << c.block_k;
  }
  EXPECT_EQ(consumers, (std::set<int>{1, 2, 3}));
  EXPECT_EQ(stages, (std::set<int>{2, 3, 4, 6}));
  EXPECT_EQ(split, (std::set<std::pair<int, int>>{{2, 1}, {2, 2}, {3, 1}, {3, 2}}));
  EXPECT_EQ(q_stages, (std::set<int>{1, 2}));
  EXPECT_EQ(blocks, (std::set<int>{1, 2, 3}));
  EXPECT_EQ(panels, (std::set<int>{16, 64}));
  EXPECT_EQ(polynomials, (std::set<int>{0}));
  EXPECT_EQ(ping_pong, (std::set<int>{0, 1}));
  EXPECT_EQ(tickets, (std::set<int>{0, 1}));
  EXPECT_FALSE(portable.empty()) << "the portable kernel competes too";
  std::set<int> keys_of_four;  // blocks on an SM: 104 registers
  for (ForwardConfig& config : forward_search_space(problem(AttentionOp::kForward, 2048, 64), gpu)) {
    if (std::holds_alternative<AttentionForwardConfig>(config) || hopper(config).blocks < 4) continue;
    keys_of_four.insert(hopper(config).block_k);
  }
  EXPECT_EQ(keys_of_four, (std::set<int>{48}));
  for (ForwardConfig& config : forward_search_space(problem(AttentionOp::kForward, 2048, 128), gpu)) {
    if (std::holds_alternative<AttentionForwardConfig>(config)) continue;
    EXPECT_EQ(hopper(config).narrowest_panel, 64);
  }
}

TEST(SearchSpace, is_empty_where_no_gpu_kernel_serves_and_portable_where_hoppers_does_not) {
  EXPECT_TRUE(forward_search_space(problem(AttentionOp::kForward, 512, 64), cpu_device(2)).empty());
  EXPECT_TRUE(forward_search_space(problem(AttentionOp::kForward, 512, 260), *cuda_device("sm_90a")).empty());
  EXPECT_TRUE(forward_search_space(problem(AttentionOp::kBackward, 512, 64), *cuda_device("sm_90a")).empty());
  AttentionProblem unaligned = problem(AttentionOp::kForward, 512, 64);
  unaligned.vectors = unaligned.tensor_maps = false;
  for (const auto& space : {forward_search_space(unaligned, *cuda_device("sm_90a")),
                            forward_search_space(problem(AttentionOp::kForward, 512, 64), *cuda_device("sm_80"))}) {
    EXPECT_FALSE(space.empty());
    for (const ForwardConfig& config : space) EXPECT_TRUE(std::holds_alternative<AttentionForwardConfig>(config));
  }
}

TEST(SearchSpace, a_config_s_text_gives_back_the_config_and_any_other_text_nothing) {
  const Device gpu = *cuda_device("sm_90a");
  AttentionProblem p = problem(AttentionOp::kForward, 2048, 72);
  p.causal = true;
  for (const ForwardConfig& config : forward_search_space(p, gpu)) {
    const std::string text = instance_of(config).config;
    const auto back = forward_config_from_text(text);
    ASSERT_TRUE(back) << text;
    EXPECT_EQ(instance_of(*back), instance_of(config));
    EXPECT_EQ(genes_of(*back), genes_of(config));
  }
  const std::string text = instance_of(some_hopper_config(p)).config;
  for (const auto& [from, to] : {std::pair<const char*, const char*>{".stages = 3", ".stages = two"},
                                 {".stages = 3", ".stages = 3.5"},
                                 {".stages = 3, ", ""},
                                 {".stages = 3", ".stages = 3, .stages = 2"},
                                 {"true", "maybe"},
                                 {"kFloat16", "kFloat8"},
                                 {"AttentionForwardSm90Config", "AttentionBackwardConfig"},
                                 {"}", ""}}) {
    std::string other = text;
    other.replace(other.find(from), std::string(from).size(), to);
    EXPECT_FALSE(forward_config_from_text(other)) << other;
  }
}

TEST(Select, a_tuned_config_comes_first_and_says_so) {
  const Device gpu = *cuda_device("sm_90a");
  AttentionProblem p = problem(AttentionOp::kForward, 2048, 128);
  ForwardConfig config = some_hopper_config(p);
  hopper(config).block_k = 64;
  hopper(config).tickets = true;
  const TunedForward tuned{config, 123.45, 150};
  const Selection plain = select_attention(p, gpu);
  const Selection selection = select_attention(p, gpu, &tuned);
  const Candidate& first = selection.candidates.front();
  EXPECT_EQ(first.kernel, "attention_forward_sm90");
  EXPECT_EQ(first.config, instance_of(config).config);
  ASSERT_TRUE(first.forward_sm90);
  EXPECT_GT(first.workspace, 0U) << "tickets";
  EXPECT_EQ(first.why, "tuned on this GPU: 123.5 us, default 150.0 us");
  EXPECT_GT(first.score, selection.candidates[1].score);
  EXPECT_EQ(selection.candidates.size(), plain.candidates.size() + 1);
  EXPECT_NE(explain(p, gpu, selection).find("chosen  attention_forward_sm90"), std::string::npos);
  // One that is offered anyway is moved, not doubled.
  const TunedForward offered{some_hopper_config(p), 1, 2};
  EXPECT_EQ(select_attention(p, gpu, &offered).candidates.size(), plain.candidates.size());
  const TunedForward portable{*select_attention(p, *cuda_device("sm_90")).candidates.front().forward, 1, 2};
  EXPECT_EQ(select_attention(p, gpu, &portable).candidates.front().why, "tuned on this GPU: 1.0 us, default 2.0 us");
}

TEST(Select, hoppers_own_kernel_serves_many_short_sequences_too) {
  AttentionProblem p = problem(AttentionOp::kForward, 64, 128);
  p.batch = 60000;
  p.heads_q = p.heads_kv = 16;
  EXPECT_EQ(select_attention(p, *cuda_device("sm_90a")).candidates.front().kernel, "attention_forward_sm90");
  p.seq_q = 1;
  EXPECT_EQ(select_attention(p, *cuda_device("sm_90a")).candidates.front().kernel, "attention_forward");
}

TEST(Select, queries_beyond_the_last_key_cost_nothing) {
  AttentionProblem p = problem(AttentionOp::kForward, 8192, 64);
  p.seq_k = 512;
  p.causal = true;
  p.window_left = 16;
  for (const Candidate& candidate : select_attention(p, *cuda_device("sm_90a")).candidates) {
    double scores = 0;
    ASSERT_EQ(std::sscanf(candidate.why.c_str(), "computes %lf scores a head", &scores), 1) << candidate.why;
    EXPECT_LT(scores, 512 * 512) << candidate.config;
  }
}

TEST(Select, a_tuned_config_that_does_not_fit_is_ignored) {
  const Device gpu = *cuda_device("sm_90a");
  const AttentionProblem p = problem(AttentionOp::kForward, 2048, 128);
  const auto is_taken = [&](const AttentionProblem& asked, const Device& device,
                            const std::function<void(AttentionForwardSm90Config&)>& change) {
    ForwardConfig config = some_hopper_config(p);
    hopper(config).tickets = true;  // no default
    change(hopper(config));
    const TunedForward tuned{config, 1, 2};
    const Selection selection = select_attention(asked, device, &tuned);
    return selection.candidates.front().why.find("tuned") != std::string::npos;
  };
  EXPECT_TRUE(is_taken(p, gpu, [](auto&) {}));
  EXPECT_FALSE(is_taken(p, *cuda_device("sm_80"), [](auto&) {}));
  EXPECT_FALSE(is_taken(p, *cuda_device("sm_90"), [](auto&) {})) << "no wgmma";
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.stages = 4; })) << "shared memory";
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.consumers = 4; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.block_k = 72; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.blocks = 2; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.split = true; })) << "and ping-pong";
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.split = true, c.ping_pong = false, c.consumers = 2; }))
      << "three places for two";
  const auto share_rows = [](AttentionForwardSm90Config& c) {
    c.split = true, c.ping_pong = false, c.consumers = c.stages = 2, c.q_stages = 1;
  };
  EXPECT_FALSE(is_taken(p, gpu, share_rows)) << "and tickets";
  EXPECT_TRUE(is_taken(p, gpu, [&](auto& c) { share_rows(c), c.tickets = false; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.polynomial = 1; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.dim_v = 64; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.dtype = DType::kBFloat16; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.banded = true; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.general = true; }));
  AttentionProblem other = p;
  other.tensor_maps = false;
  EXPECT_FALSE(is_taken(other, gpu, [](auto&) {})) << "the copy engine cannot read it";
  other = p;
  other.op = AttentionOp::kBackward;
  EXPECT_FALSE(is_taken(other, gpu, [](auto&) {}));
}

}  // namespace
}  // namespace tessera::select
