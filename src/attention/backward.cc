// Attention backward on any GPU: backward_preprocess.cuh, then backward.cuh and either backward_convert.cuh (dQ summed
// by atomics) or backward_dq.cuh (deterministic).
#include "attention/backward.h"

#include <algorithm>
#include <climits>

#include "attention/backward_convert.h"
#include "attention/backward_preprocess.h"
#include "attention/backward_steps.h"
#include "attention/family.h"
#include "attention/gpu.h"
#include "attention/params.h"
#include "base/arch.h"
#include "base/format.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

struct BackwardTile {
  int block_q;
  int block_k;
  int warps;
  int stages;
  int kept_steps;
  int dq_unroll;
  int ctas_per_sm;
};

constexpr bool has_small_tiles(int arch) { return arch == 86 || arch == 120; }  // 99 KB of shared memory

// Found by trying on an H200 (docs/kernels/attention_backward.md): no register is spilled at the head dims that the
// compile gate compiles. Architectures with less shared memory have tiles of half the size.
constexpr BackwardTile backward_tile(int arch, int dim_qk, int dim_v, bool masked, bool score_mod) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  const int steps = (dim + 15) / 16;
  if (arch < 80) {
    if (dim <= 128) return {32, 64, dim <= 96 ? 4 : 8, 1, 0, 2, 1};
    return dim <= 192 ? BackwardTile{32, 32, 4, 1, 0, 2, 1} : BackwardTile{16, 32, 4, 1, 0, 2, 1};
  }
  if (arch != 90) {
    const bool small = has_small_tiles(arch);
    if (dim <= 64) return {small ? 32 : 64, 64, 4, 2, score_mod ? 0 : steps / 2, 2, 3};
    if (dim <= 96) return {small ? 32 : 64, small ? 64 : 128, small ? 4 : 8, 2, score_mod ? 0 : steps, 2, 1};
    if (dim <= 128) return {32, small ? 64 : 128, small ? 4 : 8, 2, score_mod || arch >= 100 ? 0 : 2, 2, 1};
    return small ? BackwardTile{16, 64, 8, 1, 0, 2, 1} : BackwardTile{32, 64, 8, 2, 0, 2, 1};
  }
  if (dim <= 64) return {64, 64, 4, 2, score_mod ? 0 : masked ? dim / 16 : steps, masked ? 2 : 16, 3};
  if (dim <= 96) return {64, 128, 8, 2, score_mod ? 0 : steps, 16, 1};
  const int kept = dim_qk != dim_v ? 2 : masked && dim == 128 ? 6 : 4;
  if (dim <= 128) return {64, 128, 8, 2, score_mod ? 0 : kept, 16, 1};
  return {64, 64, 8, 2, 0, masked ? 2 : 16, 1};
}

// Without 16-byte copies, data in flight is in registers: one stage, and nothing kept.
constexpr BackwardTile staged_backward_tile(int arch, int dim_qk, int dim_v, bool masked, bool score_mod) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  const BackwardTile tile = backward_tile(arch, dim_qk, dim_v, masked, score_mod);
  if (arch < 80) return tile;
  if (dim <= 96) return {tile.block_q, tile.block_k, tile.warps, 1, 0, 2, 1};
  return {has_small_tiles(arch) && dim > 128 ? 16 : 32, 64, 8, 1, 0, 2, 1};
}

// For few queries: one strip per tile. It wastes less, and has registers to sum the scores more accurately.
constexpr BackwardTile small_backward_tile(int arch, int dim_qk, int dim_v) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (dim <= 128) return {16, 64, arch < 80 && dim > 96 ? 8 : 4, 1, 0, 2, 1};
  return {16, arch < 80 ? 32 : 64, arch < 80 ? 4 : 8, 1, 0, 2, 1};
}
struct BackwardDqTile {
  int block_q;
  int block_k;
  int warps;
  int stages;
  int ctas_per_sm;
};

constexpr BackwardDqTile backward_dq_tile(int arch, int dim_qk, int dim_v, bool score_mod) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (arch < 80) {
    if (dim <= 128) return {64, 32, 4, 1, 1};
    return dim <= 192 ? BackwardDqTile{64, 16, 4, 1, 1} : BackwardDqTile{32, 16, 2, 1, 1};
  }
  if (dim <= 80 && !score_mod) return {128, 64, 4, 2, dim <= 64 ? 3 : 2};
  if (dim <= 128) return score_mod ? BackwardDqTile{64, 64, 4, 1, 2} : BackwardDqTile{128, 64, 4, 1, 2};
  if (arch == 90) return {128, 32, 8, 2, 1};
  return {64, has_small_tiles(arch) ? 16 : 32, 4, 2, 1};
}
}  // namespace

std::vector<BackwardConfigs> backward_configs(int compute, DType dtype, int dim_qk, int dim_v, int vector, bool masked,
                                              bool score_mod, bool deterministic) {
  const bool staged = vector == 1;
  const BackwardDqTile dq = backward_dq_tile(compute, dim_qk, dim_v, score_mod);
  const BackwardDqConfig dq_config = {.dtype = dtype,
                                      .dim_qk = dim_qk,
                                      .dim_v = dim_v,
                                      .block_q = dq.block_q,
                                      .block_k = dq.block_k,
                                      .warps = dq.warps,
                                      .stages = staged ? 1 : dq.stages,
                                      .ctas_per_sm = staged ? 1 : dq.ctas_per_sm,
                                      .vector = vector,
                                      .masked = masked,
                                      .score_mod = score_mod};
  const BackwardTile large = staged ? staged_backward_tile(compute, dim_qk, dim_v, masked, score_mod)
                                    : backward_tile(compute, dim_qk, dim_v, masked, score_mod);
  const BackwardTile small = small_backward_tile(compute, dim_qk, dim_v);
  std::vector<BackwardConfigs> list;
  for (const BackwardTile& tile : {large, small}) {
    if (!list.empty() && small.block_q == large.block_q && small.block_k == large.block_k) continue;
    list.push_back({.main = {.dtype = dtype,
                             .dim_qk = dim_qk,
                             .dim_v = dim_v,
                             .block_q = tile.block_q,
                             .block_k = tile.block_k,
                             .warps = tile.warps,
                             .stages = tile.stages,
                             .kept_steps = tile.kept_steps,
                             .adds_dq = !deterministic,
                             .dq_unroll = tile.dq_unroll,
                             .ctas_per_sm = tile.ctas_per_sm,
                             .vector = vector,
                             .masked = masked,
                             .score_mod = score_mod},
                    .dq = dq_config});
  }
  return list;
}

namespace {

jit::KernelInstance main_kernel(const AttentionBackwardConfig& config) {
  return {.name = format("attention_backward_{}_d{}x{}_{}x{}w{}{}{}{}{}", name_of(config.dtype), config.dim_qk,
                         config.dim_v, config.block_q, config.block_k, config.warps, config.adds_dq ? "" : "_no_dq",
                         config.masked ? "_masked" : "", config.score_mod ? "_score_mod" : "",
                         config.vector == 1 ? "_v1" : ""),
          .header = "attention/backward.cuh",
          .entry = "attention_backward",
          .params = "AttentionBackwardParams",
          .config = jit::config_text("AttentionBackwardConfig", config),
          .threads = config.warps * 32,
          .min_blocks = config.ctas_per_sm,
          .dynamic_smem_bytes = backward_layout(config).bytes,
          .pdl = true};
}

jit::KernelInstance dq_kernel(const BackwardDqConfig& config) {
  return {.name = format("backward_dq_{}_d{}x{}_{}x{}w{}{}{}{}", name_of(config.dtype), config.dim_qk, config.dim_v,
                         config.block_q, config.block_k, config.warps, config.masked ? "_masked" : "",
                         config.score_mod ? "_score_mod" : "", config.vector == 1 ? "_v1" : ""),
          .header = "attention/backward_dq.cuh",
          .entry = "backward_dq",
          .params = "AttentionBackwardParams",
          .config = jit::config_text("BackwardDqConfig", config),
          .threads = config.warps * 32,
          .min_blocks = config.ctas_per_sm,
          .dynamic_smem_bytes = backward_dq_shared_bytes(config),
          .pdl = true};
}

// block_q of dQ's sums; 0: another kernel computes dQ.
int sums_block_q(const BackwardConfigs& configs) { return configs.main.adds_dq ? configs.main.block_q : 0; }

// CTAs of each of the kernels that follow the preprocess, for each head of each sequence.
struct Tiles {
  std::int64_t main;
  std::int64_t convert;
  std::int64_t dq;
};

Tiles tiles_of(const AttentionProblem& p, const BackwardConfigs& configs) {
  return {ceil_div(p.seq_k, configs.main.block_k), convert_tiles(p), ceil_div(p.seq_q, configs.dq.block_q)};
}

}  // namespace

Result<std::size_t> backward_workspace(const AttentionProblem& problem, const BackwardConfigs& configs) {
  const Tiles tiles = tiles_of(problem, configs);
  if (!fits_a_grid(tiles.main, problem, problem.heads_kv) ||
      !fits_a_grid(configs.main.adds_dq ? tiles.convert : tiles.dq, problem, problem.heads_q)) {
    return Status(TESSERA_UNSUPPORTED, "attention_backward: more rows than one grid can cover");
  }
  const std::int64_t bytes = backward_bytes(problem, {.block_q = sums_block_q(configs)});
  if (bytes == LLONG_MAX) return Status(TESSERA_UNSUPPORTED, "attention_backward: its workspace cannot be addressed");
  return static_cast<std::size_t>(bytes);
}

namespace {

AttentionBackwardParams params_of(const AttentionArgs& args, const BackwardBuffers& buffers) {
  AttentionBackwardParams params = {};
  fill_inputs(params, args);
  params.d_o = args.d_o.data;
  params.lse_log2 = buffers.lse_log2.data;
  params.delta = buffers.delta.data;
  params.dq = args.dq.data;
  params.dk = args.dk.data;
  params.dv = args.dv.data;
  params.d_o_strides = strides_of(args.d_o);
  params.dq_strides = strides_of(args.dq);
  params.dk_strides = strides_of(args.dk);
  params.dv_strides = strides_of(args.dv);
  params.row_strides = strides_of(buffers.delta);
  params.dq_sums = buffers.sums;
  return params;
}

// backward_workspace has checked that it fits a grid.
Status launch_tiles(const cuda::Kernel& kernel, const AttentionBackwardParams& params, std::int64_t tiles,
                    const AttentionProblem& p, std::int64_t heads, cuda::CUstream stream) {
  const cuda::Grid grid{static_cast<unsigned>(tiles * p.batch * heads), 1, 1};
  return cuda::launch(kernel, cuda::Work<AttentionBackwardParams>{params, grid}, stream);
}

Status enqueue(const BackwardConfigs& configs, const AttentionArgs& args, const engine::Launch& launch) {
  const AttentionProblem& p = args.problem;
  const BackwardBuffers buffers = backward_buffers(p, {.block_q = sums_block_q(configs)}, launch.workspace);
  if (Status s = enqueue_preprocess(*launch.kernels[0], args, buffers, launch.stream); !s.ok()) return s;

  AttentionBackwardParams params = params_of(args, buffers);
  const Tiles tiles = tiles_of(p, configs);
  params.tiles = static_cast<unsigned>(tiles.main);
  if (Status s = launch_tiles(*launch.kernels[1], params, tiles.main, p, p.heads_kv, launch.stream); !s.ok()) return s;
  if (configs.main.adds_dq) {
    return enqueue_convert(*launch.kernels[2], args, buffers.sums, configs.main.block_q, launch.stream);
  }
  params.tiles = static_cast<unsigned>(tiles.dq);
  return launch_tiles(*launch.kernels[2], params, tiles.dq, p, p.heads_q, launch.stream);
}

// The architecture whose tiles are used: of those with as much shared memory, the first of its kind. Hopper's spill on
// Blackwell, whose tiles are sm_80's or sm_86's, some with fewer registers.
int tile_arch(const Device& device) {
  if (device.compute <= 80 || device.compute == 90) return device.compute;
  const auto needed = static_cast<std::size_t>(limits_of(80).shared_memory_per_block);
  const bool small = device.shared_memory_per_block < needed;
  if (device.compute < 100) return small ? 86 : 80;
  return small ? 120 : 100;
}

std::vector<BackwardConfigs> configs_for(const AttentionProblem& p, const Device& device) {
  return backward_configs(tile_arch(device), p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v),
                          vector_of(p), is_masked(p), has_score_mod(p), p.deterministic);
}

int shared_bytes(const BackwardConfigs& configs) {
  return std::max(backward_layout(configs.main).bytes, configs.main.adds_dq ? 0 : backward_dq_shared_bytes(configs.dq));
}

std::optional<std::string> refuses(const AttentionProblem& p, const Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  const BackwardConfigs configs = configs_for(p, device).front();
  const auto workspace = backward_workspace(p, configs);
  if (!workspace.ok()) return workspace.status().message();
  if (static_cast<std::size_t>(shared_bytes(configs)) > device.shared_memory_per_block) {
    return format("needs {} bytes of shared memory per CTA; {} has {}", shared_bytes(configs), device.name,
                  device.shared_memory_per_block);
  }
  return std::nullopt;
}

engine::Config named(const BackwardConfigs& configs) {
  engine::Config config = engine::main_config(configs.main);
  if (!configs.main.adds_dq) config.push_back({"dq", engine::fields_of(configs.dq)});
  return config;
}

std::vector<engine::Offer> offers(const AttentionProblem& p, const Device& device) {
  constexpr double kSmallTileRate = 0.5;  // relative to the large one's, roughly: it is for few queries
  std::vector<engine::Offer> offers;
  for (const BackwardConfigs& configs : configs_for(p, device)) {
    const auto workspace = backward_workspace(p, configs);
    if (!workspace.ok()) continue;  // the small tile, if only the large one's grid is small enough
    const double rows = static_cast<double>(ceil_div(p.seq_q, configs.main.block_q) * configs.main.block_q);
    offers.push_back(
        {named(configs), *workspace, predicted_backward_time(p, device, rows, offers.empty() ? 1.0 : kSmallTileRate),
         format("computes {:.3g} rows per head; {}", rows,
                p.deterministic ? "dQ by a kernel of its own, no atomics" : "dQ summed in fp32 by atomics")});
  }
  return offers;
}

std::optional<Recipe> recipe(const AttentionProblem& p, const Device& device, const engine::Config& config) {
  for (const BackwardConfigs& configs : configs_for(p, device)) {
    const auto workspace = backward_workspace(p, configs);
    if (!workspace.ok() || named(configs) != config) continue;
    Recipe recipe;
    recipe.problem = p;
    recipe.problem.tensor_maps = false;
    recipe.steps = {{"preprocess", instance_of(preprocess_config(p.dtype, vector_of(p)))},
                    {"main", main_kernel(configs.main)}};
    if (configs.main.adds_dq) {
      recipe.steps.push_back({"convert", instance_of(convert_config(p.dtype, vector_of(p)))});
    } else {
      recipe.steps.push_back({"dq", dq_kernel(configs.dq)});
    }
    recipe.workspace = *workspace;
    recipe.enqueue = [configs](const AttentionArgs& args, const engine::Launch& launch) {
      return enqueue(configs, args, launch);
    };
    return recipe;
  }
  return std::nullopt;
}

constexpr int kDims[] = {8, 64, 80, 128, 256};
constexpr int kMoreDims[] = {56, 72, 96, 104, 112, 192};  // masked only, which needs the most registers

std::vector<AttentionProblem> representatives(const Device& device) {
  std::vector<AttentionProblem> list;
  const auto add = [&](int dim_qk, int dim_v, const Variant& variant, bool vectors) {
    for (const bool deterministic : {false, true}) {
      AttentionProblem p = with_variant(representative(device, AttentionOp::kBackward, dim_qk, dim_v), variant);
      p.vectors = p.tensor_maps = vectors;
      p.deterministic = deterministic;
      list.push_back(p);
    }
  };
  const bool as_sm_86 = device.compute == 89;  // the same code
  const bool as_sm_80 = device.compute >= 90;  // the same tiles below 128
  for (const Variant& variant : kVariants) {
    if (as_sm_86) continue;
    for (const int dim : kDims) {
      if (!as_sm_80 || dim >= 128) add(dim, dim, variant, true);
    }
    if (!variant.masked || variant.score_mod || as_sm_80) continue;
    for (const int dim : kMoreDims) add(dim, dim, variant, true);
  }
  add(80, 64, {true, true}, false);
  for (const int dim : {128, 256}) add(dim, dim, {true, false}, false);
  add(192, 128, {true, false}, true);
  if (device.compute == 90) add(112, 128, {true, false}, true);
  return list;
}

}  // namespace

Implementation backward() {
  return {"attention_backward",
          AttentionFamily::bit_of(AttentionOp::kBackward),
          {"attention/backward_preprocess.cuh", "attention/backward.cuh", "attention/backward_convert.cuh",
           "attention/backward_dq.cuh"},
          refuses,
          offers,
          recipe,
          nullptr,
          representatives};
}

}  // namespace tessera::attention
