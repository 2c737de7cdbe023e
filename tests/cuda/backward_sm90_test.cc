#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "attention/backward_sm90.h"
#include "attention/backward_steps.h"
#include "attention/family.h"
#include "base/arch.h"
#include "engine/select.h"
#include "tests/cuda/helpers.h"
#include "tile/mask.h"

namespace tessera::attention {
namespace {

using engine::cuda_device;
using engine::Device;

engine::Selection<AttentionFamily> selected(const AttentionProblem& problem, const Device& device) {
  return engine::select<AttentionFamily>(problem, device);
}

constexpr std::uintptr_t kAddress = 1 << 30;

AttentionBackwardSm90Config config_for(int dim_qk, int dim_v) {
  return backward_sm90_configs(DType::kBFloat16, dim_qk, dim_v, true, false, 4096).front();
}

AttentionArgs args_for(int dim_qk, int dim_v, bool packed) {
  AttentionArgs args;
  AttentionProblem& p = args.problem;
  p.op = AttentionOp::kBackward;
  p.dtype = DType::kBFloat16;
  p.batch = 3;
  p.seq_q = 200;
  p.seq_k = 300;
  p.heads_q = 8;
  p.heads_kv = 4;
  p.dim_qk = dim_qk;
  p.dim_v = dim_v;
  p.scale = 1;
  p.varlen = packed;
  p.total_q = packed ? 450 : 0;
  p.total_k = packed ? 700 : 0;
  const auto view = [&](std::uintptr_t address, std::int64_t seq, std::int64_t heads, std::int64_t dim) {
    return TensorView{reinterpret_cast<void*>(address), packed ? 0 : seq * heads * dim, heads * dim, dim};
  };
  args.q = view(kAddress, 200, 8, dim_qk);
  args.d_o = view(2 * kAddress, 200, 8, dim_v);
  args.k = view(3 * kAddress, 300, 4, dim_qk);
  args.v = view(4 * kAddress, 300, 4, dim_v);
  return args;
}

TEST(BackwardSm90, default_tiles_fit_shared_memory_and_the_register_file) {
  int tiles = 0;
  for (int dim_qk = 8; dim_qk <= 256; dim_qk += 8) {
    for (int dim_v = 8; dim_v <= 256; dim_v += 8) {
      auto configs = backward_sm90_configs(DType::kBFloat16, dim_qk, dim_v, true, false, 4096);
      for (const AttentionBackwardSm90Config& few :
           backward_sm90_configs(DType::kBFloat16, dim_qk, dim_v, true, false, 64)) {
        EXPECT_EQ(few.writes_dq, dim_qk <= 88) << dim_qk;
        configs.push_back(few);
      }
      ASSERT_EQ(configs.empty(), dim_qk > 128 || dim_v > 128) << dim_qk << ", " << dim_v;
      for (const AttentionBackwardSm90Config& config : configs) {
        ++tiles;
        ASSERT_LE(config.ctas_per_sm * (backward_sm90_layout(config).bytes + 1024),
                  limits_of(90).shared_memory_per_block + 1024);
        const int consumer = consumer_registers(config);
        const int producer = producer_registers(config);
        for (const int registers : {consumer, producer, config.dq_registers}) {
          ASSERT_EQ(registers % 8, 0);  // setmaxnreg's grain and least
          ASSERT_GE(registers, 24);
        }
        ASSERT_LE(config.ctas_per_sm * kWarpgroup * (producer + config.dq_registers + config.consumers * consumer),
                  65536);
        ASSERT_GE(consumer, (dim_qk + dim_v) / 2 + 48 + 30);
        if (config.accumulators == 2) {
          ASSERT_GE(config.stages, 3);
        }
      }
    }
  }
  EXPECT_EQ(tiles, 2 * 16 * 16);
}

TEST(BackwardSm90, what_is_in_shared_memory_does_not_overlap_and_tiles_keep_to_their_swizzle) {
  for (const int dim : {8, 64, 80, 128}) {
    const AttentionBackwardSm90Config config = config_for(dim, dim);
    const BackwardSm90Layout at = backward_sm90_layout(config);
    const int padded = (dim + 63) / 64 * 64;
    std::map<int, int> pieces;  // begin: end
    const auto add = [&](int begin, int bytes, int alignment) {
      ASSERT_EQ(begin % alignment, 0) << dim;
      ASSERT_TRUE(pieces.emplace(begin, begin + bytes).second) << dim;
    };
    add(at.k, 128 * padded * 2, kTileAlignment);
    add(at.v, 128 * padded * 2, kTileAlignment);
    add(at.k_full, 8, 8);
    add(at.v_full, 8, 8);
    add(at.steps, 4, 8);
    add(at.start, 4, 4);
    for (int i = 0; i < config.stages; ++i) {
      add(at.q + i * at.q_stage, config.block_q * padded * 2, kTileAlignment);
      add(at.d_o + i * at.d_o_stage, config.block_q * padded * 2, kTileAlignment);
      add(at.rows + i * at.rows_stage, (2 * config.block_q + kStepWords) * 4, 16);
      add(at.q_full + i * 8, 8, 8);
      add(at.d_o_full + i * 8, 8, 8);
      add(at.empty + i * 8, 8, 8);
    }
    for (int i = 0; i < config.ds_stages; ++i) {
      add(at.ds + i * at.ds_stage, 128 * config.block_q * 2, kTileAlignment);
      add(at.ds_full + i * 8, 8, 8);
      add(at.ds_empty + i * 8, 8, 8);
    }
    int end = 0;
    for (const auto& [piece_begin, piece_end] : pieces) {
      ASSERT_GE(piece_begin, end) << dim;
      end = piece_end;
    }
    EXPECT_EQ(end, at.bytes);
  }
}

TEST(BackwardSm90, a_lane_finds_its_rows_values_of_16_queries_side_by_side) {
  for (int step = 0; step < 4; ++step) {
    for (int lane = 0; lane < 4; ++lane) {  // of a quad: columns 2 lane and 2 lane + 1 of each 8
      for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(row_slot(step * 16 + i / 2 * 8 + lane * 2 + i % 2), step * 16 + lane * 4 + i);
      }
    }
  }
}

TEST(BackwardSm90, boxes_are_of_a_step_s_queries_and_a_cta_s_keys) {
  const AttentionBackwardSm90Config config = config_for(72, 128);
  const auto boxes = backward_sm90_boxes(args_for(72, 128, false), config);
  ASSERT_TRUE(boxes.ok());
  const auto expect = [](const AtomBoxes& list, std::uintptr_t address, std::array<std::uint64_t, 4> extents,
                         std::uint32_t rows) {
    ASSERT_EQ(list.count, 1);
    const cuda::TensorBox& box = list.box[0];
    EXPECT_EQ(box.address, address);
    EXPECT_EQ(box.extents, extents);
    EXPECT_EQ(box.strides, (std::array<std::uint64_t, 3>{2 * extents[0] * extents[2], 2 * extents[0],
                                                         2 * extents[0] * extents[2] * extents[1]}));
    EXPECT_EQ(box.columns, 64U);
    EXPECT_EQ(box.rows, rows);
  };
  expect(boxes->q, kAddress, {72, 200, 8, 3}, 64);
  expect(boxes->d_o, 2 * kAddress, {128, 200, 8, 3}, 64);
  expect(boxes->k, 3 * kAddress, {72, 300, 4, 3}, 128);
  expect(boxes->v, 4 * kAddress, {128, 300, 4, 3}, 128);
}

// What that is good for: attention/forward_sm90_config.h, RowOrigin, and its test there.
TEST(BackwardSm90, packed_boxes_begin_as_many_rows_before_their_tensor_as_the_longest_sequence_has) {
  const auto boxes = backward_sm90_boxes(args_for(64, 64, true), config_for(64, 64));
  ASSERT_TRUE(boxes.ok());
  EXPECT_EQ(boxes->d_o.box[0].address, 2 * kAddress - 200 * 2 * 512);
  EXPECT_EQ(boxes->d_o.box[0].extents, (std::array<std::uint64_t, 4>{64, 200, 8, 451}));
  EXPECT_EQ(boxes->v.box[0].address, 4 * kAddress - 300 * 2 * 256);
  EXPECT_EQ(boxes->v.box[0].extents, (std::array<std::uint64_t, 4>{64, 300, 4, 701}));
}

TEST(BackwardSm90, every_tile_of_keys_has_one_cta_and_the_first_keys_of_a_section_come_first) {
  for (const unsigned k_tiles : {1U, 5U, 13U}) {
    for (const unsigned together : {1U, 4U, 5U, 24U}) {
      constexpr unsigned kHeads = 8, kColumns = 24;
      std::map<unsigned, unsigned> seen;  // tile: by how many
      unsigned last_tile = 0;
      for (unsigned block = 0; block < k_tiles * kColumns; ++block) {
        const WorkItem item = work_item(block, k_tiles, kColumns, divisor(kHeads), divisor(together));
        ASSERT_LT(item.head, kHeads);
        ASSERT_LT(item.batch, kColumns / kHeads);
        ++seen[(item.batch * kHeads + item.head) * k_tiles + item.tile];
        if (block % (together * k_tiles) == 0) {
          ASSERT_EQ(item.tile, 0U);
        } else {
          ASSERT_GE(item.tile, last_tile);
        }
        last_tile = item.tile;
      }
      ASSERT_EQ(seen.size(), k_tiles * kColumns) << k_tiles << ", " << together;
      for (const auto& [tile, count] : seen) ASSERT_EQ(count, 1U) << tile;
    }
  }
}

TEST(BackwardSm90, a_cta_walks_over_just_the_tiles_of_queries_that_see_one_of_its_keys) {
  constexpr int kBlockQ = 64, kBlockK = 128;
  const int lengths[][2] = {{1, 1}, {64, 128}, {65, 200}, {300, 300}, {200, 65}, {700, 129}};
  const Mask masks[] = {{false, false, -1, -1}, {true, false, -1, -1}, {true, true, -1, -1},
                        {false, false, 17, 5},  {false, true, 0, 0},   {true, true, 100, -1}};
  for (const auto& [len_q, len_k] : lengths) {
    for (const Mask& mask : masks) {
      const auto edge = [](std::int64_t window) { return window < 0 ? kUnbounded : static_cast<int>(window); };
      const Band band{edge(mask.window_left), mask.causal ? 0 : edge(mask.window_right), mask.bottom_right, 0};
      for (int first_k = 0; first_k < len_k; first_k += kBlockK) {
        const int last_k = std::min(first_k + kBlockK, len_k) - 1;
        const QueryTiles tiles =
            query_tiles(band, mask.bottom_right ? len_k - len_q : 0, first_k, last_k, len_q, kBlockQ);
        for (int tile = 0; tile * kBlockQ < len_q; ++tile) {
          bool sees = false;
          for (int query = tile * kBlockQ; query < std::min((tile + 1) * kBlockQ, len_q); ++query) {
            const Range keys = visible_keys(mask, query, len_q, len_k);
            sees |= !keys.empty() && keys.begin <= last_k && keys.end > first_k;
          }
          const bool walked = tile >= tiles.first && tile < tiles.first + tiles.count;
          // What lies between two that see is walked over; a band leaves no gap.
          ASSERT_EQ(walked, sees) << len_q << ", " << len_k << ", keys from " << first_k << ", tile " << tile;
        }
      }
    }
  }
}

TEST(BackwardSm90, heads_that_are_worked_on_together_fit_the_cache_in_equal_groups) {
  AttentionArgs args = args_for(128, 128, false);
  args.problem.batch = 2;
  args.problem.heads_q = args.problem.heads_kv = 16;
  args.problem.seq_q = args.problem.seq_k = 8192;
  const auto work = backward_sm90_work(args, config_for(128, 128));
  ASSERT_TRUE(work.ok());
  EXPECT_EQ(work->grid.x, 64U * 32);
  EXPECT_EQ(work->params.together.by, 4U);  // 8 MiB each of Q, dO and dQ's sums
  args.problem.heads_kv = 4;                // 4 query heads each, of which the CTAs of a key head are at two at a time
  EXPECT_EQ(backward_sm90_work(args, config_for(128, 128))->params.together.by, 2U);
  args.problem.seq_q = 1 << 20;
  EXPECT_EQ(backward_sm90_work(args, config_for(128, 128))->params.together.by, 1U);
}

TEST(BackwardSm90, parts_of_a_group_cover_its_query_heads_once) {
  AttentionArgs args = args_for(128, 128, false);
  args.problem.batch = 2;
  AttentionBackwardSm90Config config = config_for(128, 128);
  config.splits_group = true;
  for (const int group : {2, 3, 7, 8, 32}) {
    args.problem.heads_kv = 3;
    args.problem.heads_q = 3 * group;
    for (int part_heads = 1; part_heads < group; ++part_heads) {
      const auto work = backward_sm90_work(args, config, part_heads);
      ASSERT_TRUE(work.ok());
      const AttentionBackwardSm90Params& params = work->params;
      const int parts = static_cast<int>(params.by_parts.by);
      EXPECT_EQ(params.part_heads, static_cast<unsigned>(part_heads));
      EXPECT_GE(parts * part_heads, group);
      EXPECT_LT((parts - 1) * part_heads, group);  // no part is empty
      EXPECT_EQ(params.columns, 2U * 3U * static_cast<unsigned>(parts));
      EXPECT_EQ(params.by_heads.by, 3U * static_cast<unsigned>(parts));
      EXPECT_EQ(work->grid.x, params.columns * params.k_tiles);
    }
  }
}

TEST(BackwardSm90, few_keys_need_neither_sums_nor_an_order_of_adding) {
  AttentionProblem problem = args_for(64, 64, false).problem;
  problem.batch = 2;
  problem.seq_q = 1000;
  const std::int64_t row_values = 2 * problem.heads_q * 1000 * 4;  // of delta, and of LSE
  for (const bool deterministic : {false, true}) {
    problem.deterministic = deterministic;
    for (const std::int64_t keys : {1, 64, 65, 128, 129}) {
      problem.seq_k = keys;
      const auto config = backward_sm90_configs(DType::kBFloat16, 64, 64, false, deterministic, keys).front();
      EXPECT_EQ(block_k_of(config), keys <= 64 ? 64 : 128) << keys;
      EXPECT_EQ(config.writes_dq, keys <= 128) << keys;
      EXPECT_EQ(config.deterministic, deterministic && keys > 128) << keys;
      const auto bytes = backward_sm90_workspace(problem, config);
      ASSERT_TRUE(bytes.ok());
      const auto sums = static_cast<std::int64_t>(*bytes) - 2 * row_values;
      EXPECT_EQ(sums >= 2 * problem.heads_q * 1000 * 64 * 4, keys > 128) << keys << ": " << sums;
      EXPECT_GE(sums, 0);
    }
  }
}

TEST(BackwardSm90, groups_are_divided_if_that_fills_the_gpu_better) {
  const Device hopper = *cuda_device("sm_90a");
  const auto splits = [&](std::int64_t batch, std::int64_t seq, std::int64_t heads_q, std::int64_t heads_kv,
                          bool deterministic = false) {
    AttentionProblem problem = args_for(128, 128, false).problem;
    problem.batch = batch;
    problem.seq_q = problem.seq_k = seq;
    problem.heads_q = heads_q;
    problem.heads_kv = heads_kv;
    problem.causal = true;
    problem.deterministic = deterministic;
    const auto selection = selected(problem, hopper);
    const auto& best = selection.candidates.front();
    EXPECT_EQ(best.implementation->name, std::string("attention_backward_sm90"));
    return best.offer.why.find("dK and dV summed") != std::string::npos;
  };
  EXPECT_TRUE(splits(1, 4096, 32, 1));  // 32 CTAs for 132 SMs
  EXPECT_TRUE(splits(1, 2048, 32, 8));  // 128, of which the first takes twice the mean
  EXPECT_TRUE(splits(1, 2048, 32, 8, true));
  EXPECT_FALSE(splits(8, 2048, 32, 8));  // 1024
  EXPECT_FALSE(splits(8, 2048, 32, 32));
  EXPECT_FALSE(splits(8, 2048, 32, 32, true));
  EXPECT_FALSE(splits(64, 2048, 32, 8, true));  // 8192
}

// A slice that no CTA adds would leave the others' sums unwritten.
TEST(BackwardSm90, slices_of_divided_key_tiles_cover_their_queries_once_in_scheduling_order) {
  for (const auto& [whole, tiles, count] : {std::array{0U, 1U, 2U}, {5U, 3U, 4U}, {264U, 68U, 7U}, {10U, 132U, 32U}}) {
    const QuerySlices slices{whole, divisor(tiles), count, nullptr, nullptr};
    for (const QueryTiles all : {QueryTiles{0, 1}, {3, 8}, {0, 33}, {7, 1 << 24}}) {
      std::map<unsigned, std::vector<QueryTiles>> of_item;
      for (unsigned cta = 0; cta < whole + tiles * count; ++cta) {
        const QuerySlice own = query_slice(slices, cta);
        ASSERT_EQ(own.tile, cta < whole ? -1 : static_cast<int>(own.item - whole));
        if (own.tile >= 0) ASSERT_EQ(own.slice, of_item[own.item].size());  // the slices before it have smaller indices
        of_item[own.item].push_back(own.of(all, slices));
      }
      ASSERT_EQ(of_item.size(), whole + tiles);
      for (const auto& [item, parts] : of_item) {
        ASSERT_EQ(parts.size(), item < whole ? 1U : count) << item;
        int next = all.first;
        for (const QueryTiles& part : parts) {
          ASSERT_EQ(part.first, next) << item;
          next += part.count;
        }
        ASSERT_EQ(next, all.first + all.count) << item;
      }
    }
  }
}

TEST(BackwardSm90, queries_of_the_last_key_tiles_are_divided_if_sms_would_be_idle) {
  const Device hopper = *cuda_device("sm_90a");
  AttentionProblem problem = args_for(128, 128, false).problem;
  const auto divides = [&](std::int64_t batch, std::int64_t heads, std::int64_t seq, bool causal = false,
                           bool deterministic = false) {
    problem.batch = batch;
    problem.heads_q = problem.heads_kv = heads;
    problem.seq_q = problem.seq_k = seq;
    problem.causal = causal;
    problem.deterministic = deterministic;
    return selected(problem, hopper).candidates.front().offer.why.find("queries of the last") != std::string::npos;
  };
  EXPECT_TRUE(divides(1, 16, 16384));  // 2048 key tiles, 15.5 for each of 132 SMs
  EXPECT_TRUE(divides(1, 16, 16384, false, true));
  EXPECT_FALSE(divides(1, 33, 16384));  // 32
  EXPECT_TRUE(divides(1, 2, 4096));     // 64 for 132 SMs
  EXPECT_FALSE(divides(1, 16, 256));    // the steps are few
  EXPECT_FALSE(divides(8, 16, 2048));   // 15.5 again, but of 32 steps: two waves of thirds take about as long as one
  EXPECT_FALSE(divides(1, 16, 16384, true));
  EXPECT_TRUE(divides(1, 16, 16384, true, true));  // the longest key tiles come last
  problem.window_left = 100;
  EXPECT_FALSE(divides(1, 16, 16384, false));
  problem.window_left = -1;
  problem.varlen = true;
  problem.total_q = problem.total_k = 16384;
  EXPECT_FALSE(divides(1, 16, 16384));
}

TEST(BackwardSm90, slices_are_as_many_as_end_soonest) {
  const Device hopper = *cuda_device("sm_90a");
  AttentionProblem problem = args_for(128, 128, false).problem;
  problem.batch = 1;
  problem.heads_q = problem.heads_kv = 16;
  const auto split = [&](std::int64_t seq, bool causal = false, bool in_turns = false) {
    problem.seq_q = problem.seq_k = seq;
    problem.causal = causal;
    return split_queries(problem, hopper, 64, 128, in_turns);
  };
  // 68 key tiles are left for 132 SMs: four waves of sevenths, of 256 steps, end before one of them.
  const QuerySplit full = split(16384);
  EXPECT_EQ(full.tiles, 68);
  EXPECT_EQ(full.slices, 7);
  EXPECT_NEAR(full.relative_time, (15 * 258 + 4 * (256 / 7.0 + 5)) / (16 * 258), 1e-9);
  problem.heads_kv = 4;  // a quarter of the key tiles, of four times the steps
  const QuerySplit shared = split(16384);
  EXPECT_EQ(shared.tiles, 116);
  EXPECT_GT(shared.slices, full.slices);
  problem.heads_kv = 16;
  const QuerySplit last = split(16384, true, true);
  EXPECT_EQ(last.tiles, 132);
  EXPECT_EQ(last.slices, 5);
  EXPECT_EQ(split(16384, true).tiles, 0);  // the longest come first
  EXPECT_EQ(split(2048).tiles, 0);         // 256 key tiles: two for each SM but eight
}

TEST(BackwardSm90, what_slices_add_to_is_zeroed_and_inside_the_workspace) {
  AttentionProblem problem = args_for(64, 64, false).problem;
  problem.seq_q = problem.seq_k = 1100;
  std::vector<char> workspace(1);
  for (const int turns : {0, 1}) {
    constexpr std::int64_t kKeys = 9 * 128;
    const BackwardBuffers with =
        backward_buffers(problem, {.block_q = 64, .turns = turns, .sliced_keys = kKeys}, workspace.data());
    const auto at = [&](const void* place) { return static_cast<const char*>(place) - workspace.data(); };
    const std::int64_t sums = at(with.slice_sums), added = at(with.slices_added), zeroed = at(with.zeroed);
    EXPECT_EQ(sums % 16, 0);
    EXPECT_GE(sums, zeroed);
    if (turns > 0) EXPECT_GE(sums, at(with.turns) + ceil_div(problem.seq_q, 64) * problem.batch * problem.heads_q * 4);
    EXPECT_EQ(added, sums + kKeys * (problem.dim_qk + problem.dim_v) * 4);
    EXPECT_EQ(zeroed + with.zeroed_bytes, added + kKeys / 16 * 4);
    EXPECT_LE(zeroed + with.zeroed_bytes,
              backward_bytes(problem, {.block_q = 64, .turns = turns, .sliced_keys = kKeys}));
    EXPECT_EQ(backward_buffers(problem, {.block_q = 64, .turns = turns}, workspace.data()).slice_sums, nullptr);
  }
}

TEST(BackwardSm90, the_counter_of_steps_is_zeroed_and_behind_the_sums) {
  const AttentionProblem problem = args_for(64, 64, false).problem;
  std::vector<char> workspace(1);
  const auto at = [&](const void* place) { return static_cast<const char*>(place) - workspace.data(); };
  for (const std::int64_t keys : {0, 9 * 128}) {
    const BackwardSums sums = {.block_q = 64, .sliced_keys = keys, .counts_steps = true};
    const BackwardBuffers buffers = backward_buffers(problem, sums, workspace.data());
    const std::int64_t progress = at(buffers.progress), zeroed = at(buffers.zeroed);
    EXPECT_EQ(progress % 4, 0);
    EXPECT_GE(progress,
              zeroed + problem.batch * problem.heads_q * ceil_div(problem.seq_q, 64) * 64 * problem.dim_qk * 4);
    EXPECT_LE(progress + 4, keys > 0 ? at(buffers.slice_sums) : zeroed + buffers.zeroed_bytes);
    EXPECT_LE(zeroed + buffers.zeroed_bytes, backward_bytes(problem, sums));
    EXPECT_EQ(backward_buffers(problem, {.block_q = 64, .sliced_keys = keys}, workspace.data()).progress, nullptr);
  }
}

TEST(BackwardSm90, registers_go_to_a_second_accumulator_then_to_k_and_then_to_v) {
  struct Expected {
    int dim, accumulators, kept_k_steps;
    bool keeps_v, ping_pong;
  };
  for (const Expected& want :
       {Expected{40, 2, 3, true, true}, Expected{64, 2, 4, true, true}, Expected{80, 2, 5, false, false},
        Expected{88, 2, 3, false, true}, Expected{96, 2, 1, false, true}, Expected{112, 1, 0, false, false},
        Expected{128, 1, 0, false, false}}) {
    const AttentionBackwardSm90Config config = config_for(want.dim, want.dim);
    EXPECT_EQ(config.accumulators, want.accumulators) << want.dim;
    EXPECT_EQ(config.stages, want.accumulators + 1) << want.dim;
    EXPECT_EQ(config.kept_k_steps, want.kept_k_steps) << want.dim;
    EXPECT_EQ(config.keeps_v, want.keeps_v) << want.dim;
    EXPECT_EQ(config.ping_pong, want.ping_pong) << want.dim;
    EXPECT_EQ(config.keeps_p, want.accumulators == 1) << want.dim;
    EXPECT_EQ(config.kept_ds_steps, config.dq_columns < want.dim ? 3 : 0) << want.dim;  // of two products, not of one
  }
  EXPECT_FALSE(backward_sm90_configs(DType::kBFloat16, 128, 128, false, false, 4096).front().keeps_p);
  EXPECT_FALSE(backward_sm90_configs(DType::kBFloat16, 128, 128, true, true, 4096).front().keeps_p);
}

// A turn that no CTA takes, or that two take, would make the others wait for ever, and so would one that a slice of a divided
// key tile takes too late.
TEST(BackwardSm90, the_key_tiles_of_a_query_tile_take_turns_in_the_order_in_which_they_are_scheduled) {
  constexpr int kBlockQ = 64;
  const int cases[][3] = {{1, 1, 128},     {64, 128, 128}, {65, 200, 128}, {300, 900, 128}, {900, 300, 128},
                          {700, 129, 128}, {300, 900, 64}, {700, 129, 64}};  // len_q, len_k, keys of a tile
  const Mask masks[] = {{false, false, -1, -1}, {true, false, -1, -1}, {true, true, -1, -1},   {false, false, 17, 5},
                        {false, true, 0, 300},  {true, true, 100, -1}, {false, false, 200, -1}};
  for (const auto& [len_q, len_k, block_k] : cases) {
    for (const Mask& mask : masks) {
      const auto edge = [](std::int64_t window) { return window < 0 ? kUnbounded : static_cast<int>(window); };
      const Band band{edge(mask.window_left), mask.causal ? 0 : edge(mask.window_right), mask.bottom_right, 0};
      const int offset = band.position_offset(len_q, len_k);
      const int k_tiles = (len_k + block_k - 1) / block_k;
      for (const unsigned slices : {1U, 2U, 3U, 7U}) {
        if (slices > 1 && mask.window_left >= 0) continue;  // not divided
        const auto whole = static_cast<unsigned>(k_tiles / 3), divided = static_cast<unsigned>(k_tiles) - whole;
        const QuerySlices all{whole, divisor(divided), slices, nullptr, nullptr};
        std::map<int, std::vector<unsigned>> turns;  // of a query tile, in scheduling order
        std::map<int, std::vector<TurnEnds>> ends;   // likewise
        for (unsigned cta = 0; cta < whole + divided * slices; ++cta) {
          const QuerySlice own = query_slice(all, cta);
          const int item = static_cast<int>(own.item), tile = comes_in_reverse(band) ? k_tiles - 1 - item : item;
          const int last_k = std::min((tile + 1) * block_k, len_k) - 1;
          const QueryTiles tiles = own.of(query_tiles(band, offset, tile * block_k, last_k, len_q, kBlockQ), all);
          for (int i = 0; i < tiles.count; ++i) {
            const int query_tile = tiles.first + i;
            turns[query_tile].push_back(turn_of(band, offset, tile, query_tile, len_q, len_k, kBlockQ, block_k));
            ends[query_tile].push_back(
                turn_ends(band, offset, tile * block_k, query_tile, len_q, len_k, kBlockQ, block_k));
          }
        }
        for (const auto& [query_tile, list] : turns) {
          for (unsigned i = 0; i < list.size(); ++i) {
            ASSERT_EQ(list[i], i) << len_q << ", " << len_k << ", query tile " << query_tile;
            ASSERT_EQ(ends[query_tile][i].first, i == 0) << len_q << ", " << len_k << ", query tile " << query_tile;
            ASSERT_EQ(ends[query_tile][i].last, i + 1 == list.size())
                << len_q << ", " << len_k << ", query tile " << query_tile;
          }
        }
      }
    }
  }
}

TEST(BackwardSm90, is_chosen_unless_there_are_few_queries) {
  const auto chosen = [](int dim, std::int64_t seq_q, std::int64_t seq_k, bool packed = false) {
    AttentionProblem problem = args_for(dim, dim, packed).problem;
    problem.seq_q = seq_q;
    problem.seq_k = seq_k;
    return std::string(selected(problem, *cuda_device("sm_90a")).candidates.front().implementation->name);
  };
  for (const int dim : {8, 64, 80, 96, 128}) {
    EXPECT_EQ(chosen(dim, 4096, 4096), "attention_backward_sm90") << dim;
    EXPECT_EQ(chosen(dim, 17, 129), "attention_backward_sm90") << dim;
    EXPECT_EQ(chosen(dim, 200, 300, true), "attention_backward_sm90") << dim;
    EXPECT_EQ(chosen(dim, 4096, 1), "attention_backward_sm90") << dim;
    EXPECT_EQ(chosen(dim, 16, 4096), "attention_backward") << dim;
  }
}

// What does not depend on packing is in attention/choice_test.cc.
TEST(BackwardSm90, ctas_stay_in_step_unless_sequences_are_packed) {
  for (const bool packed : {false, true}) {
    AttentionProblem problem = args_for(128, 128, packed).problem;
    problem.heads_kv = problem.heads_q;
    problem.seq_q = problem.seq_k = 1 << 17;
    if (packed) problem.total_q = problem.total_k = problem.batch * problem.seq_q;
    const auto candidates = selected(problem, *cuda_device("sm_90a")).candidates;
    const auto in_step = [](const auto& candidate) {
      return text_of(candidate.offer.config).find("\"in_step\": true") != std::string::npos;
    };
    EXPECT_EQ(std::any_of(candidates.begin(), candidates.end(), in_step), !packed);
  }
}

TEST(BackwardSm90, says_why_it_does_not_serve_and_another_kernel_does) {
  const auto hopper = *cuda_device("sm_90a");
  const AttentionProblem fits = args_for(128, 64, false).problem;
  const auto selection = selected(fits, hopper);
  ASSERT_FALSE(selection.candidates.empty());
  EXPECT_EQ(selection.candidates.front().implementation->name, std::string("attention_backward_sm90"));
  EXPECT_EQ(selection.candidates.front().offer.workspace, *backward_sm90_workspace(fits, config_for(128, 64)));

  const auto expect_refusal = [](const AttentionProblem& problem, const Device& device, const char* why) {
    const auto refused = selected(problem, device);
    ASSERT_FALSE(refused.candidates.empty()) << why;
    EXPECT_NE(refused.candidates.front().implementation->name, std::string("attention_backward_sm90")) << why;
    const auto refusal = std::find_if(refused.refusals.begin(), refused.refusals.end(),
                                      [](const auto& r) { return r.kernel == "attention_backward_sm90"; });
    ASSERT_NE(refusal, refused.refusals.end()) << why;
    EXPECT_NE(refusal->reason.find(why), std::string::npos) << refusal->reason;
    EXPECT_NE(text_of(engine::explain<AttentionFamily>(problem, device, refused)).find(why), std::string::npos);
  };
  expect_refusal(fits, *cuda_device("sm_89"), "sm_90a");
  expect_refusal(fits, *cuda_device("sm_90"), "sm_90a");
  struct Change {
    void (*apply)(AttentionProblem&);
    const char* why;
  };
  const Change changes[] = {{[](AttentionProblem& p) { p.tensor_maps = false; }, "multiples of 16 bytes"},
                            {[](AttentionProblem& p) { p.vectors = false; }, "multiples of 16 bytes"},
                            {[](AttentionProblem& p) { p.dim_qk = 136; }, "head dims up to 128"},
                            {[](AttentionProblem& p) { p.dim_v = 192; }, "head dims up to 128"},
                            {[](AttentionProblem& p) { p.batch = 0; }, "nothing to load"},
                            {[](AttentionProblem& p) { p.seq_q = 0; }, "nothing to load"},
                            {[](AttentionProblem& p) { p.seq_k = 0; }, "nothing to load"}};
  for (const Change& change : changes) {
    AttentionProblem problem = fits;
    change.apply(problem);
    expect_refusal(problem, hopper, change.why);
  }
}

}  // namespace
}  // namespace tessera::attention
