// The forward of RMSNorm and LayerNorm (kernels/norm/forward.cuh).
#include <algorithm>

#include "jit/config_text.h"
#include "norm/family.h"
#include "norm/forward_config.h"
#include "norm/gpu.h"

namespace tessera::norm {
namespace {

using Config = NormForwardConfig;

// CTAs per SM: as many as the registers that a Config needs allow without spills.
int ctas_per_sm(const Config& config) {
  const int registers = config.chunks > 2 || (config.centered && !config.aligned) ? 128
                        : config.centered || !config.aligned                      ? 80
                                                                                  : 64;
  return std::max(65536 / registers / config.threads, 1);
}

jit::KernelInstance main_kernel(const Config& config) {
  return {.name = instance_name("norm_forward", config),
          .header = "norm/forward.cuh",
          .entry = "norm_forward",
          .params = "NormForwardParams",
          .config = jit::config_text("NormForwardConfig", config),
          .threads = config.threads,
          .min_blocks = ctas_per_sm(config),
          .dynamic_smem_bytes = 0,
          .pdl = true};
}

Config config_of(const NormProblem& p, int wanted) {
  Config config = {};
  config.dtype = p.dtype;
  config.centered = p.centered;
  config.residual = p.residual;
  config.aligned = p.aligned;
  set_share(share_row(p, 128, wanted, p.aligned ? 4 : 2), config);
  return config;
}

std::vector<Config> configs_for(const NormProblem& p) {
  std::vector<Config> configs;
  for (const int wanted : {2, 1, 4}) {
    if (wanted <= 2 || p.aligned) configs.push_back(config_of(p, wanted));
  }
  return configs;
}

Status enqueue(const Config& config, const NormArgs& args, const engine::Launch& launch) {
  const NormProblem& p = args.problem;
  const std::int64_t groups = ceil_div(p.rows, config.threads / config.row_threads);
  const std::int64_t resident = std::int64_t{launch.kernels[0]->multiprocessors} * ctas_per_sm(config);
  cuda::Work<NormForwardParams> work = {};
  NormForwardParams& params = work.params;
  params.x = matrix_of(args.x);
  params.residual = matrix_of(args.residual);
  params.sum = matrix_of(args.sum);
  params.out = matrix_of(args.out);
  params.weight = args.weight.data;
  params.bias = args.bias.data;
  params.rstd = static_cast<float*>(args.rstd.data);
  params.mean = static_cast<float*>(args.mean.data);
  params.rows = p.rows;
  params.columns = static_cast<int>(p.columns);
  params.eps = args.eps;
  work.grid = {static_cast<unsigned>(balanced_ctas(groups, resident)), 1, 1};
  return cuda::launch(*launch.kernels[0], work, launch.stream);
}

std::vector<engine::Offer> offers(const NormProblem& p, const Device&) {
  const Config config = configs_for(p).front();
  const double bytes = static_cast<double>(p.rows) * static_cast<double>(p.columns) *
                       static_cast<double>(size_of(p.dtype)) * (p.residual ? 4 : 2);
  return {{engine::main_config(config), 0, copy_time(bytes),
           format("{} threads per row, {}{}", config.row_threads,
                  config.looped ? "which every pass reads" : "which stays in registers",
                  config.aligned ? "" : "; rows are not aligned to 16 bytes")}};
}

std::optional<Recipe> recipe(const NormProblem& p, const Device&, const engine::Config& named) {
  for (const Config& config : configs_for(p)) {
    if (engine::main_config(config) != named) continue;
    Recipe recipe;
    recipe.problem = p;
    recipe.steps = {{"main", main_kernel(config)}};
    recipe.enqueue = [config](const NormArgs& args, const engine::Launch& launch) {
      return enqueue(config, args, launch);
    };
    return recipe;
  }
  return std::nullopt;
}

std::vector<engine::Config> searches(const NormProblem& p, const Device&) {
  std::vector<engine::Config> list;
  for (const Config& config : configs_for(p)) list.push_back(engine::main_config(config));
  return list;
}

std::vector<NormProblem> representatives(const Device&) {
  constexpr NormOp kOp = NormOp::kForward;
  return {representative(kOp, DType::kBFloat16, 4096, true, true, true),
          representative(kOp, DType::kFloat16, 1365, true, true, false),
          representative(kOp, DType::kFloat32, 100000, true, true, false)};
}

}  // namespace

Implementation forward() {
  return {
      "norm_forward", NormFamily::bit_of(NormOp::kForward), {"norm/forward.cuh"}, gpu_refuses, offers, recipe, searches,
      representatives};
}

}  // namespace tessera::norm
