#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <utility>

#include "attention/backward_wide_sm90.h"
#include "attention/family.h"
#include "base/arch.h"
#include "engine/select.h"
#include "tile/tensor_map.h"

namespace tessera::attention {
namespace {

AttentionBackwardWideSm90Config config_for(int dim_qk, int dim_v, std::int64_t seq_k) {
  return backward_wide_sm90_config(DType::kBFloat16, dim_qk, dim_v, true, false, seq_k, false);
}
constexpr std::int64_t kOneTile = 64, kPairs = 4096;  // keys: of a CTA alone, and of clusters

TEST(BackwardWideSm90, default_tiles_fit_shared_memory_and_the_register_file) {
  for (int dim_qk = 8; dim_qk <= 256; dim_qk += 8) {
    for (int dim_v = 8; dim_v <= 256; dim_v += 8) {
      if (dim_qk <= 128 && dim_v <= 128) continue;
      ASSERT_LE(backward_wide_sm90_layout(config_for(dim_qk, dim_v, kOneTile)).bytes,
                limits_of(90).shared_memory_per_block);
      const AttentionBackwardWideSm90Config config = config_for(dim_qk, dim_v, kPairs);
      ASSERT_EQ(config.cluster, dim_qk > 128 ? 2 : 1);
      ASSERT_LE(backward_wide_sm90_layout(config).bytes, limits_of(90).shared_memory_per_block);
      const int consumer = consumer_registers(config);
      const int producer = producer_registers(config);
      for (const int registers : {consumer, producer, config.dq_registers}) {
        ASSERT_EQ(registers % 8, 0);  // setmaxnreg's grain and least
        ASSERT_GE(registers, 24);
      }
      ASSERT_LE(config.dq_registers, 128);  // of which a thread starts with
      ASSERT_LE(kWarpgroup * (producer + config.dq_registers + 2 * consumer), 65536);
      ASSERT_GE(consumer,
                std::max(dim_qk, dim_v) / 2 + 48 + 4 * std::min(config.kept_steps, std::max(dim_qk, dim_v) / 16) + 30)
          << dim_qk << ", " << dim_v;
      ASSERT_GE(config.dq_registers, config.dq_columns / 2 + 4 * config.kept_ds_steps + 26) << dim_qk << ", " << dim_v;
      ASSERT_EQ(config.dq_columns % kWidestAtom, 0);
    }
  }
}

TEST(BackwardWideSm90, what_is_in_shared_memory_does_not_overlap_and_tiles_keep_to_their_swizzle) {
  for (const auto& [dim, seq_k] : {std::pair{136, kPairs}, {192, kOneTile}, {256, kOneTile}, {256, kPairs}}) {
    const AttentionBackwardWideSm90Config config = config_for(dim, dim, seq_k);
    const BackwardWideSm90Layout at = backward_wide_sm90_layout(config);
    const int tile = 64 * ((dim + 63) / 64 * 64) * 2;
    std::map<int, int> pieces;  // begin: end
    const auto add = [&](int begin, int bytes, int alignment) {
      ASSERT_EQ(begin % alignment, 0) << dim;
      ASSERT_TRUE(pieces.emplace(begin, begin + bytes).second) << dim;
    };
    add(at.k, tile, kTileAlignment);
    add(at.v, tile, kTileAlignment);
    if (config.cluster == 2) add(at.other_k, 64 * 128 * 2, kTileAlignment);
    add(at.k_full, 8, 8);
    add(at.v_full, 8, 8);
    for (int i = 0; i < config.q_stages; ++i) {
      add(at.q + i * at.q_stage, tile, kTileAlignment);
      add(at.rows + i * at.rows_stage, (2 * 64 + kWideStepWords) * 4, 16);
      add(at.q_full + i * 8, 8, 8);
      add(at.q_empty + i * 8, 8, 8);
    }
    for (int i = 0; i < config.d_o_stages; ++i) {
      add(at.d_o + i * at.d_o_stage, tile, kTileAlignment);
      add(at.d_o_full + i * 8, 8, 8);
      add(at.d_o_empty + i * 8, 8, 8);
    }
    for (int i = 0; i < config.p_stages; ++i) {
      add(at.p + i * at.p_stage, 64 * 64 * 4, 16);
      add(at.p_full + i * 8, 8, 8);
      add(at.p_empty + i * 8, 8, 8);
    }
    for (int i = 0; i < config.ds_stages; ++i) {
      for (int cta = 0; cta < config.cluster; ++cta) {
        add(at.ds + i * at.ds_stage + cta * 64 * 64 * 2, 64 * 64 * 2, kTileAlignment);
      }
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

TEST(BackwardWideSm90, the_ctas_of_a_cluster_divide_dq_s_columns) {
  for (int dim = 136; dim <= 256; dim += 8) {
    const AttentionBackwardWideSm90Config config = config_for(dim, dim, kPairs);
    int computed[2] = {};
    for (int step = 0; step < 2; ++step) {
      int next = 0;
      for (int rank = 0; rank < 2; ++rank) {
        const DqAtoms atoms = own_dq_atoms(config, rank, step);
        EXPECT_EQ(atoms.first, next) << dim;
        next += atoms.count;
        computed[rank] += atoms.count;
        // Of the other CTA's keys, it has two atoms.
        EXPECT_GE(atoms.first, first_dq_atom(config, rank)) << dim;
        EXPECT_LE(next, first_dq_atom(config, rank) + 2) << dim;
      }
      EXPECT_EQ(next, (dim + 63) / 64) << dim;
    }
    EXPECT_EQ(computed[0], computed[1]) << dim;
  }
}

TEST(BackwardWideSm90, a_lane_finds_its_rows_values_of_16_queries_side_by_side) {
  for (int step = 0; step < 4; ++step) {
    for (int lane = 0; lane < 4; ++lane) {  // of a quad: columns 2 lane and 2 lane + 1 of each 8
      for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(wide_row_slot(step * 16 + i / 2 * 8 + lane * 2 + i % 2), step * 16 + lane * 4 + i);
      }
    }
  }
}

TEST(BackwardWideSm90, says_why_it_does_not_serve) {
  const auto hopper = *engine::cuda_device("sm_90a");
  AttentionProblem fits;
  fits.op = AttentionOp::kBackward;
  fits.dtype = DType::kBFloat16;
  fits.batch = 3;
  fits.seq_q = 200;
  fits.seq_k = 300;
  fits.heads_q = fits.heads_kv = 4;
  fits.dim_qk = 192;
  fits.dim_v = 128;
  fits.scale = 1;
  const auto name_of_first = [&](const AttentionProblem& problem, const engine::Device& device) {
    return std::string(engine::select<AttentionFamily>(problem, device).candidates.front().implementation->name);
  };
  EXPECT_EQ(name_of_first(fits, hopper), "attention_backward_wide_sm90");
  AttentionProblem deterministic = fits;
  deterministic.deterministic = true;
  EXPECT_EQ(name_of_first(deterministic, hopper), "attention_backward_wide_sm90");
  EXPECT_EQ(name_of_first(fits, *engine::cuda_device("sm_90")), "attention_backward");
  struct Change {
    void (*apply)(AttentionProblem&);
    const char* why;
  };
  const Change changes[] = {{[](AttentionProblem& p) { p.tensor_maps = false; }, "multiples of 16 bytes"},
                            {[](AttentionProblem& p) { p.dim_qk = 128; }, "head dims above 128"},
                            {[](AttentionProblem& p) { p.seq_k = 0; }, "nothing to load"}};
  for (const Change& change : changes) {
    AttentionProblem problem = fits;
    change.apply(problem);
    const auto refused = engine::select<AttentionFamily>(problem, hopper).refusals;
    const auto refusal = std::find_if(refused.begin(), refused.end(),
                                      [](const auto& r) { return r.kernel == "attention_backward_wide_sm90"; });
    ASSERT_NE(refusal, refused.end()) << change.why;
    EXPECT_NE(refusal->reason.find(change.why), std::string::npos) << refusal->reason;
  }
}

}  // namespace
}  // namespace tessera::attention
