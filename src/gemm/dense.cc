// Dense GEMM on mma.sync (kernels/gemm/dense.cuh).
#include <algorithm>
#include <climits>

#include "base/format.h"
#include "gemm/dense_config.h"
#include "gemm/family.h"
#include "gemm/gpu.h"
#include "gemm/split_reduce.h"
#include "jit/config_text.h"

namespace tessera::gemm {
namespace {

using Config = GemmDenseConfig;

struct Choice {
  Config main;
  int splits;  // 1: not split
};

constexpr int kGroupRows = 8;  // row tiles that are processed together

jit::KernelInstance main_kernel(const Config& config) {
  return {
      .name = format("gemm_dense_{}_{}_{}{}_{}x{}x{}{}{}{}{}", name_of(config.dtype), name_of(config.out_dtype),
                     config.a_transposed ? 't' : 'n', config.b_transposed ? 't' : 'n', config.block_m, config.block_n,
                     config.block_k, config.vector == 1 ? "_v1" : "", grouping_suffix(config.grouping),
                     config.split ? "_split" : "", epilogue_suffix(epilogue_of(config))),
      .header = "gemm/dense.cuh",
      .entry = "gemm_dense",
      .params = "GemmDenseParams",
      .config = jit::config_text("GemmDenseConfig", config),
      .threads = gemm_dense_threads(config),
      .min_blocks = 1,
      .dynamic_smem_bytes = gemm_dense_shared_bytes(config),
      .pdl = true};
}

struct Tile {
  int block_m, block_n, warps_m, warps_n;
};
constexpr Tile kTiles[] = {{128, 128, 2, 4}, {64, 64, 2, 2}};

Config config_of(const GemmProblem& p, const Device& device, const Tile& tile, bool split) {
  Config config = {};
  config.a_transposed = p.a_transposed;
  config.b_transposed = p.b_transposed;
  config.block_m = tile.block_m;
  config.block_n = tile.block_n;
  config.block_k = 32;
  config.warps_m = tile.warps_m;
  config.warps_n = tile.warps_n;
  config.vector = p.a_aligned && p.b_aligned ? 8 : 1;
  config.stages = config.vector == 8 && device.compute >= 80 ? 3 : 2;
  config.grouping = p.grouping;
  config.split = split;
  set_epilogue(p, config);
  if (split) {  // the next step's
    config.activation = kIdentity;
    config.bias = config.gradient = config.preactivation = config.residual = false;
    config.out_dtype = DType::kFloat32;
    config.pairs = true;
  }
  return config;
}

// Of all groups; if rows are ragged, at most.
std::int64_t tiles_of(const GemmProblem& p, const Tile& tile) {
  const std::int64_t rows = ceil_div(p.m, tile.block_m) + (p.grouping == kRaggedRows ? p.groups : 0);
  return saturating_product(rows, ceil_div(p.n, p.gated ? tile.block_n / 2 : tile.block_n),
                            out_has_layers(p.grouping) ? p.groups : 1);
}

// Enough CTAs for all multiprocessors, as long as each has some steps of K.
int splits_of(const GemmProblem& p, const Device& device, const Tile& tile) {
  constexpr std::int64_t kLeastK = 512, kMost = 32;
  const std::int64_t tiles = std::max<std::int64_t>(tiles_of(p, tile), 1);
  if (p.gated || p.grouping != kUngrouped || tiles * 2 > device.multiprocessors) return 1;
  return static_cast<int>(std::clamp<std::int64_t>(std::min(device.multiprocessors / tiles, p.k / kLeastK), 1, kMost));
}

std::vector<Choice> choices_for(const GemmProblem& p, const Device& device) {
  std::vector<Choice> choices;
  for (const Tile& tile : kTiles) {
    choices.push_back({config_of(p, device, tile, false), 1});
    const int splits = splits_of(p, device, tile);
    if (splits > 1) choices.push_back({config_of(p, device, tile, true), splits});
  }
  return choices;
}

engine::Config named(const Choice& choice) {
  engine::Config config = {{"main", engine::fields_of(choice.main)}};
  if (choice.splits > 1) config.push_back({"reduce", {{"splits", static_cast<std::int64_t>(choice.splits)}}});
  return config;
}

std::optional<std::string> refuses(const GemmProblem& p, const Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  return refuses_recipe_features(p);
}

std::size_t workspace_of(const GemmProblem& p, const Choice& choice) {
  return choice.splits > 1 ? partial_bytes(p, choice.splits) : 0;
}

Status enqueue(const Choice& choice, const GemmArgs& args, const engine::Launch& launch) {
  const GemmProblem& p = args.problem;
  const Config& config = choice.main;
  const Tile tile{config.block_m, config.block_n, config.warps_m, config.warps_n};
  const std::int64_t ctas = saturating_product(tiles_of(p, tile), choice.splits);
  if (ctas > INT_MAX) return {TESSERA_UNSUPPORTED, "gemm_dense: more tiles than one grid can cover"};
  cuda::Work<GemmDenseParams> work = {};
  GemmDenseParams& params = work.params;
  params.a = matrix_of(args.a);
  params.b = matrix_of(args.b);
  params.gate = matrix_of(args.gate);
  params.epilogue = epilogue_params(args);
  params.m = static_cast<int>(p.m);
  params.n = static_cast<int>(p.n);
  params.k = static_cast<int>(p.k);
  params.offsets = args.offsets;
  params.groups = static_cast<int>(p.groups);
  params.order = {static_cast<unsigned>(ceil_div(p.m, config.block_m)),
                  static_cast<unsigned>(ceil_div(p.n, p.gated ? config.block_n / 2 : config.block_n)), kGroupRows};
  params.splits = static_cast<unsigned>(choice.splits);
  params.k_per_split = static_cast<int>(ceil_div(ceil_div(p.k, choice.splits), config.block_k) * config.block_k);
  params.partial = static_cast<float*>(launch.workspace);
  params.partial_stride = partial_stride(p);
  work.grid = {static_cast<unsigned>(ctas), 1, 1};
  if (Status s = cuda::launch(*launch.kernels[0], work, launch.stream); !s.ok() || choice.splits == 1) return s;
  const auto reduce = reduce_work(args, params.partial, choice.splits);
  if (!reduce.ok()) return reduce.status();
  return cuda::launch(*launch.kernels[1], *reduce, launch.stream);
}

// Microseconds, roughly: measured on an H200 and scaled.
double predicted_time(const GemmProblem& p, const Device& device, const Choice& choice) {
  const double of_hopper = device.compute >= 90 ? 1.0 : device.compute >= 80 ? 0.7 : 0.2;
  const Config& c = choice.main;
  const double efficiency = (c.block_m >= 128 ? 1.0 : 0.6) * (c.vector == 1 ? 0.25 : 1.0);
  const double per_sm = 1.1e6 * of_hopper * efficiency;  // multiply-adds per microsecond
  const Tile tile{c.block_m, c.block_n, c.warps_m, c.warps_n};
  const double ctas = static_cast<double>(tiles_of(p, tile)) * choice.splits;
  const double rounds = std::max(ctas / device.multiprocessors, 1.0);
  const double terms = static_cast<double>(p.k) / choice.splits / static_cast<double>(groups_of_terms(p));
  // Products with few terms spend their time on what the epilogue stores and loads, element by element if not aligned.
  const int matrices = 1 + (c.residual ? 1 : 0) + (c.gradient ? 1 : 0) + (c.preactivation ? 1 : 0);
  const double per_element = terms / per_sm + matrices * (c.vector == 1 ? 4e-4 : 1e-4) / of_hopper;
  const double each = static_cast<double>(c.block_m) * c.block_n * per_element;
  return 3.0 + rounds * each + (choice.splits > 1 ? reduce_time(p, choice.splits) : 0.0);
}

std::vector<engine::Offer> offers(const GemmProblem& p, const Device& device) {
  std::vector<engine::Offer> offers;
  for (const Choice& choice : choices_for(p, device)) {
    std::string why = choice.main.vector == 1 ? "loads element by element, because rows are not 16-byte aligned"
                                              : "loads 16 bytes at a time";
    if (choice.splits > 1) why += format("; K in {} parts", choice.splits);
    offers.push_back({named(choice), workspace_of(p, choice), predicted_time(p, device, choice), why});
  }
  return offers;
}

std::optional<Recipe> recipe(const GemmProblem& p, const Device& device, const engine::Config& config) {
  for (const Choice& choice : choices_for(p, device)) {
    if (named(choice) != config) continue;
    Recipe recipe;
    recipe.problem = p;
    recipe.problem.tensor_maps = false;
    if (choice.main.vector == 1) recipe.problem.a_aligned = recipe.problem.b_aligned = false;
    recipe.steps = {{"main", main_kernel(choice.main)}};
    bool pairs = choice.main.pairs;
    if (choice.splits > 1) {
      const GemmSplitReduceConfig reduce = reduce_config(p, false);
      pairs = reduce.pairs;
      recipe.steps.push_back({"reduce", instance_of(reduce)});
    }
    if (!pairs) recipe.problem.out_aligned = recipe.problem.epilogue_aligned = false;
    recipe.workspace = workspace_of(p, choice);
    recipe.enqueue = [choice](const GemmArgs& args, const engine::Launch& launch) {
      return enqueue(choice, args, launch);
    };
    return recipe;
  }
  return std::nullopt;
}

// Both tiles, aligned rows or not, with the epilogues that need the most registers.
std::vector<GemmProblem> representatives(const Device& device) {
  std::vector<GemmProblem> list;
  GemmProblem p = representative(device, 4096, 4096, 4096);
  p.bias = p.preactivation = p.residual = true;
  p.activation = kGeluErf;
  list.push_back(p);
  p = representative(device, 4096, 4096, 1365);
  p.a_transposed = p.b_transposed = p.gated = p.bias = true;
  p.activation = kSilu;
  p.a_aligned = p.b_aligned = false;
  list.push_back(p);
  p = representative(device, 65536, 1408, 2048);
  p.op = GemmOp::kGrouped;
  p.grouping = kRaggedRows;
  p.groups = 64;
  p.gated = true;
  p.activation = kSilu;
  list.push_back(p);
  return list;
}

}  // namespace

Implementation dense() {
  return {"gemm_dense",
          GemmFamily::bit_of(GemmOp::kDense) | GemmFamily::bit_of(GemmOp::kGrouped),
          {"gemm/dense.cuh", "gemm/split_reduce.cuh"},
          refuses,
          offers,
          recipe,
          nullptr,
          representatives};
}

}  // namespace tessera::gemm
