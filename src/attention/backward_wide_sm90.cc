// Attention backward on Hopper above head dim 128, dQ summed by atomics: backward_preprocess.cuh,
// backward_wide_sm90.cuh, backward_convert.cuh.
#include "attention/backward_wide_sm90.h"

#include <algorithm>
#include <climits>

#include "attention/atom_boxes.h"
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

using Config = AttentionBackwardWideSm90Config;

struct BackwardWideSm90Tile {
  int cluster;
  int q_stages;
  int d_o_stages;
  int p_stages;
  int ds_stages;
  int kept_steps;
  int kept_ds_steps;
  int dq_columns;
  int dq_registers;
};

// By counting registers. The P and the dS warpgroup hold dV and dK (a register for two columns), an accumulator of 64
// queries (32) and its 16-bit operand (16). Up to head dim 192 they have room for columns of K and V (4 for 16 columns).
// The dQ warpgroup keeps three quarters of its keys' dS (4 for 16 keys); where all of it fits, that is 4 % slower alone, and
// with a quarter of the other CTA's 1 to 2 % faster in pairs. The other CTA's K and dS take the shared memory of a stage.
constexpr BackwardWideSm90Tile backward_wide_sm90_tile(int dim_qk, int dim_v, bool pairs) {
  constexpr int kSumsAndColumns = 112;
  const int dim = std::max(dim_qk, dim_v);
  BackwardWideSm90Tile tile = {};
  tile.cluster = pairs ? 2 : 1;
  tile.d_o_stages = pairs && dim > 192 ? 1 : 2;
  tile.p_stages = 1;
  tile.ds_stages = 2;
  tile.dq_columns = kWidestAtom;
  if (dim > 192) {
    tile.q_stages = 2;
    tile.kept_steps = 0;
    tile.kept_ds_steps = 3;
    tile.dq_registers = 72;
  } else {
    tile.q_stages = pairs ? 2 : 3;
    tile.kept_steps = dim_qk == dim_v ? (kSumsAndColumns - dim / 2) / 4 : 0;
    tile.kept_ds_steps = pairs ? 5 : 3;
    tile.dq_registers = 80;
  }
  return tile;
}

}  // namespace

AttentionBackwardWideSm90Config backward_wide_sm90_config(DType dtype, int dim_qk, int dim_v, bool masked,
                                                          bool deterministic, std::int64_t seq_k, bool score_mod) {
  // With dQ of up to 128 columns there is little to gain, and with modified scores there are no registers.
  const bool pairs = !score_mod && dim_qk > 128 && seq_k > kBackwardWideTile;
  const BackwardWideSm90Tile tile = backward_wide_sm90_tile(dim_qk, dim_v, pairs);
  return {.dtype = dtype,
          .dim_qk = dim_qk,
          .dim_v = dim_v,
          .cluster = tile.cluster,
          .q_stages = tile.q_stages,
          .d_o_stages = tile.d_o_stages,
          .p_stages = tile.p_stages,
          .ds_stages = tile.ds_stages,
          .kept_steps = tile.kept_steps,
          .kept_ds_steps = tile.kept_ds_steps,
          .dq_columns = tile.dq_columns,
          .dq_registers = tile.dq_registers,
          .masked = masked,
          .deterministic = deterministic,
          .score_mod = score_mod,
          .splits_group = false};
}

namespace {

std::vector<Config> configs_for(const AttentionProblem& p) {
  std::vector<Config> configs = {backward_wide_sm90_config(p.dtype, static_cast<int>(p.dim_qk),
                                                           static_cast<int>(p.dim_v), is_masked(p), p.deterministic,
                                                           p.seq_k, has_score_mod(p))};
  if (!p.deterministic) {  // without convert, short sequences are faster
    configs.push_back(backward_wide_sm90_config(p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v),
                                                is_masked(p), true, p.seq_k, has_score_mod(p)));
  }
  if (p.heads_q > p.heads_kv) {
    configs.push_back(configs.front());
    configs.back().splits_group = true;
  }
  return configs;
}

BackwardSums sums_of(const Config& config) {
  return {.block_q = kBackwardWideTile,
          .block_k = config.splits_group ? kBackwardWideTile : 0,
          .turns = config.deterministic ? config.cluster : 0};
}

GroupSplit split_of(const AttentionProblem& p, const Device& device, const Config& config) {
  if (!config.splits_group) return {};
  return split_group(p, device, kBackwardWideTile, kBackwardWideTile, 0, config.deterministic);
}

cuda::Work<AttentionBackwardWideSm90Params> work_of(const AttentionArgs& args, const Config& config, int part_heads) {
  const std::int64_t heads = config.splits_group ? part_heads : args.problem.heads_q / args.problem.heads_kv;
  auto work =
      hopper_backward_work<AttentionBackwardWideSm90Params>(args, kBackwardWideTile * config.cluster, heads, heads);
  work.grid.x *= static_cast<unsigned>(config.cluster);
  return work;
}

Result<std::size_t> workspace_of(const AttentionProblem& problem, const Config& config) {
  const std::int64_t k_tiles = ceil_div(problem.seq_k, kBackwardWideTile * config.cluster) * config.cluster;
  if (!fits_a_grid(k_tiles, problem, config.splits_group ? problem.heads_q : problem.heads_kv)) {
    return Status(TESSERA_UNSUPPORTED, "attention_backward_wide_sm90: more rows than one grid can cover");
  }
  return hopper_backward_workspace(problem, "attention_backward_wide_sm90", kBackwardWideTile, sums_of(config));
}

jit::KernelInstance main_kernel(const Config& config) {
  return {.name = format("attention_backward_wide_sm90_{}_d{}x{}_{}x{}{}{}{}{}{}", name_of(config.dtype), config.dim_qk,
                         config.dim_v, kBackwardWideTile, kBackwardWideTile, config.masked ? "_masked" : "",
                         config.deterministic ? "_deterministic" : "", config.score_mod ? "_score_mod" : "",
                         config.splits_group ? "_split" : "", config.cluster > 1 ? "_cluster" : ""),
          .header = "attention/backward_wide_sm90.cuh",
          .entry = "attention_backward_wide_sm90",
          .params = "AttentionBackwardWideSm90Params",
          .config = jit::config_text("AttentionBackwardWideSm90Config", config),
          .threads = kBackwardWideThreads,
          .min_blocks = 1,
          .dynamic_smem_bytes = backward_wide_sm90_layout(config).bytes,
          .pdl = true,
          .cluster = config.cluster};
}

// Boxes of 64 x 64.
Status encode(const TensorView& view, const TensorExtents& extents, TensorMap& map) {
  AtomBoxes boxes;
  if (Status s = atom_boxes(view, extents, kBackwardWideTile, kWidestAtom, boxes); !s.ok()) return s;
  return encode_one(boxes, map);
}

Status enqueue(const Config& config, int part_heads, const AttentionArgs& args, const engine::Launch& launch) {
  const AttentionProblem& p = args.problem;
  cuda::Work<AttentionBackwardWideSm90Params> work = work_of(args, config, part_heads);
  const BackwardBuffers buffers = backward_buffers(p, sums_of(config), launch.workspace);
  AttentionBackwardWideSm90Params& params = work.params;
  if (config.deterministic) keep_turns_close(params, launch.kernels[1]->multiprocessors, config.cluster);
  fill_buffers(params, args, buffers);
  {
    // The driver makes tensor maps only if a context is current.
    const auto scope = cuda::ContextScope::enter(launch.kernels[1]->device);
    if (!scope.ok()) return scope.status();
    if (Status s = encode(args.q, query_extents(p, p.dim_qk), params.q); !s.ok()) return s;
    if (Status s = encode(args.d_o, query_extents(p, p.dim_v), params.d_o); !s.ok()) return s;
    if (Status s = encode(args.k, key_extents(p, p.dim_qk), params.k); !s.ok()) return s;
    if (Status s = encode(args.v, key_extents(p, p.dim_v), params.v); !s.ok()) return s;
  }
  if (Status s = enqueue_preprocess(*launch.kernels[0], args, buffers, launch.stream); !s.ok()) return s;
  if (Status s = cuda::launch(*launch.kernels[1], work, launch.stream); !s.ok()) return s;
  if (!config.deterministic) {  // else the last key tile of a query tile wrote dQ
    Status s = enqueue_convert(*launch.kernels[2], args, buffers.sums, kBackwardWideTile, launch.stream);
    if (!s.ok()) return s;
  }
  if (!config.splits_group) return {};
  return enqueue_convert_keys(*launch.kernels[2], args, buffers.dk_sums, buffers.dv_sums, kBackwardWideTile,
                              launch.stream);
}

std::optional<std::string> refuses(const AttentionProblem& p, const Device& device) {
  if (auto reason = hopper_backward_refuses(p, device)) return reason;
  if (p.dim_qk <= 128 && p.dim_v <= 128) {
    return format("takes head dims above 128, not {}", std::max(p.dim_qk, p.dim_v));
  }
  const auto workspace = workspace_of(p, configs_for(p).front());
  if (!workspace.ok()) return workspace.status().message();
  return std::nullopt;
}

std::vector<engine::Offer> offers(const AttentionProblem& p, const Device& device) {
  constexpr double kRate = 1.8;  // relative to the portable kernel's large tile
  std::vector<engine::Offer> offers;
  for (const Config& config : configs_for(p)) {
    const auto workspace = workspace_of(p, config);
    if (!workspace.ok()) continue;
    if (static_cast<std::size_t>(backward_wide_sm90_layout(config).bytes) > device.shared_memory_per_block) continue;
    const double rows = static_cast<double>(ceil_div(p.seq_q, kBackwardWideTile) * kBackwardWideTile);
    const GroupSplit split = split_of(p, device, config);
    double time = predicted_backward_time(p, device, rows, kRate) * split.relative_time;
    if (config.deterministic && !p.deterministic) {
      const TurnCost cost = config.cluster > 1 ? TurnCost{0.06, 0.2, 0.2} : TurnCost{0.1, 0.25, 0.25};
      time *= relative_time_of_turns(p, device, kBackwardWideTile, kBackwardWideTile, cost, config.cluster);
    }
    offers.push_back({engine::main_config(config), *workspace, time,
                      format("computes {:.3g} rows per head; dQ summed in fp32 by atomics, in {} order{}", rows,
                             config.deterministic ? "a fixed" : "any", split_text(split))});
  }
  return offers;
}

std::optional<Recipe> recipe(const AttentionProblem& p, const Device& device, const engine::Config& named) {
  for (const Config& config : configs_for(p)) {
    const auto workspace = workspace_of(p, config);
    if (!workspace.ok() || engine::main_config(config) != named) continue;
    Recipe recipe;
    recipe.problem = p;
    recipe.steps = {{"preprocess", instance_of(preprocess_config(config.dtype, 8))}, {"main", main_kernel(config)}};
    if (!config.deterministic || config.splits_group) {
      recipe.steps.push_back({"convert", instance_of(convert_config(config.dtype, 8))});
    }
    recipe.workspace = *workspace;
    const int part_heads = split_of(p, device, config).part_heads;
    recipe.enqueue = [config, part_heads](const AttentionArgs& args, const engine::Launch& launch) {
      return enqueue(config, part_heads, args, launch);
    };
    return recipe;
  }
  return std::nullopt;
}

constexpr int kDims[] = {136, 176, 192, 200, 256};

std::vector<AttentionProblem> representatives(const Device& device) {
  std::vector<AttentionProblem> list;
  if (device.compute != 90 || !device.specific) return list;
  const auto add = [&](int dim_qk, int dim_v, bool masked, bool deterministic = false, int group = 1,
                       bool score_mod = false) {
    AttentionProblem problem = representative(device, AttentionOp::kBackward, dim_qk, dim_v);
    problem.deterministic = deterministic;
    problem.heads_q *= group;
    list.push_back(with_variant(problem, {masked, score_mod}));
  };
  for (const bool masked : {false, true}) {
    for (const int dim : kDims) add(dim, dim, masked);
    add(192, 128, masked);
    for (const int dim : {136, 192, 256}) add(dim, dim, masked, true);
  }
  for (const int dim : {192, 256}) {  // alone
    add(dim, dim, true);
    list.back().seq_k = kBackwardWideTile;
  }
  add(64, 256, true);
  add(256, 64, true);
  for (const bool deterministic : {false, true}) {
    for (const int dim : {192, 256}) add(dim, dim, true, deterministic, 2);
  }
  for (const bool masked : {false, true}) {
    for (const int dim : {192, 256}) {
      add(dim, dim, masked, !masked, 1, true);
      add(dim, dim, masked, masked, masked ? 1 : 2, true);
    }
  }
  return list;
}

}  // namespace

Implementation backward_wide_sm90() {
  return {"attention_backward_wide_sm90",
          AttentionFamily::bit_of(AttentionOp::kBackward),
          {"attention/backward_preprocess.cuh", "attention/backward_wide_sm90.cuh", "attention/backward_convert.cuh"},
          refuses,
          offers,
          recipe,
          nullptr,
          representatives};
}

}  // namespace tessera::attention
