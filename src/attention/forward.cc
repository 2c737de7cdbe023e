// Attention forward on any GPU (kernels/attention/forward.cuh).
#include "attention/forward_config.h"

#include <algorithm>
#include <climits>
#include <optional>

#include "attention/cache_append.h"
#include "attention/family.h"
#include "attention/gpu.h"
#include "attention/params.h"
#include "base/format.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

using Config = AttentionForwardConfig;

struct ForwardTile {
  int block_q;
  int block_k;
  int warps;
};

// The largest tiles whose scores and output fit the registers without spilling (the compile gate checks that), and
// whose Q, K and V fit the architecture's shared memory. 32 rows per warp halve the shared-memory traffic of 16, so
// they come first; with a score_mod, the registers are needed for the scores. A cache and chunks need a few more.
constexpr ForwardTile forward_tile(int arch, int dim_qk, int dim_v, bool masked, bool score_mod, bool cache_or_chunks) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (arch < 80) {
    return dim <= 128 ? ForwardTile{64, 64, 4} : ForwardTile{64, score_mod || cache_or_chunks ? 16 : 32, 4};
  }
  if (dim > 128) return {64, cache_or_chunks ? 32 : 64, 4};
  if (score_mod || (cache_or_chunks && dim > 80)) return {64, 64, 4};
  if (dim <= 64) return masked || arch != 90 ? ForwardTile{128, 96, 4} : ForwardTile{128, 112, 4};
  if (dim <= 80) return {128, 64, 4};
  return masked || dim < 128 || arch != 90 ? ForwardTile{128, 32, 4} : ForwardTile{128, 64, 4};
}

// Without 16-byte copies, data in flight is in registers, which leaves fewer for the scores.
constexpr ForwardTile staged_forward_tile(int arch, int dim, bool score_mod, bool cache_or_chunks) {
  if (dim > 128) return {64, 16, 4};
  if (dim > 96 || cache_or_chunks) return {64, 32, 4};
  return {arch < 80 || dim > 64 || score_mod ? 64 : 128, 64, 4};
}

// Wastes less if the mask cuts through many tiles or there are few queries.
constexpr ForwardTile small_forward_tile(const ForwardTile& large, int arch) {
  return arch < 80 || large.block_q == 64 ? large : ForwardTile{64, 64, 4};
}

// True if the small tile has enough registers for it.
constexpr bool can_sum_in_halves(int arch, int dim_v, int vector, bool score_mod) {
  return arch >= 80 && dim_v <= 128 && vector == 8 && !score_mod;
}
// The large tile first, then the small one, then, if there can be one, the small one that sums scores in halves.
std::vector<Config> configs_for(const AttentionProblem& p, const Device& device) {
  const int dim_qk = static_cast<int>(p.dim_qk), dim_v = static_cast<int>(p.dim_v);
  const bool masked = is_masked(p), score_mod = has_score_mod(p);
  const auto config_of = [&](const ForwardTile& tile, bool in_halves) -> Config {
    return {.dtype = p.dtype,
            .dim_qk = dim_qk,
            .dim_v = dim_v,
            .block_q = tile.block_q,
            .block_k = tile.block_k,
            .warps = tile.warps,
            .in_halves = in_halves,
            .vector = vector_of(p),
            .masked = masked,
            .score_mod = score_mod,
            .chunked = p.chunk > 0,
            .cache = p.op == AttentionOp::kDecode,
            .paged = p.paged};
  };
  const bool cache_or_chunks = p.op == AttentionOp::kDecode || p.chunk > 0;
  const ForwardTile large =
      p.vectors ? forward_tile(device.compute, dim_qk, dim_v, masked, score_mod, cache_or_chunks)
                : staged_forward_tile(device.compute, std::max(dim_qk, dim_v), score_mod, cache_or_chunks);
  const ForwardTile small = small_forward_tile(large, device.compute);
  std::vector<Config> configs = {config_of(large, false)};
  if (small.block_q != large.block_q || small.block_k != large.block_k) configs.push_back(config_of(small, false));
  if (can_sum_in_halves(device.compute, dim_v, vector_of(p), score_mod)) configs.push_back(config_of(small, true));
  std::erase_if(configs, [&](const Config& config) {
    return static_cast<std::size_t>(forward_shared_bytes(config)) > device.shared_memory_per_block;
  });
  return configs;
}

jit::KernelInstance main_kernel(const Config& config) {
  return {.name = format("attention_forward_{}_d{}x{}_{}x{}w{}{}{}{}{}{}{}", name_of(config.dtype), config.dim_qk,
                         config.dim_v, config.block_q, config.block_k, config.warps, config.in_halves ? "_halves" : "",
                         config.masked ? "_masked" : "", config.score_mod ? "_score_mod" : "",
                         config.vector == 1 ? "_v1" : "", config.chunked ? "_chunked" : "",
                         config.paged   ? "_paged"
                         : config.cache ? "_cache"
                                        : ""),
          .header = "attention/forward.cuh",
          .entry = "attention_forward",
          .params = "AttentionForwardParams",
          .config = jit::config_text("AttentionForwardConfig", config),
          .threads = config.warps * 32,
          .min_blocks = 1,
          .dynamic_smem_bytes = forward_shared_bytes(config),
          .pdl = true};
}

Status enqueue(const Config& config, const AttentionArgs& given, const engine::Launch& launch) {
  const AttentionProblem& p = given.problem;
  const std::int64_t q_tiles = ceil_div(p.seq_q, config.block_q);
  if (saturating_product(q_tiles, p.batch, p.heads_q) > INT_MAX) {
    return Status(TESSERA_UNSUPPORTED, "attention_forward: more rows than one grid can cover");
  }
  if (config.cache && (p.batch == 0 || p.seq_q == 0)) return {};
  const bool appends = p.seq_new > 0;
  std::optional<AttentionArgs> appended;
  if (appends) {
    Status s = enqueue_append(*launch.kernels[0], appended.emplace(given), launch.workspace, launch.stream);
    if (!s.ok()) return s;
  }
  const AttentionArgs& args = appended ? *appended : given;
  AttentionForwardParams params = {};
  fill_inputs(params, args);
  fill_outputs(params, args);
  if (config.cache) params.cache = kv_cache_of(args);
  params.q_tiles = static_cast<unsigned>(q_tiles);
  const cuda::Grid grid{static_cast<unsigned>(q_tiles * p.batch * p.heads_q), 1, 1};
  return cuda::launch(*launch.kernels[appends ? 1 : 0], cuda::Work<AttentionForwardParams>{params, grid},
                      launch.stream);
}

std::optional<std::string> refuses(const AttentionProblem& p, const Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  return cache_refuses(p);
}

// Measured on an H200, relative to the large tile without a mask.
double rate_of(const Config& config, const Config& large) {
  if (config.in_halves) return 1.01;
  return config.block_q == large.block_q && config.block_k == large.block_k ? 1.0 : 0.86;
}

// Microseconds, roughly: the scores of all heads by the GPU's rate, but no less than one tile of queries takes a CTA that
// has an SM to itself; and the start and end of each tile, two CTAs per SM.
double predicted_time(const AttentionProblem& p, const Device& device, double computed, double relative) {
  constexpr double kStart = 4.5;
  constexpr double kEachRound = 3.6;
  constexpr double kAlone = 0.5;  // of an SM's rate, by one CTA
  const double rate =
      portable_rate(device) * relative * 64.0 / static_cast<double>(std::max<std::int64_t>({p.dim_qk, p.dim_v, 1}));
  const double columns = static_cast<double>(p.batch) * static_cast<double>(p.heads_q);
  const double q_tiles = static_cast<double>(std::max<std::int64_t>(1, ceil_div(p.seq_q, 64)));
  const double rounds = std::max(1.0, q_tiles * columns / (2.0 * device.multiprocessors));
  return kStart + kEachRound * rounds +
         computed / rate * std::max(columns, device.multiprocessors / (kAlone * q_tiles));
}

std::vector<engine::Offer> offers(const AttentionProblem& p, const Device& device) {
  std::vector<engine::Offer> offers;
  const std::vector<Config> configs = configs_for(p, device);
  for (const Config& config : configs) {
    // Exact sums cost a third of the speed, which does not matter if there is one tile of queries.
    if (config.in_halves && p.seq_q > config.block_q) continue;
    const double computed = computed_scores(p, config.block_q, config.block_k).all;
    offers.push_back({engine::main_config(config), append_workspace(p),
                      predicted_time(p, device, computed, rate_of(config, configs.front())),
                      format("computes {:.3g} scores per head", computed)});
  }
  return offers;
}

std::optional<Recipe> recipe(const AttentionProblem& p, const Device& device, const engine::Config& named) {
  const auto config = engine::from_main<Config>(named);
  const std::vector<Config> known = configs_for(p, device);
  const bool fits = config && std::any_of(known.begin(), known.end(),
                                          [&](const Config& k) { return engine::main_config(k) == named; });
  if (!fits) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  recipe.problem.tensor_maps = false;
  if (p.seq_new > 0) recipe.steps.push_back({"append", instance_of(append_config(p.dtype, vector_of(p)))});
  recipe.steps.push_back({"main", main_kernel(*config)});
  recipe.workspace = append_workspace(p);
  recipe.enqueue = [config = *config](const AttentionArgs& args, const engine::Launch& launch) {
    return enqueue(config, args, launch);
  };
  return recipe;
}

// Adds the Config that offers() leaves out for long problems.
std::vector<engine::Config> searches(const AttentionProblem& p, const Device& device) {
  std::vector<engine::Config> list;
  for (const Config& config : configs_for(p, device)) list.push_back(engine::main_config(config));
  return list;
}

// Dims that represent all multiples of 8: each tile shape's largest, odd counts of 16 and of 8, and the common ones.
constexpr int kDims[] = {8, 16, 24, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256};

std::vector<AttentionProblem> representatives(const Device& device) {
  std::vector<AttentionProblem> list;
  for (const Variant& variant : kVariants) {
    for (const int dim : kDims) {
      // Other architectures share the code of sm_80, and sm_89 that of sm_86.
      if (device.compute > 80 && dim != 64 && dim != 128 && dim != 256) continue;
      if (device.compute == 89 && dim != 128) continue;
      list.push_back(with_variant(representative(device, AttentionOp::kForward, dim, dim), variant));
      if (dim % 64 != 0) continue;
      list.push_back(list.back());
      list.back().seq_q = 1;  // one tile of queries, whose scores are summed in halves
      list.back().alignment = Alignment::kBottomRight;
    }
  }
  const auto add_unaligned = [&](int dim_qk, int dim_v, const Variant& variant) {
    list.push_back(with_variant(representative(device, AttentionOp::kForward, dim_qk, dim_v), variant));
    list.back().vectors = list.back().tensor_maps = false;
  };
  add_unaligned(80, 64, {true, true});
  for (const int dim : {64, 96, 128, 248}) add_unaligned(dim, dim, {dim != 64, dim == 96});
  if (device.compute > 80 && device.compute != 90) return list;
  for (const int dim : {64, 128, 256}) {
    for (const bool paged : {false, true}) {
      if (dim != 64 && !paged) continue;
      AttentionProblem cache = representative(device, AttentionOp::kDecode, dim, dim);
      cache.causal = true;
      cache.alignment = Alignment::kBottomRight;
      cache.paged = paged;
      cache.page_size = paged ? 16 : 0;
      cache.chunk = paged ? 1024 : 0;
      list.push_back(cache);
    }
  }
  return list;
}

}  // namespace

Implementation forward() {
  return {"attention_forward",
          AttentionFamily::bit_of(AttentionOp::kForward) | AttentionFamily::bit_of(AttentionOp::kDecode),
          {"attention/cache_append.cuh", "attention/forward.cuh"},
          refuses,
          offers,
          recipe,
          searches,
          representatives};
}

}  // namespace tessera::attention
