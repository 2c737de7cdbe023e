// Which kernel serves a product, and how rows that TMA cannot address are dealt with.
#include <gtest/gtest.h>

#include <array>
#include <set>

#include "engine/select.h"
#include "gemm/dense_sm90_config.h"
#include "gemm/family.h"
#include "gemm/tiles.h"

namespace tessera::gemm {
namespace {

engine::Device gpu(const char* arch) { return *engine::cuda_device(arch); }

GemmProblem product_of(std::int64_t m, std::int64_t n, std::int64_t k) {
  GemmProblem p;
  p.dtype = p.out_dtype = DType::kBFloat16;
  p.m = m, p.n = n, p.k = k;
  return p;
}

engine::Explanation explain(const GemmProblem& p, const engine::Device& device) {
  return engine::explain<GemmFamily>(p, device, engine::select<GemmFamily>(p, device));
}

TEST(Choice, hopper_has_its_own_kernel_and_older_gpus_the_portable_one) {
  const GemmProblem p = product_of(4096, 4096, 4096);
  EXPECT_EQ(explain(p, gpu("sm_90a")).options.front().kernel, "gemm_dense_sm90");
  EXPECT_EQ(explain(p, gpu("sm_80")).options.front().kernel, "gemm_dense");
  EXPECT_EQ(explain(p, engine::cpu_device(2)).options.front().kernel, "cpu_gemm");
}

TEST(Choice, bf16_is_refused_where_there_is_none) {
  const auto e = explain(product_of(64, 64, 64), gpu("sm_75"));
  EXPECT_TRUE(e.options.empty());
  EXPECT_EQ(e.refusals.front().reason, "bf16 needs sm_80 or newer");
}

TEST(Choice, columns_that_hopper_s_coordinates_cannot_name_are_the_portable_kernel_s) {
  GemmProblem p = product_of(1, (std::int64_t{1} << 30) + 64, 8);
  p.out_dtype = DType::kFloat32;
  const auto e = explain(p, gpu("sm_90a"));
  ASSERT_FALSE(e.options.empty());
  EXPECT_EQ(e.options.front().kernel, "gemm_dense");
}

// Rows that start anywhere: a tile, or a sum, has every eighth one; a weight is copied for each shift if its rows are not
// those of the shift.
TEST(Choice, explain_says_how_unaligned_rows_are_loaded) {
  GemmProblem p = product_of(36096, 512, 1365);
  p.a_aligned = p.b_aligned = false;
  const auto down = explain(p, gpu("sm_90a")).options.front();
  EXPECT_EQ(down.kernel, "gemm_dense_sm90");
  EXPECT_NE(down.why.find("rows of a are not 16-byte aligned: a tile has every eighth"), std::string::npos) << down.why;
  EXPECT_NE(down.why.find("b is copied for each of eight shifts"), std::string::npos) << down.why;
  EXPECT_LT(down.workspace, std::size_t{12} << 20);
  p = product_of(36096, 1365, 512);
  p.out_aligned = false;
  const auto up = explain(p, gpu("sm_90a")).options.front();
  EXPECT_NE(up.why.find("rows of out are not 16-byte aligned: a tile has every eighth"), std::string::npos) << up.why;
  EXPECT_EQ(up.workspace, 0U);
  // A matrix of the epilogue may start elsewhere than out.
  p.residual = true;
  const auto added = explain(p, gpu("sm_90a")).options.front();
  EXPECT_NE(added.why.find("stored by threads"), std::string::npos) << added.why;
  p = product_of(1365, 128, 36096);
  p.a_transposed = p.b_transposed = true;
  p.a_aligned = false;
  const auto gradient = explain(p, gpu("sm_90a")).options.front();
  EXPECT_NE(gradient.why.find("a sum has every eighth"), std::string::npos) << gradient.why;
  EXPECT_EQ(gradient.why.find("copied"), std::string::npos) << gradient.why;
  EXPECT_NE(gradient.why.find("parts"), std::string::npos) << gradient.why;
}

// Few terms: the time is that of the epilogue's elements, which the portable kernel moves one by one if b is not aligned.
TEST(Choice, products_with_few_terms_are_judged_by_what_they_store) {
  GemmProblem p = product_of(32000, 13650, 32);
  p.b_transposed = p.gradient = true;
  p.activation = kSilu;
  p.b_aligned = false;
  EXPECT_EQ(explain(p, gpu("sm_90a")).options.front().kernel, "gemm_dense_sm90");
  EXPECT_GT(explain(p, gpu("sm_80")).options.front().microseconds, 1000.0);
}

TEST(Choice, every_offer_has_a_recipe_with_the_workspace_that_it_names) {
  for (const char* arch : {"sm_75", "sm_80", "sm_90a"}) {
    const engine::Device device = gpu(arch);
    for (const auto& [m, n, k] :
         {std::array<std::int64_t, 3>{1, 1, 1}, {7, 1365, 64}, {36096, 1365, 512}, {64, 64, 9999}}) {
      for (const int variant : {0, 1, 2, 3, 4}) {
        GemmProblem p = product_of(m, n, k);
        p.dtype = p.out_dtype = DType::kFloat16;
        p.a_transposed = variant % 2 == 1;
        p.b_transposed = variant >= 2;
        p.gated = variant == 4;
        p.residual = variant == 3;
        p.a_aligned = p.b_aligned = p.out_aligned = p.epilogue_aligned = variant < 2;
        for (const Implementation& one : GemmFamily::implementations()) {
          if (one.refuses(p, device)) continue;
          const auto offers = one.offers(p, device);
          EXPECT_FALSE(offers.empty());
          for (const engine::Offer& offer : offers) {
            const auto recipe = one.recipe(p, device, offer.config);
            ASSERT_TRUE(recipe) << one.name << " " << text_of(offer.config);
            EXPECT_EQ(recipe->workspace, offer.workspace);
            EXPECT_TRUE(GemmFamily::covers(recipe->problem, p));
          }
        }
      }
    }
  }
}

// The kernel reads both halves of a gated tile as boxes of 64 columns each.
TEST(Choice, gated_tiles_of_transposed_weights_are_multiples_of_two_boxes) {
  const engine::Device device = gpu("sm_90a");
  const Implementation* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  for (const std::int64_t n : {96, 129, 160, 192, 256, 300}) {
    GemmProblem p = product_of(8192, n, 4096);
    p.gated = p.a_transposed = p.b_transposed = true;
    for (const engine::Config& config : sm90->searches(p, device)) {
      const auto main = engine::from_fields<GemmDenseSm90Config>(engine::fields_of_step(config, "main"));
      ASSERT_TRUE(main);
      EXPECT_EQ(main->block_n % 128, 0) << n << " columns: " << text_of(config);
    }
  }
}

// An element of a second matrix is in its place in shared memory once, so no two boxes may share columns.
TEST(Choice, tiles_that_move_pairs_are_whole_boxes) {
  const engine::Device device = gpu("sm_90a");
  const Implementation* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  for (std::int64_t n = 8; n < 900; n += 8) {
    for (const bool backward : {false, true}) {
      GemmProblem p = product_of(500, n, 64);
      p.activation = kSilu;
      p.b_transposed = p.gated_gradient = backward;
      p.gated = p.preactivation = !backward;
      const auto configs = sm90->searches(p, device);
      ASSERT_FALSE(configs.empty());
      for (const engine::Config& config : configs) {
        const auto main = engine::from_fields<GemmDenseSm90Config>(engine::fields_of_step(config, "main"));
        ASSERT_TRUE(main);
        const int columns = gemm_sm90::out_columns(*main);
        EXPECT_TRUE(columns % 64 == 0 || (columns < 64 && columns >= n)) << n << " columns: " << text_of(config);
        EXPECT_LE(gemm_sm90::layout(*main).bytes, 227 * 1024) << text_of(config);
      }
    }
  }
}

TEST(Choice, what_only_recipes_ask_for_is_refused_where_it_is_missing) {
  const auto refusal = [](const char* kernel, const engine::Device& device, const GemmProblem& p) {
    return engine::find_implementation<GemmFamily>(kernel)->refuses(p, device).value_or("");
  };
  GemmProblem keeps = product_of(500, 200, 64), gradient = keeps, two = keeps;
  keeps.gated = keeps.preactivation = true;
  gradient.gated_gradient = true;
  two.sums_two = true;
  for (const auto& [kernel, device] :
       {std::pair("gemm_dense", gpu("sm_90a")), std::pair("cpu_gemm", engine::cpu_device(2)),
        std::pair("gemm_cublaslt", gpu("sm_90a"))}) {
    EXPECT_NE(refusal(kernel, device, keeps).find("gated product"), std::string::npos) << kernel;
    EXPECT_NE(refusal(kernel, device, gradient).find("gated pair"), std::string::npos) << kernel;
    EXPECT_NE(refusal(kernel, device, two).find("two products"), std::string::npos) << kernel;
  }
  const engine::Device hopper = gpu("sm_90a");
  for (GemmProblem p : {keeps, gradient, two}) EXPECT_EQ(refusal("gemm_dense_sm90", hopper, p), "");
  // Threads store no pairs; rows of the second product have no copies.
  keeps.n = gradient.n = 205;
  two.b_aligned = false;
  for (GemmProblem p : {keeps, gradient, two}) {
    EXPECT_NE(refusal("gemm_dense_sm90", hopper, p).find("16 bytes"), std::string::npos);
  }
  keeps.out_padded = gradient.out_padded = true;
  for (GemmProblem p : {keeps, gradient}) EXPECT_EQ(refusal("gemm_dense_sm90", hopper, p), "");
}

// What TMA stores at a time is 128 bytes wide; beyond the end of a narrower tile it would overwrite its neighbour.
TEST(Choice, tiles_narrower_than_a_box_are_alone_in_their_rows) {
  const engine::Device device = gpu("sm_90a");
  const Implementation* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  for (std::int64_t n = 1; n < 900; n += n < 300 ? 1 : 7) {
    for (const int variant : {0, 1, 2, 3}) {
      GemmProblem p = product_of(500, n, 64);
      p.gated = variant % 2 == 1;
      p.b_transposed = variant >= 2;
      for (const engine::Config& config : sm90->searches(p, device)) {
        const auto main = engine::from_fields<GemmDenseSm90Config>(engine::fields_of_step(config, "main"));
        ASSERT_TRUE(main);
        const int columns = gemm_sm90::out_columns(*main);
        EXPECT_TRUE(columns >= n || columns >= 64) << n << " columns: " << text_of(config);
      }
    }
  }
}

// Rows of main fill whole rounds of the multiprocessors, and those of the rest begin where a tile, and every eighth row, would.
TEST(Choice, the_rows_of_a_last_round_may_have_smaller_tiles) {
  const engine::Device device = gpu("sm_90a");
  const Implementation* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  int found = 0;
  for (const std::int64_t rows : {17000, 20000, 36096}) {
    for (const int variant : {0, 1, 2}) {
      GemmProblem p = product_of(rows, 512, 1365);
      p.a_aligned = variant != 1;
      p.out_aligned = variant != 2;
      for (const engine::Config& config : sm90->searches(p, device)) {
        const engine::Fields* of_rest = engine::fields_of_step(config, "rest");
        if (of_rest == nullptr) continue;
        ++found;
        engine::Fields fields = *of_rest;
        const std::int64_t rest = std::get<std::int64_t>(fields.back().value);
        fields.pop_back();
        const auto main = engine::from_fields<GemmDenseSm90Config>(engine::fields_of_step(config, "main"));
        const auto smaller = engine::from_fields<GemmDenseSm90Config>(&fields);
        ASSERT_TRUE(main && smaller) << text_of(config);
        EXPECT_TRUE(rest > 0 && rest < rows) << text_of(config);
        EXPECT_EQ((rows - rest) % (main->block_m * main->cluster * gemm_sm90::m_groups(*main)), 0) << text_of(config);
        EXPECT_EQ(smaller->strided, main->strided);
        EXPECT_EQ(smaller->tma_store, main->tma_store);
        const auto recipe = sm90->recipe(p, device, config);
        ASSERT_TRUE(recipe) << text_of(config);
        EXPECT_EQ(recipe->steps.back().name, "rest");
      }
    }
  }
  EXPECT_GT(found, 0);
}

// The fastest of all tiles that were measured on an H200, or within 1 % of it: docs/kernels/gemm_dense_sm90.md.
TEST(Choice, is_the_fastest_tile_that_was_measured) {
  const engine::Device device = gpu("sm_90a");
  const Implementation* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  struct Measured {
    std::int64_t m, n, k;
    const char* how;
    int block_m, block_n;
    bool ping_pong;
  };
  for (const Measured& of :
       {Measured{36096, 512, 1408, "", 128, 128, true},    Measured{36096, 512, 1376, "", 128, 128, true},
        Measured{36096, 512, 512, "", 128, 128, true},     Measured{36096, 512, 2048, "", 128, 128, true},
        Measured{36096, 1408, 512, "", 128, 176, true},    Measured{36096, 1408, 512, "b", 192, 128, true},
        Measured{36096, 512, 1408, "b", 128, 128, true},   Measured{36096, 512, 1408, "r", 128, 128, true},
        Measured{36096, 1408, 512, "bg", 128, 128, true},  Measured{36096, 1408, 512, "p", 192, 128, true},
        Measured{36096, 1408, 512, "s", 192, 128, true},   Measured{8192, 512, 4096, "", 128, 256, false},
        Measured{4096, 4096, 4096, "", 128, 256, false},   Measured{8192, 8192, 8192, "", 128, 192, true},
        Measured{1408, 512, 36096, "ab", 128, 256, false}, Measured{512, 512, 36096, "ab", 128, 128, false},
        Measured{36096, 1365, 512, "b", 192, 128, true},   Measured{36096, 1365, 512, "", 128, 176, true},
        Measured{36096, 512, 1365, "", 128, 128, true},    Measured{1536, 512, 36096, "ab", 128, 256, false},
        Measured{64, 11008, 4096, "", 64, 128, true}}) {
    const std::string how = of.how;
    const auto has = [&](char c) { return how.find(c) != std::string::npos; };
    GemmProblem p = product_of(of.m, of.n, of.k);
    p.a_transposed = has('a');
    p.b_transposed = has('b');
    p.residual = has('r');
    p.gradient = has('g');
    p.preactivation = has('p');
    if (p.gradient || p.preactivation || has('s')) p.activation = kSilu;
    const engine::Config config = sm90->offers(p, device).front().config;
    const auto main = engine::from_fields<GemmDenseSm90Config>(engine::fields_of_step(config, "main"));
    ASSERT_TRUE(main);
    EXPECT_TRUE(main->block_m == of.block_m && main->block_n == of.block_n && main->ping_pong == of.ping_pong)
        << of.m << " x " << of.n << ", K " << of.k << " " << how << ": " << text_of(config);
  }
}

// A consumer has one to three row tiles of 64, and a TMA box at most 256 rows.
TEST(Choice, tiles_are_as_tall_as_consumers_and_boxes_allow) {
  const Implementation* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  std::set<std::pair<int, bool>> seen;  // rows, ping-pong
  for (const std::int64_t m : {50, 700, 36096}) {
    for (const std::int64_t n : {40, 512, 1365}) {
      for (const int stored : {0, 1, 2, 3}) {
        GemmProblem p = product_of(m, n, 1365);
        p.a_transposed = stored % 2 == 1;
        p.b_transposed = stored / 2 == 1;
        p.a_aligned = p.b_aligned = stored != 3;
        for (const engine::Config& config : sm90->searches(p, gpu("sm_90a"))) {
          const auto main = engine::from_fields<GemmDenseSm90Config>(engine::fields_of_step(config, "main"));
          ASSERT_TRUE(main);
          seen.emplace(main->block_m, main->ping_pong);
        }
      }
    }
  }
  const std::set<std::pair<int, bool>> allowed = {{64, true}, {128, true}, {192, true}, {128, false}, {256, false}};
  EXPECT_EQ(seen, allowed);
}

// Experts without a gate, in training: with ping-pong consumers of 128 rows, ptxas spills hundreds of bytes.
TEST(Choice, ragged_rows_that_store_what_an_activation_takes_are_not_offered_wide_ping_pong_tiles) {
  const engine::Device device = gpu("sm_90a");
  const Implementation* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  for (const bool preactivation : {false, true}) {
    GemmProblem p = product_of(65536, 1408, 2048);
    p.op = GemmOp::kGrouped;
    p.grouping = kRaggedRows;
    p.groups = 64;
    p.activation = kSilu;
    p.preactivation = preactivation;
    bool offered = false;
    for (const engine::Offer& offer : sm90->offers(p, device)) {
      const auto main = engine::from_fields<GemmDenseSm90Config>(engine::fields_of_step(offer.config, "main"));
      offered |= main->ping_pong && main->block_m == 128;
    }
    EXPECT_EQ(offered, !preactivation);
  }
}

// Of 132 multiprocessors, 16 tiles times eight groups of terms use 128. No group is divided, and each is written once.
TEST(Choice, groups_of_strided_terms_are_parts_of_k_if_so_many_tiles_fill_the_gpu) {
  const engine::Device device = gpu("sm_90a");
  const Implementation* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  for (const bool swapped : {false, true}) {
    GemmProblem p = swapped ? product_of(1365, 512, 36096) : product_of(512, 1365, 36096);
    p.a_transposed = p.b_transposed = true;
    (swapped ? p.a_aligned : p.b_aligned) = false;
    const engine::Config config = sm90->offers(p, device).front().config;
    const auto main = engine::from_fields<GemmDenseSm90Config>(engine::fields_of_step(config, "main"));
    ASSERT_TRUE(main);
    EXPECT_EQ(main->strided, kStridedK);
    EXPECT_EQ(main->block_m, 256) << text_of(config);
    EXPECT_EQ(main->block_n, 176) << text_of(config);
    const engine::Fields* reduce = engine::fields_of_step(config, "reduce");
    ASSERT_NE(reduce, nullptr);
    EXPECT_EQ(std::get<std::int64_t>(reduce->front().value), gemm_sm90::kRowGroups) << text_of(config);
    EXPECT_EQ(std::get<bool>(reduce->back().value), swapped) << text_of(config);
  }
}

TEST(Choice, an_empty_product_has_no_rest_and_a_gpu_may_be_smaller_than_a_cluster) {
  engine::Device device = gpu("sm_90a");
  const Implementation* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  for (const auto& [rows, columns] : {std::pair{36096, 0}, {0, 512}, {0, 0}}) {
    for (const engine::Config& config : sm90->searches(product_of(rows, columns, 1365), device)) {
      EXPECT_EQ(engine::fields_of_step(config, "rest"), nullptr) << text_of(config);
    }
  }
  device.multiprocessors = 1;
  EXPECT_FALSE(sm90->searches(product_of(36096, 512, 1365), device).empty());
}

TEST(Plans, cover_aligned_tensors_if_made_for_unaligned_ones_and_not_the_reverse) {
  GemmProblem unaligned = product_of(64, 64, 64);
  const GemmProblem aligned = unaligned;
  unaligned.a_aligned = false;
  EXPECT_TRUE(GemmFamily::covers(unaligned, aligned));
  EXPECT_FALSE(GemmFamily::covers(aligned, unaligned));
  EXPECT_NE(GemmFamily::difference(aligned, unaligned), "");
}

// A cluster's two row tiles are more often half empty, which costs more than sharing B saves.
TEST(Choice, ragged_rows_have_no_clusters) {
  const Implementation* sm90 = engine::find_implementation<GemmFamily>("gemm_dense_sm90");
  for (const std::int64_t groups : {8, 16, 64}) {
    GemmProblem p = product_of(16384, 1408, 2048);
    p.op = GemmOp::kGrouped;
    p.grouping = kRaggedRows;
    p.groups = groups;
    const engine::Config config = sm90->offers(p, gpu("sm_90a")).front().config;
    const auto main = engine::from_fields<GemmDenseSm90Config>(engine::fields_of_step(config, "main"));
    ASSERT_TRUE(main);
    EXPECT_EQ(main->cluster, 1) << text_of(config);
  }
}

TEST(Choice, groups_have_the_same_kernels_and_are_part_of_what_a_plan_is_for) {
  GemmProblem p = product_of(65536, 1408, 2048);
  p.op = GemmOp::kGrouped;
  p.grouping = kRaggedRows;
  p.groups = 64;
  const auto hopper = explain(p, gpu("sm_90a")).options.front();
  EXPECT_EQ(hopper.kernel, "gemm_dense_sm90");
  EXPECT_NE(hopper.why.find("about"), std::string::npos) << hopper.why;
  EXPECT_EQ(explain(p, gpu("sm_80")).options.front().kernel, "gemm_dense");
  EXPECT_EQ(explain(p, engine::cpu_device(2)).options.front().kernel, "cpu_gemm");
  GemmProblem other = p;
  other.groups = 32;
  EXPECT_FALSE(GemmFamily::covers(p, other));
  EXPECT_NE(GemmFamily::difference(p, other).find("groups is 32, not 64"), std::string::npos);
  // Rows of such groups are copied: a group may begin at any row.
  p.a_aligned = p.b_aligned = false;
  const auto padded = explain(p, gpu("sm_90a")).options.front();
  EXPECT_NE(padded.why.find("a and b are copied"), std::string::npos) << padded.why;
}

TEST(TileOrder, visits_every_tile_once_and_groups_rows) {
  for (const auto& [rows, columns, group] : {std::array<unsigned, 3>{1, 1, 1}, {10, 3, 4}, {8, 5, 8}, {3, 7, 8}}) {
    std::set<std::pair<unsigned, unsigned>> seen;
    for (unsigned i = 0; i < rows * columns; ++i) {
      const TilePosition at = tile_position({rows, columns, group}, i);
      EXPECT_LT(at.row, rows);
      EXPECT_LT(at.column, columns);
      EXPECT_TRUE(seen.emplace(at.row, at.column).second);
    }
  }
  EXPECT_EQ(tile_position({10, 3, 4}, 4).row, 0U);  // the second column of the first four rows
  EXPECT_EQ(tile_position({10, 3, 4}, 4).column, 1U);
}

TEST(Gate, compiles_few_instances_of_this_family) {
  std::size_t all = 0;
  for (const char* arch : {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"}) {
    all += engine::gate_instances<GemmFamily>(gpu(arch)).size();
  }
  EXPECT_LE(all, 108U);
}

}  // namespace
}  // namespace tessera::gemm
