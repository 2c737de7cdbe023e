// Which kernels and Configs attention's problems get, and what the tuner may search.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "attention/backward.h"
#include "attention/backward_sm90.h"
#include "attention/backward_wide_sm90.h"
#include "attention/decode_config.h"
#include "attention/family.h"
#include "attention/forward_config.h"
#include "attention/forward_sm90.h"
#include "attention/gpu.h"
#include "select.h"

namespace tessera::attention {
namespace {

TEST(AttentionSelect, every_head_dim_mask_and_mode_has_tiles_that_fit_every_gpu) {
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
              const Selection selection = select(p, gpu);
              ASSERT_FALSE(selection.candidates.empty())
                  << text_of(engine::explain<AttentionFamily>(p, gpu, selection));
              for (const Candidate& c : selection.candidates) {
                const std::string config = text_of(c.offer.config);
                if (const auto sm90 = main_of<AttentionBackwardSm90Config>(c)) {
                  EXPECT_LE(backward_sm90_layout(*sm90).bytes, gpu.shared_memory_per_block) << config;
                  EXPECT_TRUE(dim <= 128 && vectors) << config;
                  EXPECT_TRUE(sm90->deterministic || !deterministic) << config;
                  EXPECT_EQ(sm90->score_mod, softcap > 0) << config;
                  continue;
                }
                if (const auto wide = main_of<AttentionBackwardWideSm90Config>(c)) {
                  EXPECT_LE(backward_wide_sm90_layout(*wide).bytes, gpu.shared_memory_per_block) << config;
                  EXPECT_TRUE(dim > 128 && vectors) << config;
                  EXPECT_TRUE(wide->deterministic || !deterministic) << config;
                  EXPECT_EQ(wide->score_mod, softcap > 0) << config;
                  continue;
                }
                const auto main = main_of<AttentionBackwardConfig>(c);
                ASSERT_TRUE(main) << config;
                EXPECT_LE(backward_layout(*main).bytes, gpu.shared_memory_per_block) << config;
                EXPECT_EQ(main->adds_dq, !deterministic);
                const auto dq = engine::from_fields<BackwardDqConfig>(engine::fields_of_step(c.offer.config, "dq"));
                ASSERT_EQ(dq.has_value(), deterministic) << config;
                if (dq) {
                  EXPECT_LE(backward_dq_shared_bytes(*dq), gpu.shared_memory_per_block);
                }
              }
              p.op = AttentionOp::kForward;
              EXPECT_FALSE(select(p, gpu).candidates.empty());
            }
          }
        }
      }
    }
  }
}

TEST(AttentionSelect, no_tile_is_offered_twice) {
  for (const Device& gpu : gpus()) {
    for (const std::int64_t dim : {64, 128, 160, 256}) {
      for (const AttentionOp op : {AttentionOp::kForward, AttentionOp::kBackward}) {
        std::set<std::string> seen;
        for (const Candidate& c : select(problem(op, 16, dim), gpu).candidates) {
          EXPECT_TRUE(seen.insert(kernel_of(c) + text_of(c.offer.config)).second) << gpu.name << " " << dim;
        }
      }
    }
  }
}

TEST(AttentionSelect, key_tiles_of_short_sequences_take_turns_at_dq_if_ctas_are_many) {
  const Device gpu = *cuda_device("sm_90a");
  const auto takes_turns = [&](std::int64_t batch, std::int64_t seq, std::int64_t dim, bool causal = false,
                               std::int64_t window = -1) {
    AttentionProblem p = problem(AttentionOp::kBackward, seq, dim);
    p.batch = batch;
    p.causal = causal;
    p.window_left = window;
    p.heads_kv = p.heads_q;
    if (dim > 128) return main_of<AttentionBackwardWideSm90Config>(chosen(p, gpu))->deterministic;
    return main_of<AttentionBackwardSm90Config>(chosen(p, gpu))->deterministic;
  };
  for (const std::int64_t dim : {64, 128, 256}) {
    EXPECT_TRUE(takes_turns(64, 512, dim)) << dim;
    EXPECT_TRUE(takes_turns(64, 1024, dim)) << dim;
    EXPECT_EQ(takes_turns(64, 1500, dim), dim != 128) << dim;  // they cost more at 128 than at 64
    EXPECT_FALSE(takes_turns(1, 512, dim)) << dim;
    EXPECT_FALSE(takes_turns(64, 4096, dim)) << dim;
    EXPECT_TRUE(takes_turns(64, 1024, dim, true)) << dim;
    EXPECT_FALSE(takes_turns(64, 1500, dim, true))
        << dim;  // a query sees half as many keys, but the longest CTAs come last
    EXPECT_TRUE(takes_turns(64, 8192, dim, true, 400)) << dim;  // not then
    EXPECT_FALSE(takes_turns(64, 8192, dim, true, 2048)) << dim;
  }
}

TEST(AttentionSelect, few_queries_get_a_tile_of_few_rows) {
  const Device gpu = *cuda_device("sm_90");  // without Hopper's own kernels
  const auto backward_rows = [&](std::int64_t seq) {
    return main_of<AttentionBackwardConfig>(chosen(problem(AttentionOp::kBackward, seq, 128), gpu))->block_q;
  };
  EXPECT_EQ(backward_rows(16), 16);
  EXPECT_EQ(backward_rows(2048), 64);
  const auto sums_in_halves = [&](std::int64_t seq, std::int64_t dim) {
    return main_of<AttentionForwardConfig>(chosen(problem(AttentionOp::kForward, seq, dim), gpu))->in_halves;
  };
  EXPECT_TRUE(sums_in_halves(1, 128));
  EXPECT_FALSE(sums_in_halves(512, 64));
}

// Larger tiles spill registers.
TEST(AttentionSelect, unaligned_rows_leave_registers_for_copies_in_flight) {
  for (const Device& gpu : gpus()) {
    for (const std::int64_t dim : {56, 96, 128, 136, 256}) {
      for (const float softcap : {0.0f, 30.0f}) {
        AttentionProblem p = problem(AttentionOp::kForward, 2048, dim);
        p.softcap = softcap;
        p.vectors = p.tensor_maps = false;
        const auto config = main_of<AttentionForwardConfig>(chosen(p, gpu));
        ASSERT_TRUE(config) << gpu.name << " " << dim;
        const int keys = dim > 128 ? 16 : dim > 96 ? 32 : 64;
        EXPECT_LE(config->block_k, keys) << gpu.name << " " << dim;
        EXPECT_LE(config->block_q, dim <= 64 && gpu.compute >= 80 && softcap == 0 ? 128 : 64) << gpu.name << " " << dim;
      }
    }
  }
}

TEST(AttentionSelect, backward_keeps_what_ptxas_has_registers_for) {
  const Device hopper = *cuda_device("sm_90a");
  const auto kept_steps = [&](std::int64_t dim_qk, std::int64_t dim_v, std::int64_t keys) {
    AttentionProblem p = problem(AttentionOp::kBackward, keys, dim_qk);
    p.dim_v = dim_v;
    const auto config = main_of<AttentionBackwardSm90Config>(chosen(p, hopper));
    return config ? config->kept_k_steps : -1;
  };
  EXPECT_EQ(kept_steps(40, 40, 64), 1);
  EXPECT_EQ(kept_steps(40, 40, 512), 3);
  EXPECT_EQ(kept_steps(56, 104, 512), 3);
  EXPECT_EQ(kept_steps(56, 112, 512), 4);

  AttentionProblem p = problem(AttentionOp::kBackward, 2048, 128);
  p.causal = true;
  const Device portable = *cuda_device("sm_90");
  EXPECT_EQ(main_of<AttentionBackwardConfig>(chosen(p, portable))->kept_steps, 6);
  p.dim_qk = 112;
  EXPECT_EQ(main_of<AttentionBackwardConfig>(chosen(p, portable))->kept_steps, 2);
}

TEST(AttentionSelect, gqa_is_packed_on_hopper_if_there_are_few_queries) {
  const Device gpu = *cuda_device("sm_90a");
  AttentionProblem p = problem(AttentionOp::kForward, 1, 128);
  p.heads_q = 32;
  p.heads_kv = 8;
  p.seq_k = 4096;
  const auto config = main_of<AttentionForwardSm90Config>(chosen(p, gpu));
  EXPECT_TRUE(config && config->pack_gqa);
  p.heads_kv = 32;
  EXPECT_EQ(kernel_of(chosen(p, gpu)), "attention_forward") << "a tile of one row is the portable kernel's";
}

// dK and dV would have been written by the time the kernel for dQ was found to need too many CTAs.
TEST(AttentionSelect, a_backward_that_no_grid_can_hold_is_refused_before_anything_runs) {
  const Device gpu = *cuda_device("sm_90a");
  AttentionProblem p = problem(AttentionOp::kBackward, 1 << 20, 128);
  p.varlen = true;
  p.batch = 16384;
  p.total_q = p.total_k = 1 << 20;
  p.heads_q = 32;
  for (const bool deterministic : {false, true}) {
    p.deterministic = deterministic;
    p.heads_kv = 1;  // the grid for dK and dV would do
    const Selection selection = select(p, gpu);
    EXPECT_TRUE(selection.candidates.empty());
    const engine::Refusal* refusal = refusal_of(selection, "attention_backward");
    ASSERT_NE(refusal, nullptr);
    EXPECT_NE(refusal->reason.find("grid"), std::string::npos) << refusal->reason;
  }
}

TEST(AttentionSelect, a_backward_s_workspace_is_linear_in_the_sequence) {
  const Device gpu = *cuda_device("sm_90a");
  const auto bytes = [&](std::int64_t seq, bool deterministic, int dim = 80) {
    AttentionProblem p = problem(AttentionOp::kBackward, seq, dim);
    p.heads_kv = p.heads_q;  // else dK and dV may have sums, too
    p.deterministic = deterministic;
    p.window_left = 1000;  // else the queries of some key tiles may be divided, and these have sums
    return chosen(p, gpu).offer.workspace;
  };
  EXPECT_EQ(bytes(131072, false), 2 * bytes(65536, false));
  EXPECT_EQ(bytes(131072, true), bytes(131072, false) + 2u * 4 * 131072 / 64 * 4);  // and a counter per query tile
  EXPECT_EQ(bytes(131072, true, 192),
            bytes(131072, false, 192) + 2u * 4 * 131072 / 64 * 2 * 4);  // for each CTA of a cluster
  AttentionProblem packed = problem(AttentionOp::kBackward, 100, 80);
  packed.varlen = true;
  packed.total_q = packed.total_k = 150;
  // Sums of 2 sequences start at multiples of 64 rows: 150 + 2 * 64 rows, rounded down to 64.
  const auto configs = backward_configs(90, DType::kFloat16, 80, 80, 8, false, false, false).front();
  EXPECT_EQ(*backward_workspace(packed, configs), 2u * 2560 + 256 * 80 * 4 * 4);
}

// Tiles of 64 keys, several CTAs to an SM, were measured to be faster there than the portable kernel.
TEST(AttentionSelect, hoppers_own_kernel_serves_many_short_sequences_too) {
  AttentionProblem p = problem(AttentionOp::kForward, 64, 128);
  p.batch = 60000;
  p.heads_q = p.heads_kv = 16;
  EXPECT_EQ(kernel_of(chosen(p, *cuda_device("sm_90a"))), "attention_forward_sm90");
  p.seq_q = 1;
  EXPECT_EQ(kernel_of(chosen(p, *cuda_device("sm_90a"))), "attention_forward");
}

TEST(AttentionSelect, every_offer_has_a_recipe_with_the_workspace_it_names) {
  for (const Device& gpu : gpus()) {
    for (const AttentionOp op : {AttentionOp::kForward, AttentionOp::kBackward}) {
      for (const std::int64_t seq : {1, 300, 4096}) {
        const AttentionProblem p = problem(op, seq, 80);
        for (const Candidate& c : select(p, gpu).candidates) {
          const auto recipe = c.implementation->recipe(p, gpu, c.offer.config);
          ASSERT_TRUE(recipe) << kernel_of(c) << " " << text_of(c.offer.config);
          EXPECT_EQ(recipe->workspace, c.offer.workspace) << kernel_of(c);
        }
      }
    }
  }
}

struct Block {
  int q, k;
};
constexpr Block kBlocks[] = {{64, 48}, {64, 64}, {128, 96}, {192, 80}, {192, 128}, {64, 128}};

TEST(ComputedScores, are_whole_tiles_of_what_is_visible) {
  AttentionProblem p = problem(AttentionOp::kForward, 3840, 64);  // 384 * 10: tiles divide it
  for (const Block& block : kBlocks) {
    const ComputedScores all = computed_scores(p, block.q, block.k);
    EXPECT_EQ(all.all, 3840.0 * 3840);
    EXPECT_EQ(all.of_longest, 3840.0 * block.q);
  }
  p.causal = true;
  const double visible = 3840.0 * 3841 / 2;
  for (const Block& block : kBlocks) {
    const ComputedScores causal = computed_scores(p, block.q, block.k);
    EXPECT_GE(causal.all, visible) << block.q << "x" << block.k;
    EXPECT_LE(causal.all, visible + 3840.0 * (block.q + block.k)) << block.q << "x" << block.k;
  }
  p.seq_k = 3841;  // one key more: one tile more for those that see it
  p.causal = false;
  EXPECT_EQ(computed_scores(p, 64, 64).all, 3840.0 * (3840 + 64));
}

TEST(ComputedScores, queries_beyond_the_last_key_cost_nothing) {
  AttentionProblem p = problem(AttentionOp::kForward, 8192, 64);
  p.seq_k = 512;
  p.causal = true;
  p.window_left = 16;
  for (const Block& block : kBlocks) {
    const ComputedScores computed = computed_scores(p, block.q, block.k);
    EXPECT_GT(computed.all, 0) << block.q << "x" << block.k;
    EXPECT_LT(computed.all, 512 * 512) << block.q << "x" << block.k;
  }
}

AttentionForwardSm90Config some_hopper_config(const AttentionProblem& p) {
  return forward_sm90_configs(p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v), p.causal, false).front();
}

TEST(AttentionSearchSpace, every_config_fits_and_comes_once_for_every_head_dim_and_gpu) {
  for (const Device& gpu : gpus()) {
    for (std::int64_t dim = 8; dim <= 256; dim += 8) {
      for (const bool causal : {false, true}) {
        for (const float softcap : {0.0f, 30.0f}) {
          AttentionProblem p = problem(AttentionOp::kForward, 2048, dim);
          p.causal = causal;
          p.softcap = softcap;
          const engine::SearchSpace space = search_space(p, gpu);
          std::set<std::string> seen;
          for (const engine::Choice& choice : space.choices) {
            const std::string text = choice.kernel + text_of(choice.config);
            const auto* kernel = engine::find_implementation<AttentionFamily>(choice.kernel);
            ASSERT_NE(kernel, nullptr) << text;
            const auto recipe = kernel->recipe(p, gpu, choice.config);
            ASSERT_TRUE(recipe) << text;
            for (const engine::Step& step : recipe->steps) {
              EXPECT_LE(step.kernel->dynamic_smem_bytes, gpu.shared_memory_per_block) << text;
            }
            EXPECT_TRUE(seen.insert(text).second) << gpu.name << " " << text;
          }
          ASSERT_FALSE(space.choices.empty());
          EXPECT_EQ(space.choices.front().config, chosen(p, gpu).offer.config) << "the default comes first";
        }
      }
    }
  }
}

TEST(AttentionSearchSpace, has_every_choice_of_the_hopper_kernel_and_only_what_its_registers_hold) {
  const Device gpu = *cuda_device("sm_90a");
  std::set<int> consumers, stages, q_stages, ctas_per_sm, min_atoms, ping_pong, dynamic_scheduler, portable;
  std::set<std::pair<int, int>> split;  // consumers, stages of each
  for (const engine::Choice& choice : search_space(problem(AttentionOp::kForward, 2048, 80), gpu).choices) {
    if (const auto config = main_of<AttentionForwardConfig>(choice.config)) {
      portable.insert(config->block_q);
      continue;
    }
    const auto typed = main_of<AttentionForwardSm90Config>(choice.config);
    ASSERT_TRUE(typed) << choice.kernel;
    const AttentionForwardSm90Config& c = *typed;
    consumers.insert(c.consumers);
    stages.insert(c.stages);
    q_stages.insert(c.q_stages);
    ctas_per_sm.insert(c.ctas_per_sm);
    min_atoms.insert(c.min_atom);
    ping_pong.insert(c.ping_pong ? 1 : 0);
    dynamic_scheduler.insert(c.dynamic_scheduler ? 1 : 0);
    if (c.intra_cta_split) {
      split.insert({c.consumers, c.stages / c.consumers});
      EXPECT_EQ(c.stages % c.consumers, 0);
      EXPECT_FALSE(c.ping_pong);
    }
    EXPECT_EQ(c.block_k % 16, 0);
    EXPECT_TRUE(c.ctas_per_sm == 1 || c.consumers == 1);
    EXPECT_FALSE(c.ping_pong && c.consumers == 1);
    const int registers = c.consumers == 3 ? 160 : c.ctas_per_sm == 3 ? 136 : 255;
    EXPECT_LE(c.block_k / 2 + c.block_k / 4 + c.dim_v / 2 + 32, registers) << c.block_k;
  }
  EXPECT_EQ(consumers, (std::set<int>{1, 2, 3}));
  EXPECT_EQ(stages, (std::set<int>{2, 3, 4, 6}));
  EXPECT_EQ(split, (std::set<std::pair<int, int>>{{2, 1}, {2, 2}, {3, 1}, {3, 2}}));
  EXPECT_EQ(q_stages, (std::set<int>{1, 2}));
  EXPECT_EQ(ctas_per_sm, (std::set<int>{1, 2, 3}));
  EXPECT_EQ(min_atoms, (std::set<int>{16, 64}));
  EXPECT_EQ(ping_pong, (std::set<int>{0, 1}));
  EXPECT_EQ(dynamic_scheduler, (std::set<int>{0, 1}));
  EXPECT_FALSE(portable.empty()) << "the portable kernel competes too";
  std::set<int> keys_of_four;  // CTAs per SM: 104 registers
  for (const engine::Choice& choice : search_space(problem(AttentionOp::kForward, 2048, 64), gpu).choices) {
    const auto c = main_of<AttentionForwardSm90Config>(choice.config);
    if (c && c->ctas_per_sm >= 4) keys_of_four.insert(c->block_k);
  }
  EXPECT_EQ(keys_of_four, (std::set<int>{48}));
  for (const engine::Choice& choice : search_space(problem(AttentionOp::kForward, 2048, 128), gpu).choices) {
    const auto c = main_of<AttentionForwardSm90Config>(choice.config);
    EXPECT_TRUE(!c || c->min_atom == 64);
  }
}

TEST(AttentionSearchSpace, is_empty_if_no_kernel_serves_and_portable_if_hoppers_does_not) {
  EXPECT_TRUE(search_space(problem(AttentionOp::kForward, 512, 260), *cuda_device("sm_90a")).choices.empty());
  EXPECT_EQ(search_space(problem(AttentionOp::kForward, 512, 64), cpu_device(2)).choices.size(), 1U);
  const auto backward = search_space(problem(AttentionOp::kBackward, 512, 64), *cuda_device("sm_90a"));
  EXPECT_EQ(backward.choices.size(), static_cast<std::size_t>(backward.offered)) << "no backward can be searched yet";
  AttentionProblem unaligned = problem(AttentionOp::kForward, 512, 64);
  unaligned.vectors = unaligned.tensor_maps = false;
  for (const auto& space : {search_space(unaligned, *cuda_device("sm_90a")),
                            search_space(problem(AttentionOp::kForward, 512, 64), *cuda_device("sm_80"))}) {
    EXPECT_FALSE(space.choices.empty());
    for (const engine::Choice& choice : space.choices) EXPECT_EQ(choice.kernel.find("sm90"), std::string::npos);
  }
}

TEST(AttentionSearchSpace, every_config_comes_back_from_its_text_as_the_struct_that_it_was) {
  for (const Device& gpu : gpus()) {
    for (const AttentionOp op : {AttentionOp::kForward, AttentionOp::kBackward}) {
      for (const std::int64_t dim : {64, 72, 128, 256}) {
        for (const bool deterministic : {false, true}) {
          AttentionProblem p = problem(op, 2048, dim);
          p.causal = true;
          p.deterministic = op == AttentionOp::kBackward && deterministic;
          for (const engine::Choice& choice : search_space(p, gpu).choices) {
            const std::string text = text_of(choice.config);
            const auto back = engine::config_from_text(text);
            ASSERT_TRUE(back) << text;
            EXPECT_EQ(*back, choice.config) << text;
            EXPECT_EQ(engine::genes_of({choice.kernel, *back}), engine::genes_of(choice));
            const auto* kernel = engine::find_implementation<AttentionFamily>(choice.kernel);
            EXPECT_EQ(kernel->recipe(p, gpu, *back)->steps.size(), kernel->recipe(p, gpu, choice.config)->steps.size());
            const engine::Fields& main = *engine::fields_of_step(choice.config, "main");
            const int structs = int{main_of<AttentionForwardConfig>(choice.config).has_value()} +
                                int{main_of<AttentionForwardSm90Config>(choice.config).has_value()} +
                                int{main_of<AttentionBackwardConfig>(choice.config).has_value()} +
                                int{main_of<AttentionBackwardSm90Config>(choice.config).has_value()} +
                                int{main_of<AttentionBackwardWideSm90Config>(choice.config).has_value()};
            EXPECT_EQ(structs, 1) << "a Config is of one struct alone: " << text;
            if (const auto sm90 = main_of<AttentionForwardSm90Config>(choice.config)) {
              EXPECT_EQ(engine::fields_of(*sm90), main);
            }
          }
        }
      }
    }
  }
}

TEST(AttentionSelect, a_tuned_config_comes_first_and_says_so) {
  const Device gpu = *cuda_device("sm_90a");
  const AttentionProblem p = problem(AttentionOp::kForward, 2048, 128);
  AttentionForwardSm90Config config = some_hopper_config(p);
  config.block_k = 64;
  config.dynamic_scheduler = true;
  const Tuned tuned{"attention_forward_sm90", engine::main_config(config), 123.45, 150};
  const Selection plain = select(p, gpu);
  const Selection selection = select(p, gpu, &tuned);
  const Candidate& first = selection.candidates.front();
  EXPECT_EQ(kernel_of(first), "attention_forward_sm90");
  EXPECT_TRUE(first.tuned);
  EXPECT_EQ(first.offer.config, engine::main_config(config));
  EXPECT_GT(first.offer.workspace, 0U) << "of the dynamic scheduler";
  EXPECT_EQ(first.offer.microseconds, 123.45);
  EXPECT_EQ(first.offer.why, "tuned on this GPU, default 150.0 us");
  EXPECT_EQ(selection.candidates.size(), plain.candidates.size() + 1);
  const std::string text = text_of(engine::explain<AttentionFamily>(p, gpu, selection));
  EXPECT_NE(text.find("chosen  attention_forward_sm90: tuned on this GPU"), std::string::npos) << text;
  // One that is offered anyway is moved, not doubled.
  const Tuned offered{"attention_forward_sm90", engine::main_config(some_hopper_config(p)), 1, 2};
  EXPECT_EQ(select(p, gpu, &offered).candidates.size(), plain.candidates.size());
  const Tuned portable{"attention_forward", chosen(p, *cuda_device("sm_90")).offer.config, 1, 2};
  EXPECT_EQ(kernel_of(select(p, gpu, &portable).candidates.front()), "attention_forward");
}

TEST(AttentionSelect, a_tuned_config_that_does_not_fit_is_ignored) {
  const Device gpu = *cuda_device("sm_90a");
  const AttentionProblem p = problem(AttentionOp::kForward, 2048, 128);
  const auto is_taken = [&](const AttentionProblem& asked, const Device& device,
                            const std::function<void(AttentionForwardSm90Config&)>& change) {
    AttentionForwardSm90Config config = some_hopper_config(p);
    config.dynamic_scheduler = true;  // no default
    change(config);
    const Tuned tuned{"attention_forward_sm90", engine::main_config(config), 1, 2};
    return select(asked, device, &tuned).candidates.front().tuned;
  };
  EXPECT_TRUE(is_taken(p, gpu, [](auto&) {}));
  EXPECT_FALSE(is_taken(p, *cuda_device("sm_80"), [](auto&) {}));
  EXPECT_FALSE(is_taken(p, *cuda_device("sm_90"), [](auto&) {})) << "no wgmma";
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.stages = 4; })) << "shared memory";
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.consumers = 4; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.block_k = 72; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.ctas_per_sm = 2; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.min_atom = 32; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.intra_cta_split = true; })) << "and ping-pong";
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.intra_cta_split = true, c.ping_pong = false, c.consumers = 2; }))
      << "three stages for two consumers";
  const auto split = [](AttentionForwardSm90Config& c) {
    c.intra_cta_split = true, c.ping_pong = false, c.consumers = c.stages = 2, c.q_stages = 1;
  };
  EXPECT_FALSE(is_taken(p, gpu, split)) << "and a dynamic scheduler";
  EXPECT_TRUE(is_taken(p, gpu, [&](auto& c) { split(c), c.dynamic_scheduler = false; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.dim_v = 64; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.dtype = DType::kBFloat16; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.masked = true; }));
  EXPECT_FALSE(is_taken(p, gpu, [](auto& c) { c.score_mod = true; }));
  AttentionProblem other = p;
  other.tensor_maps = false;
  EXPECT_FALSE(is_taken(other, gpu, [](auto&) {})) << "TMA cannot read it";
  other = p;
  other.op = AttentionOp::kBackward;
  EXPECT_FALSE(is_taken(other, gpu, [](auto&) {}));
}

TEST(AttentionSelect, a_tuned_config_of_another_version_is_ignored) {
  const Device gpu = *cuda_device("sm_90a");
  const AttentionProblem p = problem(AttentionOp::kForward, 2048, 128);
  AttentionForwardSm90Config config = some_hopper_config(p);
  config.dynamic_scheduler = true;
  const auto is_taken = [&](const std::function<void(engine::Fields&)>& change, const char* kernel) {
    Tuned tuned{kernel, engine::main_config(config), 1, 2};
    change(tuned.config.front().fields);
    return select(p, gpu, &tuned).candidates.front().tuned;
  };
  const char* kernel = "attention_forward_sm90";
  EXPECT_TRUE(is_taken([](engine::Fields&) {}, kernel));
  EXPECT_FALSE(is_taken([](engine::Fields& f) { f.pop_back(); }, kernel)) << "a field that it did not know";
  EXPECT_FALSE(is_taken([](engine::Fields& f) { f.push_back({"extra", std::int64_t{0}}); }, kernel));
  EXPECT_FALSE(is_taken([](engine::Fields& f) { f.back().name = "renamed"; }, kernel));
  EXPECT_FALSE(is_taken([](engine::Fields& f) { f.back().value = std::int64_t{0}; }, kernel));
  EXPECT_FALSE(is_taken([](engine::Fields&) {}, "attention_forward")) << "a Config of another kernel";
  EXPECT_FALSE(is_taken([](engine::Fields&) {}, "no_such_kernel"));
}

}  // namespace
}  // namespace tessera::attention
