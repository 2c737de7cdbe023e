#include <map>
#include <set>

#include "attention/family.h"
#include "attention/forward_sm90.h"
#include "base/arch.h"
#include "engine/select.h"
#include "tests/cuda/helpers.h"
#include "tile/scheduler.h"

namespace tessera::attention {
namespace {

using engine::cuda_device;

engine::Selection<AttentionFamily> selected(const AttentionProblem& problem, const char* arch) {
  return engine::select<AttentionFamily>(problem, *cuda_device(arch));
}

constexpr std::uintptr_t kAddress = 1 << 30;

AttentionForwardSm90Config config_for(int dim, int min_atom) {
  auto config = forward_sm90_configs(DType::kBFloat16, dim, dim, true, false).front();
  config.min_atom = min_atom;
  return config;
}

AttentionArgs args_for(int dim, bool packed) {
  AttentionArgs args;
  AttentionProblem& p = args.problem;
  p.dtype = DType::kBFloat16;
  p.batch = 3;
  p.seq_q = p.seq_k = 200;
  p.heads_q = p.heads_kv = 4;
  p.dim_qk = p.dim_v = dim;
  p.varlen = packed;
  p.total_q = p.total_k = packed ? 450 : 0;
  const std::int64_t row = 4 * dim;
  args.q = args.k = args.v = {reinterpret_cast<void*>(kAddress), packed ? 0 : 200 * row, row, dim};
  return args;
}

TEST(ForwardSm90, swizzle_atoms_cover_every_column_once) {
  for (int dim = 8; dim <= 256; dim += 8) {
    for (const int min_atom : {64, 16}) {
      int column = 0;
      while (column < padded_dim(dim, min_atom)) {
        const SwizzleAtom atom = atom_at(dim, min_atom, column);
        ASSERT_EQ(atom.column, column) << dim;
        for (int c = column; c < column + atom.width; ++c) {
          ASSERT_EQ(atom_at(dim, min_atom, c).column, column) << dim << " at " << c;
        }
        // A swizzle repeats every eight of its rows; a tile has a multiple of 16.
        ASSERT_EQ(atom_offset(atom, 16) % (8 * atom.width * 2), 0) << dim;
        column += atom.width;
      }
      EXPECT_EQ(column, padded_dim(dim, min_atom));
      EXPECT_GE(column, dim);
      EXPECT_LT(column - dim, min_atom == 64 ? 64 : 16);
    }
  }
}

TEST(ForwardSm90, default_tiles_fit_shared_memory) {
  for (int dim_qk = 8; dim_qk <= 256; dim_qk += 8) {
    for (int dim_v = 8; dim_v <= 256; dim_v += 8) {
      for (const bool masked : {false, true}) {
        for (const bool score_mod : {false, true}) {
          for (const int longest : {17, 100, 4096}) {
            for (const auto& config :
                 forward_sm90_configs(DType::kBFloat16, dim_qk, dim_v, masked, score_mod, longest)) {
              ASSERT_LE(config.ctas_per_sm * (forward_sm90_layout(config).bytes + 1024),
                        limits_of(90).shared_memory_per_block + 1024)  // the SM has a kilobyte more
                  << dim_qk << ", " << dim_v;
            }
          }
        }
      }
    }
  }
}

TEST(ForwardSm90, masked_tiles_that_are_worked_on_together_are_several_times_as_many_as_sms) {
  const auto together = [](int dim, std::int64_t seq, bool causal) {
    AttentionArgs args = args_for(dim, false);
    AttentionProblem& p = args.problem;
    p.batch = 1;
    p.heads_q = p.heads_kv = 8;
    p.seq_q = p.seq_k = seq;
    p.causal = causal;
    const auto config = forward_sm90_configs(DType::kBFloat16, dim, dim, causal, false).front();
    return forward_sm90_work(args, config, 132)->params.together.by;
  };
  EXPECT_EQ(together(192, 8192, false), 4U);  // of 5 whose K and V fit the cache, in equal groups
  EXPECT_EQ(together(192, 8192, true), 8U);
  EXPECT_EQ(together(256, 16384, false), 2U);
  EXPECT_EQ(together(256, 16384, true), 4U);
  EXPECT_EQ(together(128, 16384, true), together(128, 16384, false));
}

TEST(ForwardSm90, short_tiles_that_are_worked_on_together_are_as_few_as_occupy_the_ctas) {
  const auto together = [](std::int64_t seq, std::int64_t heads_kv, bool causal) {
    AttentionArgs args = args_for(128, false);
    AttentionProblem& p = args.problem;
    p.batch = 32;
    p.heads_q = 16;
    p.heads_kv = heads_kv;
    p.seq_q = p.seq_k = seq;
    p.causal = causal;
    const auto config = forward_sm90_configs(DType::kBFloat16, 128, 128, causal, false).front();
    return forward_sm90_work(args, config, 132)->params.together.by;
  };
  EXPECT_EQ(together(512, 16, false), 44U);  // of 3 tiles each; K and V of 128 would fit the cache
  EXPECT_EQ(together(512, 2, false), 48U);   // whole groups of heads that share keys
  EXPECT_EQ(together(512, 16, true), 128U);
  EXPECT_EQ(together(2048, 16, false), 12U);
  EXPECT_EQ(together(4096, 16, false), 16U);
}

TEST(ForwardSm90, a_box_ends_with_the_head_dim_so_that_what_fills_up_a_tile_is_zero) {
  const auto boxes = forward_sm90_boxes(args_for(112, false), config_for(112, 16));
  ASSERT_TRUE(boxes.ok());
  ASSERT_EQ(boxes->k.count, 3);
  const std::uint32_t widths[] = {64, 32, 16};
  for (std::size_t i = 0; i < 3; ++i) {
    const cuda::TensorBox& box = boxes->k.box[i];
    EXPECT_EQ(box.columns, widths[i]);
    EXPECT_EQ(box.address, kAddress);
    EXPECT_EQ(box.extents, (std::array<std::uint64_t, 4>{112, 200, 4, 3}));
    EXPECT_EQ(box.strides, (std::array<std::uint64_t, 3>{2 * 448, 2 * 112, 2 * 448 * 200}));
    EXPECT_EQ(box.rows, static_cast<std::uint32_t>(config_for(112, 16).block_k));
  }
  const auto wide = forward_sm90_boxes(args_for(72, false), config_for(72, 64));
  ASSERT_TRUE(wide.ok());
  ASSERT_EQ(wide->q.count, 1);
  EXPECT_EQ(wide->q.box[0].extents[0], 72U);
  EXPECT_EQ(wide->q.box[0].rows, static_cast<std::uint32_t>(block_q_of(config_for(72, 64))));
}

TEST(ForwardSm90, packed_rows_are_found_and_rows_beyond_their_sequence_are_outside_of_the_box) {
  const auto boxes = forward_sm90_boxes(args_for(64, true), config_for(64, 64));
  ASSERT_TRUE(boxes.ok());
  const cuda::TensorBox& box = boxes->k.box[0];
  const int starts[] = {0, 200, 260, 450};
  for (int sequence = 0; sequence < 3; ++sequence) {
    const int begin = starts[sequence];
    const int length = starts[sequence + 1] - begin;
    const RowOrigin origin = row_origin(200, length, begin);
    for (int row = 0; row < 300; ++row) {
      const bool inside = static_cast<std::uint64_t>(origin.y + row) < box.extents[1] &&
                          static_cast<std::uint64_t>(origin.z) < box.extents[3];
      ASSERT_EQ(inside, row < length) << sequence << ", " << row;
      if (!inside) continue;
      const std::uintptr_t address = box.address + static_cast<std::uint64_t>(origin.y + row) * box.strides[0] +
                                     static_cast<std::uint64_t>(origin.z) * box.strides[2];
      ASSERT_EQ(address, kAddress + static_cast<std::uint64_t>(begin + row) * 2 * 256);
    }
  }
}

TEST(ForwardSm90, a_divisor_divides_every_number_below_two_to_the_31) {
  constexpr unsigned kLargest = 0x7fffffffU;
  std::set<unsigned> divisors = {kLargest, kLargest - 1, 1U << 31};
  for (unsigned by = 1; by <= 600; ++by) divisors.insert(by);
  for (unsigned power = 1; power < 31; ++power) {
    for (const unsigned by : {(1U << power) - 1, 1U << power, (1U << power) + 1}) divisors.insert(by);
  }
  for (const unsigned by : divisors) {
    const Divisor d = divisor(by);
    std::set<unsigned> dividends = {0, 1, kLargest - 1, kLargest};
    for (unsigned step = 0; step <= 1000; ++step) {  // multiples, and what is just below them, where errors would show
      const auto multiple = static_cast<unsigned>(std::uint64_t{kLargest / by} * step / 1000) * by;
      dividends.insert({multiple, multiple > 0 ? multiple - 1 : 0, std::min(multiple, kLargest - by / 2) + by / 2});
    }
    for (const unsigned n : dividends) ASSERT_EQ(d.quotient(n), n / by) << n << " / " << by;
  }
}

TEST(ForwardSm90, every_tile_is_taken_once_and_the_first_of_a_section_before_the_others) {
  for (const unsigned blocks : {1U, 7U, 132U}) {
    for (const unsigned tiles : {1U, 5U, 13U}) {
      for (const unsigned together : {1U, 4U, 9U, 24U}) {
        constexpr unsigned kHeads = 8, kColumns = 24;
        std::map<unsigned, unsigned> seen;  // tile: by how many
        for (unsigned block = 0; block < blocks; ++block) {
          for (unsigned round = 0; own_index(round, block, blocks) < tiles * kColumns; ++round) {
            const WorkItem item =
                work_item(own_index(round, block, blocks), tiles, kColumns, divisor(kHeads), divisor(together));
            ASSERT_LT(item.head, kHeads);
            ++seen[(item.batch * kHeads + item.head) * tiles + item.tile];
          }
        }
        ASSERT_EQ(seen.size(), tiles * kColumns) << blocks << ", " << tiles << ", " << together;
        for (const auto& [tile, count] : seen) ASSERT_EQ(count, 1U) << tile;
        EXPECT_EQ(work_item(0, tiles, kColumns, divisor(kHeads), divisor(together)).tile, 0U);
      }
    }
  }
}

TEST(ForwardSm90, one_packed_row_gets_strides_that_the_driver_takes) {
  AttentionArgs args = args_for(64, true);
  args.problem.total_k = 1;
  args.k.seq_stride = args.v.seq_stride = 0;  // as the check leaves it where there is one row
  const auto boxes = forward_sm90_boxes(args, config_for(64, 64));
  ASSERT_TRUE(boxes.ok());
  for (const cuda::TensorBox& box : boxes->k) {
    for (const std::uint64_t stride : box.strides) EXPECT_GT(stride, 0U);
    const auto longest = static_cast<std::uint64_t>(args.problem.seq_k);
    // Row 0 is at y = longest - 1, z = 1.
    EXPECT_EQ(box.address + (longest - 1) * box.strides[0] + box.strides[2],
              reinterpret_cast<std::uintptr_t>(args.k.data));
  }
}

TEST(ForwardSm90, is_chosen_on_hopper_and_nowhere_else) {
  AttentionProblem problem = args_for(128, false).problem;
  const auto hopper = selected(problem, "sm_90a");
  ASSERT_FALSE(hopper.candidates.empty());
  EXPECT_EQ(hopper.candidates.front().implementation->name, std::string("attention_forward_sm90"));
  EXPECT_EQ(hopper.candidates.back().implementation->name, std::string("attention_forward"));
  problem.tensor_maps = false;
  std::set<std::string> refused;
  for (const auto& refusal : selected(problem, "sm_90a").refusals) {
    refused.insert(refusal.kernel);
  }
  EXPECT_TRUE(refused.count("attention_forward_sm90"));
  problem.tensor_maps = true;
  for (const char* arch : {"sm_89", "sm_90"}) {
    for (const auto& candidate : selected(problem, arch).candidates) {
      EXPECT_NE(candidate.implementation->name, std::string("attention_forward_sm90"));
    }
  }
}

TEST(ForwardSm90, consumers_split_a_tile_if_few_queries_see_many_keys) {
  const auto is_split = [](std::int64_t batch, std::int64_t seq_q, std::int64_t seq_k, int dim, bool causal) {
    AttentionProblem problem = args_for(dim, false).problem;
    problem.batch = batch;
    problem.heads_q = problem.heads_kv = 8;
    problem.seq_q = seq_q;
    problem.seq_k = seq_k;
    problem.causal = causal;
    problem.alignment = Alignment::kBottomRight;
    problem.scale = 0.125f;
    const auto chosen = selected(problem, "sm_90a").candidates.front();
    const auto config = engine::from_main<AttentionForwardSm90Config>(chosen.offer.config);
    return config && config->intra_cta_split;
  };
  for (const bool causal : {false, true}) {
    for (const int dim : {32, 64, 80, 128}) {
      EXPECT_TRUE(is_split(1, 512, 512, dim, causal)) << dim;
      EXPECT_TRUE(is_split(1, 64, 4096, dim, causal)) << dim;
      EXPECT_FALSE(is_split(32, 512, 512, dim, causal)) << dim;
      EXPECT_FALSE(is_split(1, 8192, 8192, dim, causal)) << dim;
    }
    EXPECT_FALSE(is_split(1, 64, 64, 64, causal));
    EXPECT_FALSE(is_split(32, 128, 128, 64, causal));
    EXPECT_FALSE(is_split(1, 512, 512, 192, causal));
  }
}

TEST(ForwardSm90, keys_of_one_tile_stay_if_many_query_tiles_share_them) {
  AttentionProblem problem = args_for(64, false).problem;
  problem.batch = 64;
  problem.heads_q = problem.heads_kv = 8;
  problem.seq_q = 564;
  problem.seq_k = 64;
  problem.scale = 0.125f;
  const auto keys_that_stay = [](const AttentionProblem& p) {  // of a tile, 0: they are loaded for every query tile
    const auto config =
        engine::from_main<AttentionForwardSm90Config>(selected(p, "sm_90a").candidates.front().offer.config);
    if (!config || !config->few_keys) return 0;
    EXPECT_LE(config->ctas_per_sm * (forward_sm90_layout(*config).bytes + 1024), limits_of(90).shared_memory_per_block);
    EXPECT_GE(65536 / (config->ctas_per_sm * threads_of(*config)), 96) << "registers";
    return config->block_k;
  };
  EXPECT_EQ(keys_that_stay(problem), 64);
  const auto changed = [&](const auto& change) {
    AttentionProblem p = problem;
    change(p);
    return keys_that_stay(p);
  };
  EXPECT_EQ(changed([](AttentionProblem& p) { p.seq_k = 17; }), 32);
  EXPECT_EQ(changed([](AttentionProblem& p) { p.heads_kv = 2; }), 64);
  EXPECT_EQ(changed([](AttentionProblem& p) { p.dim_qk = p.dim_v = 40; }), 64);
  EXPECT_EQ(changed([](AttentionProblem& p) {
              p.causal = true;
              p.alignment = Alignment::kBottomRight;
            }),
            64);
  EXPECT_EQ(changed([](AttentionProblem& p) {
              p.varlen = true;
              p.total_q = 64 * 500;
              p.total_k = 64 * 60;
            }),
            64);
  EXPECT_EQ(changed([](AttentionProblem& p) { p.seq_k = 65; }), 0);
  EXPECT_EQ(changed([](AttentionProblem& p) { p.seq_q = 128; }), 0) << "nothing to keep them for";
  EXPECT_EQ(changed([](AttentionProblem& p) { p.dim_v = 72; }), 0);
  EXPECT_EQ(changed([](AttentionProblem& p) { p.softcap = 30.0f; }), 0);
}

TEST(ForwardSm90, partial_results_of_an_intra_cta_split_lie_between_the_tiles_and_the_barriers) {
  for (const int dim : {64, 80, 128}) {
    const auto config = forward_sm90_configs(DType::kBFloat16, dim, dim, true, false).back();
    ASSERT_TRUE(config.intra_cta_split);
    EXPECT_EQ(block_q_of(config), 64);
    const ForwardSm90Layout at = forward_sm90_layout(config);
    EXPECT_EQ(at.q_stage, 64 * padded_dim(dim, config.min_atom) * 2);
    EXPECT_EQ(at.parts, at.v + config.stages * at.v_stage);
    EXPECT_EQ(at.parts % 16, 0);
    // O, two references and two sums for each thread of all consumers but one, fp32.
    EXPECT_EQ(at.q_full - at.parts, (config.consumers - 1) * kWarpgroup * (64 * dim / kWarpgroup + 4) * 4);
    auto alone = config;
    alone.intra_cta_split = false;
    EXPECT_EQ(forward_sm90_layout(alone).parts, forward_sm90_layout(alone).q_full);
  }
}

TEST(ForwardSm90, packed_gqa_boxes_hold_all_heads_of_a_group_query_by_query) {
  AttentionArgs args = args_for(64, true);
  args.problem.heads_q = 8;
  args.problem.heads_kv = 2;
  AttentionForwardSm90Config config = config_for(64, 64);
  config.pack_gqa = true;
  ASSERT_TRUE(can_pack_gqa(args.problem, config));
  const auto packed = forward_sm90_boxes(args, config);
  config.pack_gqa = false;
  const auto plain = forward_sm90_boxes(args, config);
  ASSERT_TRUE(packed.ok() && plain.ok());
  const cuda::TensorBox& q = packed->q.box[0];
  EXPECT_EQ(q.rows, 4U);
  EXPECT_EQ(q.rows * q.layers, static_cast<std::uint32_t>(block_q_of(config)));
  const cuda::TensorBox& other = plain->q.box[0];
  EXPECT_EQ(q.address, other.address);
  EXPECT_EQ(q.extents, (std::array{other.extents[0], other.extents[2], other.extents[1], other.extents[3]}));
  EXPECT_EQ(q.strides, (std::array{other.strides[1], other.strides[0], other.strides[2]}));
  EXPECT_EQ(packed->k.box[0], plain->k.box[0]);
}

TEST(ForwardSm90, gqa_is_packed_only_if_a_tile_holds_whole_groups) {
  AttentionProblem problem = args_for(64, false).problem;
  AttentionForwardSm90Config config = config_for(64, 64);
  config.consumers = 1;  // 64 rows
  const auto fits = [&](std::int64_t heads, std::int64_t heads_kv) {
    problem.heads_q = heads;
    problem.heads_kv = heads_kv;
    return can_pack_gqa(problem, config);
  };
  EXPECT_TRUE(fits(8, 2));
  EXPECT_TRUE(fits(64, 1));
  EXPECT_FALSE(fits(8, 8));
  EXPECT_FALSE(fits(12, 4));
  EXPECT_FALSE(fits(128, 1));
  config.consumers = 3;  // 192
  EXPECT_TRUE(fits(12, 4));
  problem.seq_q = std::int64_t{1} << 30;
  EXPECT_FALSE(fits(12, 4));
}

TEST(ForwardSm90, tensor_maps_are_made_by_the_driver) {
  REQUIRE_DEVICE();
  const auto scope = cuda::ContextScope::enter(cuda::kDevice);  // as a launch does: no test before need have made one
  ASSERT_TRUE(scope.ok()) << scope.status().message();
  const auto boxes = forward_sm90_boxes(args_for(112, false), config_for(112, 16));
  ASSERT_TRUE(boxes.ok());
  for (const cuda::TensorBox& box : boxes->k) {
    const auto map = cuda::encode(box);
    EXPECT_TRUE(map.ok()) << map.status().message();
  }
}

}  // namespace
}  // namespace tessera::attention
