// Which kernels and Configs decode's problems get.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <set>

#include "attention/decode_config.h"
#include "attention/forward_config.h"
#include "attention/forward_sm90.h"
#include "select.h"

namespace tessera::attention {
namespace {

// One query against a cache of full length, with four query heads for each key head.
AttentionProblem decode_problem(std::int64_t batch, std::int64_t keys, std::int64_t dim) {
  AttentionProblem p = problem(AttentionOp::kDecode, keys, dim);
  p.batch = p.cache_rows = batch;
  p.seq_q = 1;
  p.heads_q = 32;
  p.heads_kv = 8;
  p.alignment = Alignment::kBottomRight;
  return p;
}

TEST(DecodeSelect, every_head_dim_number_of_rows_and_mode_has_tiles_that_fit_every_gpu) {
  for (const Device& gpu : gpus()) {
    for (std::int64_t dim = 8; dim <= 256; dim += 8) {
      for (const std::int64_t queries : {1, 8, 16, 100}) {
        for (const bool paged : {false, true}) {
          for (const std::int64_t added : {0, 1}) {
            for (const bool vectors : {true, false}) {
              AttentionProblem p = decode_problem(2, 1000, dim);
              p.seq_q = queries;
              p.paged = paged;
              p.page_size = paged ? 16 : 0;
              p.seq_new = added;
              p.vectors = vectors;
              const Selection selection = select(p, gpu);
              ASSERT_FALSE(selection.candidates.empty())
                  << text_of(engine::explain<AttentionFamily>(p, gpu, selection));
              for (const Candidate& c : selection.candidates) {
                const std::string config = gpu.name + " " + text_of(c.offer.config);
                if (const auto main = main_of<AttentionDecodeConfig>(c)) {
                  EXPECT_LE(decode_shared_bytes(*main), gpu.shared_memory_per_block) << config;
                  EXPECT_TRUE(main->cluster == 1 || gpu.compute >= 90) << config;
                  EXPECT_TRUE(main->stages == 1 || (gpu.compute >= 80 && vectors)) << "cp.async: " << config;
                } else {
                  EXPECT_EQ(queries, 100) << "few queries are decode's: " << config;
                }
                const auto recipe = c.implementation->recipe(p, gpu, c.offer.config);
                ASSERT_TRUE(recipe) << config;
                EXPECT_EQ(recipe->workspace, c.offer.workspace) << config;
              }
            }
          }
        }
      }
    }
  }
}

TEST(DecodeSelect, a_cache_of_e4m3_has_tiles_that_fit_every_gpu_that_converts_it) {
  for (const Device& gpu : gpus()) {
    for (std::int64_t dim = 8; dim <= 256; dim += 8) {
      for (const std::int64_t queries : {1, 8, 100}) {
        for (const std::int64_t page_size : {0, 16}) {
          for (const bool key_scales : {false, true}) {
            AttentionProblem p = decode_problem(2, 1000, dim);
            p.fp8_cache = true;
            if (key_scales) p.cache_scales = CacheScales::kPerToken;
            p.seq_q = queries;
            p.paged = page_size > 0;
            p.page_size = page_size;
            p.num_pages = 200;
            p.seq_new = queries;
            const Selection selection = select(p, gpu);
            const bool served = gpu.compute >= 89 && dim % 16 == 0;
            ASSERT_EQ(!selection.candidates.empty(), served)
                << text_of(engine::explain<AttentionFamily>(p, gpu, selection));
            for (const Candidate& c : selection.candidates) {
              const auto main = main_of<AttentionDecodeConfig>(c);
              ASSERT_TRUE(main) << kernel_of(c) << " reads no e4m3";
              EXPECT_LE(decode_shared_bytes(*main), gpu.shared_memory_per_block) << gpu.name << dim;
              EXPECT_TRUE(main->e4m3_cache);
              EXPECT_EQ(main->key_scales, key_scales);
              EXPECT_TRUE(c.implementation->recipe(p, gpu, c.offer.config)) << gpu.name << dim;
            }
            p.vectors = false;
            EXPECT_TRUE(select(p, gpu).candidates.empty());
          }
        }
      }
    }
  }
}

TEST(DecodeSelect, many_queries_go_to_the_forward_kernels) {
  for (const Device& gpu : gpus()) {
    AttentionProblem p = decode_problem(2, 8192, 128);
    p.dtype = DType::kFloat16;
    p.seq_q = 1024;
    p.causal = true;
    const auto chosen = [&] { return std::string(select(p, gpu).candidates.front().implementation->name); };
    const std::string best = gpu.specific && gpu.compute == 90 ? "attention_forward_sm90" : "attention_forward";
    EXPECT_EQ(chosen(), best) << gpu.name;
    p.paged = true;
    p.page_size = 16;
    EXPECT_EQ(chosen(), best) << gpu.name;
    p.page_size = 12;
    EXPECT_EQ(chosen(), "attention_forward") << "TMA takes pages of a multiple of 8: " << gpu.name;
    p.batch_invariant = true;
    EXPECT_EQ(chosen(), "attention_decode") << gpu.name;
    p.batch_invariant = false;
    p.varlen = true;  // packed queries, few of them too
    p.seq_q = 4;
    p.total_q = 7;
    EXPECT_EQ(chosen(), "attention_forward") << gpu.name;
  }
}

TEST(DecodeSelect, a_box_lies_within_a_page) {
  const Device gpu = *cuda_device("sm_90a");
  for (const std::int64_t page : {8, 16, 24, 48, 64, 80, 256}) {
    AttentionProblem p = decode_problem(2, 4800, 128);
    p.seq_q = 1024;
    p.paged = true;
    p.page_size = page;
    int boxes = 0;
    for (const Candidate& c : select(p, gpu).candidates) {
      const auto config = main_of<AttentionForwardSm90Config>(c);
      if (!config) continue;
      ++boxes;
      EXPECT_EQ(page % config->page_box, 0) << text_of(c.offer.config);
      EXPECT_EQ(config->block_k % config->page_box, 0) << text_of(c.offer.config);
      EXPECT_EQ(config->page_box % 8, 0) << text_of(c.offer.config);
    }
    EXPECT_GT(boxes, 0) << page;
  }
}

TEST(DecodeSelect, says_why_it_does_not_serve) {
  const Device hopper = *cuda_device("sm_90a");
  const auto reason = [](const Device& device, const std::function<void(AttentionProblem&)>& change) {
    AttentionProblem p = decode_problem(2, 1000, 128);
    change(p);
    const Selection selection = select(p, device);
    const engine::Refusal* refusal = refusal_of(selection, "attention_decode");
    return refusal == nullptr ? std::string() : refusal->reason;
  };
  EXPECT_EQ(reason(hopper, [](auto&) {}), "");
  EXPECT_EQ(reason(hopper, [](auto& p) { p.dtype = DType::kFloat32; }), "takes fp16 and bf16, not fp32");
  EXPECT_EQ(reason(*cuda_device("sm_75"), [](auto& p) { p.dtype = DType::kBFloat16; }), "bf16 needs sm_80 or newer");
  EXPECT_EQ(reason(cpu_device(2), [](auto&) {}), "runs on GPUs; the tensors are on the CPU");
  for (const int dim : {4, 100, 264}) {
    const std::string dims = "head dims are multiples of 8 up to 256, not " + std::to_string(dim);
    EXPECT_EQ(reason(hopper, [&](auto& p) { p.dim_qk = dim; }), dims);
    EXPECT_EQ(reason(hopper, [&](auto& p) { p.dim_v = dim; }), dims);
  }
  EXPECT_EQ(reason(hopper, [](auto& p) { p.seq_k = 1 << 30; }), "sequences are shorter than 2^30");
  const std::string grid = "more rows than one grid can cover";
  EXPECT_EQ(reason(hopper, [](auto& p) { p.batch = std::int64_t{1} << 31; }), grid);
  // 16 tiles and the end of each of eight key heads of each sequence are counted in 31 bits.
  const std::int64_t most = INT_MAX / ((16 + 1) * 8);
  EXPECT_EQ(reason(hopper, [&](auto& p) { p.batch = most + 1; }), grid);
  EXPECT_EQ(reason(hopper, [&](auto& p) { p.batch = most; }), "");
  EXPECT_EQ(reason(hopper, [](auto& p) { p.heads_q = std::int64_t{1} << 32; }), grid);
  EXPECT_EQ(reason(hopper, [](auto& p) { p.seq_q = (1 << 30) - 1; }), grid) << "times four heads";
  EXPECT_EQ(reason(hopper, [](auto& p) { p.seq_new = std::int64_t{1} << 31; }), grid);
}

TEST(DecodeSelect, clusters_leave_no_partial_results_and_are_for_few_sequences) {
  const Device hopper = *cuda_device("sm_90a");
  const auto config_of = [&](const AttentionProblem& p, const Device& gpu) {
    return *main_of<AttentionDecodeConfig>(chosen(p, gpu));
  };
  const AttentionProblem few = decode_problem(1, 1024, 128);
  const Candidate clusters = chosen(few, hopper);
  EXPECT_EQ(config_of(few, hopper).cluster, 8);
  EXPECT_EQ(clusters.offer.workspace, 0U);
  EXPECT_EQ(clusters.implementation->recipe(few, hopper, clusters.offer.config)->steps.size(), 1U) << "one launch";
  const AttentionProblem many = decode_problem(64, 1024, 128);
  const Candidate shared = chosen(many, hopper);
  EXPECT_EQ(config_of(many, hopper).cluster, 1);
  EXPECT_GT(shared.offer.workspace, 0U);
  EXPECT_EQ(shared.implementation->recipe(many, hopper, shared.offer.config)->steps.size(), 2U) << "and its combine";
  EXPECT_EQ(config_of(few, *cuda_device("sm_89")).cluster, 1);
  // Clusters never have nearly all SMs: GPCs have some to spare, and the clusters that are left would run alone.
  for (const int heads : {8, 12, 14, 15, 16, 24, 28, 30, 32, 33, 64}) {
    AttentionProblem each = decode_problem(1, 1024, 128);
    each.heads_q = each.heads_kv = heads;
    const int cluster = config_of(each, hopper).cluster;
    // What an H200 runs at once, one CTA per SM.
    constexpr int kAtOnce[] = {0, 132, 66, 39, 30, 22, 17, 15, 15};
    EXPECT_LE(heads, kAtOnce[cluster]) << "heads, clusters of " << cluster;
  }
  // Of several row blocks, each is divided evenly, so that no CTA combines rows of the next one.
  for (const int heads : {8, 9, 15, 16}) {
    AttentionProblem blocks = decode_problem(1, 1024, 128);
    blocks.seq_q = 16;
    blocks.heads_q = 8 * heads;
    blocks.heads_kv = heads;
    const int cluster = config_of(blocks, hopper).cluster;
    EXPECT_EQ(cluster & (cluster - 1), 0) << heads << " heads, clusters of " << cluster;
  }
  // TMA loads the few tiles of a short cache: 512 keys of each CTA are four, three of which are loaded at once.
  EXPECT_GT(config_of(decode_problem(1, 4096, 64), hopper).box_rows, 0);
  EXPECT_EQ(config_of(decode_problem(1, 4097, 64), hopper).box_rows, 0);
  EXPECT_EQ(config_of(decode_problem(1, 4096, 128), hopper).box_rows, 0);
  // Partial results are of a grid that fills the GPU twice, however many sequences there are.
  EXPECT_EQ(chosen(decode_problem(1024, 65536, 128), hopper).offer.workspace, shared.offer.workspace);
  // Nothing to combine: every cache is one tile.
  const AttentionProblem tiny = decode_problem(64, 16, 128);
  const Candidate whole = chosen(tiny, hopper);
  EXPECT_EQ(whole.offer.workspace, 0U);
  EXPECT_EQ(whole.implementation->recipe(tiny, hopper, whole.offer.config)->steps.size(), 1U);
}

TEST(DecodeSelect, a_batch_invariant_config_does_not_depend_on_the_batch) {
  for (const Device& gpu : gpus()) {
    for (const std::int64_t dim : {64, 96, 128, 256}) {
      for (const std::int64_t queries : {1, 16}) {
        std::set<std::string> seen;
        for (const std::int64_t batch : {1, 2, 3, 33, 1000}) {
          AttentionProblem p = decode_problem(batch, 4096, dim);
          p.tensor_maps = batch < 3;  // one sequence of a cache may have a tensor map where all together have none
          p.seq_q = queries;
          p.batch_invariant = true;
          const Selection selection = select(p, gpu);
          ASSERT_EQ(selection.candidates.size(), 1U) << gpu.name;
          const Candidate& only = selection.candidates.front();
          seen.insert(text_of(only.offer.config));
          EXPECT_EQ(main_of<AttentionDecodeConfig>(only)->cluster, 1);
          EXPECT_EQ(search_space(p, gpu).choices.size(), 1U) << "nor may the tuner's";
          AttentionProblem other = p;
          other.batch_invariant = false;
          for (const engine::Choice& choice : search_space(other, gpu).choices) {
            EXPECT_EQ(only.implementation->recipe(p, gpu, choice.config).has_value(),
                      choice.config == only.offer.config);
          }
        }
        EXPECT_EQ(seen.size(), 1U) << gpu.name << " " << dim << " " << queries;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::attention
