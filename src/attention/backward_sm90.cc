// Attention backward on Hopper: backward_preprocess.cuh, backward_sm90.cuh and, if dQ is summed by atomics,
// backward_convert.cuh.
#include "attention/backward_sm90.h"

#include <algorithm>
#include <climits>

#include "attention/backward_convert.h"
#include "attention/backward_preprocess.h"
#include "attention/backward_steps.h"
#include "attention/family.h"
#include "attention/gpu.h"
#include "attention/params.h"
#include "base/format.h"
#include "cuda/tensor_map.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

using Config = AttentionBackwardSm90Config;

struct BackwardSm90Tile {
  int consumers;
  int ctas_per_sm;
  int block_q;
  int stages;
  int ds_stages;
  int accumulators;
  bool ping_pong;
  bool prefetches_rows;
  int kept_k_steps;
  bool keeps_v;
  int kept_ds_steps;
  int dq_columns;
  int dq_registers;
};

// By counting registers. A consumer holds dK and dV (a register for two columns of each), one accumulator of 64 queries
// (32) or two, a 16-bit operand (16) and, if they still fit, K (4 for 16 columns) and V. The dQ warpgroup holds its sums
// and needs 26 more, since ptxas starts sums at register 24; a consumer needs 28. consumers 0: they do not fit. With one
// consumer, two CTAs share an SM.
constexpr BackwardSm90Tile backward_sm90_tile(int dim_qk, int dim_v, int consumers, bool score_mod) {
  constexpr int kBesideSums = 26;
  constexpr int kBeside = 28;
  const int most = consumers == 1 ? 64 : 128;
  if (dim_qk > most || dim_v > most) return {};
  BackwardSm90Tile tile = {};
  tile.consumers = consumers;
  tile.ctas_per_sm = consumers == 1 ? 2 : 1;
  tile.block_q = 64;
  tile.ds_stages = 2;
  tile.dq_columns = dim_qk <= 88 ? dim_qk : 64;
  // dS is read twice if dQ is computed in halves: of a part that stays in registers (4 for 16 keys), once. Without a mask, 1 to
  // 4 % on an H200.
  tile.kept_ds_steps = tile.dq_columns < dim_qk ? 3 : 0;
  tile.dq_registers = (tile.dq_columns / 2 + 4 * tile.kept_ds_steps + kBesideSums + 7) / 8 * 8;
  int left = consumer_registers(tile.dq_registers, tile.consumers, tile.ctas_per_sm) - kBeside - (dim_qk + dim_v) / 2;
  const int of_k = (dim_qk + 15) / 16 * 4;
  const int of_v = (dim_v + 15) / 16 * 4;
  // Modified scores need registers of their own, and their exponentials hide nowhere.
  tile.accumulators = left >= 2 * 32 + 16 && !score_mod ? 2 : 1;
  left -= tile.accumulators * 32 + 16;
  if (left < 0) return {};
  // With two accumulators, the next step's Q is needed while the stages of this step and the previous one are held. With
  // one, a third stage cost up to 4 % on an H200; with few keys it gains 6 %.
  tile.stages = tile.accumulators == 2 || consumers == 1 ? 3 : 2;
  const bool keeps_k = tile.accumulators == 2 && left >= of_k;
  tile.kept_k_steps = tile.accumulators == 2 ? std::min(left, of_k) / 4 : 0;
  tile.keeps_v = keeps_k && left >= of_k + of_v;
  // With about 12 registers to spare beside a K that is kept without V, ptxas serialises wgmma; with 16 it does not.
  const int spare = left - 4 * tile.kept_k_steps;
  const bool serialised = !tile.keeps_v && spare >= (consumers == 1 ? 8 : 12) && spare < 16;
  if (serialised) tile.kept_k_steps = std::max(0, tile.kept_k_steps - (16 - spare) / 4);
  // Measured at 64 (both K and V kept), 80 (K) and 96 (neither).
  tile.prefetches_rows = tile.keeps_v;
  tile.ping_pong = consumers == 2 && tile.accumulators == 2 && keeps_k == tile.keeps_v;
  return tile;
}
}  // namespace

std::vector<AttentionBackwardSm90Config> backward_sm90_configs(DType dtype, int dim_qk, int dim_v, bool masked,
                                                               bool deterministic, std::int64_t seq_k, bool score_mod) {
  BackwardSm90Tile tile = backward_sm90_tile(dim_qk, dim_v, seq_k <= kConsumerRows && !score_mod ? 1 : 2, score_mod);
  if (tile.consumers == 0) tile = backward_sm90_tile(dim_qk, dim_v, 2, score_mod);
  if (tile.consumers == 0) return {};
  // If dQ is computed in halves, the registers do not suffice for their addresses.
  const bool writes_dq = seq_k <= tile.consumers * kConsumerRows && tile.dq_columns == dim_qk;
  const bool ordered = deterministic && !writes_dq;
  return {{.dtype = dtype,
           .dim_qk = dim_qk,
           .dim_v = dim_v,
           .consumers = tile.consumers,
           .ctas_per_sm = tile.ctas_per_sm,
           .block_q = tile.block_q,
           .stages = tile.stages,
           .ds_stages = tile.ds_stages,
           .accumulators = tile.accumulators,
           // At 128 it would cost 6 % of the speed without a mask, and in a deterministic instance ptxas would spill.
           .keeps_p = tile.accumulators == 1 && !score_mod && (dim_qk + dim_v <= 240 || (masked && !ordered)),
           .ping_pong = tile.ping_pong,
           .prefetches_rows = tile.prefetches_rows,
           .kept_k_steps = tile.kept_k_steps,
           .keeps_v = tile.keeps_v,
           .kept_ds_steps = tile.kept_ds_steps,
           .dq_columns = tile.dq_columns,
           .dq_registers = tile.dq_registers,
           .masked = masked,
           .deterministic = ordered,
           .writes_dq = writes_dq,
           .score_mod = score_mod,
           .splits_group = false,
           .splits_queries = false,
           .in_step = false}};
}

Result<BackwardSm90Boxes> backward_sm90_boxes(const AttentionArgs& args, const AttentionBackwardSm90Config& config) {
  const AttentionProblem& p = args.problem;
  Result<BackwardSm90Boxes> boxes(std::in_place);
  Status s = atom_boxes(args.q, query_extents(p, p.dim_qk), config.block_q, kWidestAtom, boxes->q);
  if (s.ok()) s = atom_boxes(args.d_o, query_extents(p, p.dim_v), config.block_q, kWidestAtom, boxes->d_o);
  if (s.ok()) s = atom_boxes(args.k, key_extents(p, p.dim_qk), block_k_of(config), kWidestAtom, boxes->k);
  if (s.ok()) s = atom_boxes(args.v, key_extents(p, p.dim_v), block_k_of(config), kWidestAtom, boxes->v);
  if (!s.ok()) boxes = std::move(s);
  return boxes;
}

namespace {
// At most, if groups are split.
std::int64_t columns_per_batch(const AttentionProblem& p, const AttentionBackwardSm90Config& config) {
  return config.splits_group ? p.heads_q : p.heads_kv;
}
BackwardSums sums_of(const AttentionBackwardSm90Config& config, std::int64_t sliced_tiles) {
  return {.block_q = config.writes_dq ? 0 : config.block_q,
          .block_k = config.splits_group ? block_k_of(config) : 0,
          .turns = config.deterministic ? 1 : 0,
          .sliced_keys = sliced_tiles * block_k_of(config),
          .counts_steps = config.in_step};
}
std::int64_t ctas_at_once(int multiprocessors, const AttentionBackwardSm90Config& config) {
  return std::int64_t{multiprocessors} * config.ctas_per_sm;
}
// If key tiles take turns, the last one writes dQ.
bool converts_dq(const AttentionBackwardSm90Config& config) { return !config.writes_dq && !config.deterministic; }
}  // namespace

Result<cuda::Work<AttentionBackwardSm90Params>> backward_sm90_work(const AttentionArgs& args,
                                                                   const AttentionBackwardSm90Config& config,
                                                                   int part_heads) {
  const AttentionProblem& p = args.problem;
  const std::int64_t k_tiles = ceil_div(p.seq_k, block_k_of(config));
  if (!fits_a_grid(k_tiles, p, columns_per_batch(p, config))) {
    return Status(TESSERA_UNSUPPORTED, "attention_backward_sm90: more rows than one grid can cover");
  }
  const std::int64_t heads = config.splits_group ? part_heads : p.heads_q / p.heads_kv;
  // The CTAs of a key head are at the same query head at about the same time, or at two.
  return hopper_backward_work<AttentionBackwardSm90Params>(args, block_k_of(config), heads,
                                                           std::min<std::int64_t>(heads, 2));
}

Result<std::size_t> backward_sm90_workspace(const AttentionProblem& problem, const AttentionBackwardSm90Config& config,
                                            std::int64_t sliced_tiles) {
  return hopper_backward_workspace(problem, "attention_backward_sm90", block_k_of(config),
                                   sums_of(config, sliced_tiles));
}

namespace {

jit::KernelInstance main_kernel(const AttentionBackwardSm90Config& config) {
  return {.name = format("attention_backward_sm90_{}_d{}x{}_{}x{}{}{}{}{}{}{}{}", name_of(config.dtype), config.dim_qk,
                         config.dim_v, config.block_q, block_k_of(config), config.masked ? "_masked" : "",
                         config.deterministic ? "_deterministic" : "", config.writes_dq ? "_writes_dq" : "",
                         config.score_mod ? "_score_mod" : "", config.splits_group ? "_split" : "",
                         config.splits_queries ? "_sliced" : "", config.in_step ? "_in_step" : ""),
          .header = "attention/backward_sm90.cuh",
          .entry = "attention_backward_sm90",
          .params = "AttentionBackwardSm90Params",
          .config = jit::config_text("AttentionBackwardSm90Config", config),
          .threads = threads_of(config),
          .min_blocks = config.ctas_per_sm,
          .dynamic_smem_bytes = backward_sm90_layout(config).bytes,
          .pdl = true};
}

Status enqueue(const Config& config, int part_heads, const QuerySplit& queries, const AttentionArgs& args,
               const engine::Launch& launch) {
  auto work = backward_sm90_work(args, config, part_heads);
  if (!work.ok()) return work.status();
  const auto boxes = backward_sm90_boxes(args, config);
  if (!boxes.ok()) return boxes.status();
  const BackwardBuffers buffers = backward_buffers(args.problem, sums_of(config, queries.tiles), launch.workspace);
  AttentionBackwardSm90Params& params = work->params;
  if (config.deterministic) keep_turns_close(params, launch.kernels[1]->multiprocessors);
  fill_buffers(params, args, buffers);
  if (config.splits_queries) slice(*work, queries, buffers);
  if (config.in_step) {
    params.progress = buffers.progress;
    params.ctas_at_once = static_cast<unsigned>(ctas_at_once(launch.kernels[1]->multiprocessors, config));
  }
  {
    // The driver makes tensor maps only if a context is current.
    const auto scope = cuda::ContextScope::enter(launch.kernels[1]->device);
    if (!scope.ok()) return scope.status();
    if (Status s = encode_one(boxes->q, params.q); !s.ok()) return s;
    if (Status s = encode_one(boxes->d_o, params.d_o); !s.ok()) return s;
    if (Status s = encode_one(boxes->k, params.k); !s.ok()) return s;
    if (Status s = encode_one(boxes->v, params.v); !s.ok()) return s;
  }
  if (Status s = enqueue_preprocess(*launch.kernels[0], args, buffers, launch.stream); !s.ok()) return s;
  if (Status s = cuda::launch(*launch.kernels[1], *work, launch.stream); !s.ok()) return s;
  if (converts_dq(config)) {
    Status s = enqueue_convert(*launch.kernels[2], args, buffers.sums, config.block_q, launch.stream);
    if (!s.ok()) return s;
  }
  if (!config.splits_group) return {};
  return enqueue_convert_keys(*launch.kernels[2], args, buffers.dk_sums, buffers.dv_sums, block_k_of(config),
                              launch.stream);
}

GroupSplit split_of(const AttentionProblem& p, const Device& device, const Config& config) {
  if (!config.splits_group) return {};
  // By how much steps take longer if the heads in flight are twice what fits the L2 cache.
  constexpr double kMissing = 0.4;
  return split_group(p, device, config.block_q, block_k_of(config), kMissing, config.deterministic);
}

QuerySplit queries_of(const AttentionProblem& p, const Device& device, const Config& config) {
  if (config.splits_group || config.writes_dq) return {};
  return split_queries(p, device, config.block_q, block_k_of(config), config.deterministic);
}

// CTAs of equal length drift apart; if one head's Q, dO and dQ sums do not fit the L2 cache, each CTA then rereads them from
// memory. With a mask, CTAs start at different query tiles anyway, and the CTAs of a single wave start together. The counter
// of steps says at which tile of a head the running CTAs are, but not at which head: so one query head per CTA.
bool stays_in_step(const AttentionProblem& p, const Device& device, const Config& config) {
  if (config.masked || config.deterministic || config.writes_dq || p.varlen) return false;
  const std::int64_t heads = config.splits_group ? split_of(p, device, config).part_heads : p.heads_q / p.heads_kv;
  if (heads != 1 || streamed_bytes(p) <= kCacheBytes) return false;
  const std::int64_t k_tiles = ceil_div(p.seq_k, block_k_of(config));
  return saturating_product(k_tiles, p.batch, columns_per_batch(p, config)) >
         ctas_at_once(device.multiprocessors, config);
}

std::vector<Config> configs_for(const AttentionProblem& p, const Device& device) {
  auto configs = backward_sm90_configs(p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v), is_masked(p),
                                       p.deterministic, p.seq_k, has_score_mod(p));
  // Without convert, short sequences are faster.
  if (!configs.empty() && !p.deterministic && !configs.front().writes_dq) {
    configs.push_back(backward_sm90_configs(p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v),
                                            is_masked(p), true, p.seq_k, has_score_mod(p))
                          .front());
  }
  if (!configs.empty() && p.heads_q > p.heads_kv && (!p.deterministic || configs.front().deterministic)) {
    configs.push_back(configs.front());
    configs.back().splits_group = true;
  }
  for (Config& config : configs) {
    config.splits_queries = queries_of(p, device, config).tiles > 0;
    config.in_step = stays_in_step(p, device, config);
  }
  return configs;
}

std::optional<std::string> refuses(const AttentionProblem& p, const Device& device) {
  if (auto reason = hopper_backward_refuses(p, device)) return reason;
  const auto configs = configs_for(p, device);
  if (configs.empty()) return format("takes head dims up to 128, not {}", std::max(p.dim_qk, p.dim_v));
  const auto workspace = backward_sm90_workspace(p, configs.front());
  if (!workspace.ok()) return workspace.status().message();
  return std::nullopt;
}

std::vector<engine::Offer> offers(const AttentionProblem& p, const Device& device) {
  // Relative to the portable kernel's large tile: 1.5 to 2 on an H200. Up to head dim 64 that one has half as many keys
  // per tile, so more SMs have work if there are few keys; but one CTA alone would have to run at 0.85 of the rate of
  // three.
  constexpr double kRate = 1.7;
  const TurnCost cost = std::max(p.dim_qk, p.dim_v) <= 64 ? TurnCost{0.065, 0.115, 0.18} : TurnCost{0.1, 0.1, 0.21};
  std::vector<engine::Offer> offers;
  for (const Config& config : configs_for(p, device)) {
    const QuerySplit queries = queries_of(p, device, config);
    const auto workspace = backward_sm90_workspace(p, config, queries.tiles);
    if (!workspace.ok()) continue;
    if (static_cast<std::size_t>(backward_sm90_layout(config).bytes) > device.shared_memory_per_block) continue;
    const double rows = static_cast<double>(ceil_div(p.seq_q, config.block_q) * config.block_q);
    const GroupSplit split = split_of(p, device, config);
    double time = predicted_backward_time(p, device, rows, kRate) * split.relative_time * queries.relative_time;
    if (config.deterministic && !p.deterministic) {
      time *= relative_time_of_turns(p, device, config.block_q, block_k_of(config), cost);
    }
    offers.push_back({engine::main_config(config), *workspace, time,
                      format("computes {:.3g} rows per head; dQ {}{}{}", rows,
                             config.writes_dq       ? "written by the one CTA that has all keys"
                             : config.deterministic ? "summed in fp32 by atomics, in a fixed order"
                                                    : "summed in fp32 by atomics, in any order",
                             split_text(split), split_text(queries))});
  }
  return offers;
}

std::optional<Recipe> recipe(const AttentionProblem& p, const Device& device, const engine::Config& named) {
  for (const Config& config : configs_for(p, device)) {
    const QuerySplit queries = queries_of(p, device, config);
    const auto workspace = backward_sm90_workspace(p, config, queries.tiles);
    if (!workspace.ok() || engine::main_config(config) != named) continue;
    Recipe recipe;
    recipe.problem = p;
    recipe.steps = {{"preprocess", instance_of(preprocess_config(config.dtype, 8))}, {"main", main_kernel(config)}};
    if (converts_dq(config) || config.splits_group) {
      recipe.steps.push_back({"convert", instance_of(convert_config(config.dtype, 8))});
    }
    recipe.workspace = *workspace;
    const int part_heads = split_of(p, device, config).part_heads;
    recipe.enqueue = [config, part_heads, queries](const AttentionArgs& args, const engine::Launch& launch) {
      return enqueue(config, part_heads, queries, args, launch);
    };
    return recipe;
  }
  return std::nullopt;
}

constexpr int kDims[] = {8, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128};

std::vector<AttentionProblem> representatives(const Device& device) {
  std::vector<AttentionProblem> list;
  if (device.compute != 90 || !device.specific) return list;
  const auto add = [&](int dim_qk, int dim_v, bool masked, bool deterministic, int group = 1, bool score_mod = false) {
    AttentionProblem problem = representative(device, AttentionOp::kBackward, dim_qk, dim_v);
    problem.deterministic = deterministic;
    problem.heads_q *= group;
    problem.seq_q = problem.seq_k = 512;  // so few queries are not divided
    list.push_back(with_variant(problem, {masked, score_mod}));
  };
  const auto add_sliced = [&](int dim, bool masked, bool deterministic, bool score_mod = false) {
    add(dim, dim, masked, deterministic, 1, score_mod);
    list.back().seq_q = list.back().seq_k = 4096;
    list.back().heads_q = list.back().heads_kv = masked ? 16 : 2;  // many key tiles, or fewer than SMs
  };
  for (const bool masked : {false, true}) {
    for (const bool deterministic : {false, true}) {
      for (const int dim : kDims) add(dim, dim, masked, deterministic);
      add(128, 64, masked, deterministic);
      add(64, 128, masked, deterministic);
      add(56, 104, masked, deterministic);
    }
    for (const int dim : {64, 80, 96, 128}) add(dim, dim, masked, masked, 2);
    for (const int dim : {64, 80, 96, 128}) add(dim, dim, masked, !masked, 2);
    for (const bool deterministic : {false, true}) {
      for (const int dim : {64, 80, 128}) add(dim, dim, masked, deterministic, 1, true);
    }
    add(128, 128, masked, false, 2, true);
    for (const int dim : {8, 40, 48, 64, 80}) {
      add(dim, dim, masked, false);
      list.back().seq_k = kConsumerRows;
    }
    for (const int dim : {64, 80}) {
      add(dim, dim, masked, false, masked ? 2 : 1, true);
      list.back().seq_k = kConsumerRows;
    }
    add(64, 64, masked, false);
    list.back().seq_k = 2 * kConsumerRows;
    for (const int dim : {64, 80, 96, 128}) add_sliced(dim, masked, true);
  }
  for (const int dim : {64, 80, 96, 128}) add_sliced(dim, false, false);
  add_sliced(128, false, false, true);
  const auto add_in_step = [&](int dim, bool sliced, int group = 1, bool score_mod = false) {
    add(dim, dim, false, false, 1, score_mod);
    list.back().seq_q = 1 << 17;
    list.back().seq_k = device.multiprocessors * std::int64_t{2} * kConsumerRows + (sliced ? 1024 : 0);
    list.back().heads_q = 2;  // a wave of CTAs each
    list.back().heads_kv = 2 / group;
  };
  for (const int dim : {64, 80, 96, 128}) {
    for (const bool sliced : {false, true}) add_in_step(dim, sliced);
  }
  for (const int dim : {64, 128}) add_in_step(dim, false, 1, true);
  add_in_step(128, false, 2);
  return list;
}

}  // namespace

Implementation backward_sm90() {
  return {"attention_backward_sm90",
          AttentionFamily::bit_of(AttentionOp::kBackward),
          {"attention/backward_preprocess.cuh", "attention/backward_sm90.cuh", "attention/backward_convert.cuh"},
          refuses,
          offers,
          recipe,
          nullptr,
          representatives};
}

}  // namespace tessera::attention
