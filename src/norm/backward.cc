// The backward of RMSNorm and LayerNorm (kernels/norm/backward.cuh), and the sums over its CTAs
// (kernels/norm/parameter_gradients.cuh).
#include <algorithm>

#include "jit/config_text.h"
#include "norm/backward_config.h"
#include "norm/family.h"
#include "norm/gpu.h"
#include "norm/parameter_gradients_config.h"

namespace tessera::norm {
namespace {

using Config = NormBackwardConfig;

constexpr int kGroups = 32;  // warps that share the sums over CTAs

int ctas_per_sm(const Config& config) { return std::max(512 / config.threads, 1); }

jit::KernelInstance main_kernel(const Config& config) {
  return {.name = instance_name("norm_backward", config) + (config.parameters ? "_parameters" : "") +
                  (config.threads > config.row_threads ? format("_{}rows", config.threads / config.row_threads) : "") +
                  (config.stages > 0 ? format("_s{}", config.stages) : ""),
          .header = "norm/backward.cuh",
          .entry = "norm_backward",
          .params = "NormBackwardParams",
          .config = jit::config_text("NormBackwardConfig", config),
          .threads = config.threads,
          .min_blocks = ctas_per_sm(config),
          .dynamic_smem_bytes = norm_backward_shared_bytes(config),
          .pdl = true};
}

jit::KernelInstance reduce_kernel(DType dtype) {
  const NormParameterGradientsConfig config{.dtype = dtype, .groups = kGroups};
  return {.name = format("norm_parameter_gradients_{}", name_of(dtype)),
          .header = "norm/parameter_gradients.cuh",
          .entry = "norm_parameter_gradients",
          .params = "NormParameterGradientsParams",
          .config = jit::config_text("NormParameterGradientsConfig", config),
          .threads = kGroups * 32,
          .min_blocks = 1,
          .dynamic_smem_bytes = 0,
          .pdl = true};
}

// As many rows ahead as fit the shared memory of all CTAs of a multiprocessor, up to four.
int stages_of(const Config& config, const Device& device) {
  constexpr int kMost = 4;
  if (device.compute < 80 || !config.aligned || config.looped) return 0;
  const auto each = static_cast<int>(device.shared_memory_per_block) / ctas_per_sm(config);
  const int stages = std::min((each - norm_backward_sum_bytes(config)) / norm_backward_stage_bytes(config), kMost);
  return stages > 1 ? stages : 0;
}

Config config_of(const NormProblem& p, const Device& device, int threads, int wanted) {
  Config config = {};
  config.dtype = p.dtype;
  config.centered = p.centered;
  config.residual = p.residual;
  config.parameters = p.parameters;
  config.aligned = p.aligned;
  set_share(share_row(p, threads, wanted, 2), config);
  config.stages = stages_of(config, device);
  return config;
}

std::vector<Config> configs_for(const NormProblem& p, const Device& device) {
  std::vector<Config> configs;
  // Two rows of 256 threads in a CTA: half as many sums of gradients for the next step.
  const bool two_rows = device.compute >= 90 && config_of(p, device, 256, 2).row_threads == 256;
  for (const int threads : {two_rows ? 512 : 256, two_rows ? 256 : 512}) {
    for (const int wanted : {2, 1}) configs.push_back(config_of(p, device, threads, wanted));
  }
  return configs;
}

std::int64_t ctas_of(const Config& config, const NormProblem& p, int multiprocessors) {
  return balanced_ctas(ceil_div(p.rows, config.threads / config.row_threads),
                       std::int64_t{multiprocessors} * ctas_per_sm(config));
}

std::size_t workspace_of(const Config& config, const NormProblem& p, int multiprocessors) {
  if (!p.parameters) return 0;
  return static_cast<std::size_t>(
      saturating_product(ctas_of(config, p, multiprocessors), p.columns, p.centered ? 8 : 4));
}

Status enqueue(const Config& config, int multiprocessors, const NormArgs& args, const engine::Launch& launch) {
  const NormProblem& p = args.problem;
  const std::int64_t ctas = ctas_of(config, p, multiprocessors);
  cuda::Work<NormBackwardParams> work = {};
  NormBackwardParams& params = work.params;
  params.x = matrix_of(args.x);
  params.dout = matrix_of(args.dout);
  params.dsum = matrix_of(args.dsum);
  params.dx = matrix_of(args.dx);
  params.weight = args.weight.data;
  params.rstd = static_cast<const float*>(args.rstd.data);
  params.mean = static_cast<const float*>(args.mean.data);
  params.partial = static_cast<float*>(launch.workspace);
  params.rows = p.rows;
  params.columns = static_cast<int>(p.columns);
  work.grid = {static_cast<unsigned>(ctas), 1, 1};
  if (Status s = cuda::launch(*launch.kernels[0], work, launch.stream); !s.ok() || !p.parameters) return s;

  cuda::Work<NormParameterGradientsParams> reduce = {};
  reduce.params.partial = params.partial;
  reduce.params.stride = p.columns * (p.centered ? 2 : 1);
  reduce.params.dweight = args.dweight.data;
  reduce.params.dbias = args.dbias.data;
  reduce.params.parts = static_cast<int>(ctas);
  reduce.params.columns = static_cast<int>(p.columns);
  reduce.grid = {static_cast<unsigned>(ceil_div(p.columns, 32)), p.centered ? 2u : 1u, 1};
  return cuda::launch(*launch.kernels[1], reduce, launch.stream);
}

std::vector<engine::Offer> offers(const NormProblem& p, const Device& device) {
  const Config config = configs_for(p, device).front();
  const double bytes = static_cast<double>(p.rows) * static_cast<double>(p.columns) *
                       static_cast<double>(size_of(p.dtype)) * (p.residual ? 4 : 3);
  return {{engine::main_config(config), workspace_of(config, p, device.multiprocessors),
           copy_time(bytes) + (p.parameters ? 4.0 : 0.0),
           format("{} threads per row, {}{}", config.row_threads,
                  config.looped       ? "which is read twice"
                  : config.stages > 0 ? "which are copied to shared memory ahead"
                                      : "which stays in registers",
                  config.aligned ? "" : "; rows are not aligned to 16 bytes")}};
}

std::optional<Recipe> recipe(const NormProblem& p, const Device& device, const engine::Config& named) {
  for (const Config& config : configs_for(p, device)) {
    if (engine::main_config(config) != named) continue;
    Recipe recipe;
    recipe.problem = p;
    recipe.steps = {{"main", main_kernel(config)}};
    if (p.parameters) recipe.steps.push_back({"parameters", reduce_kernel(p.dtype)});
    recipe.workspace = workspace_of(config, p, device.multiprocessors);
    recipe.enqueue = [config, count = device.multiprocessors](const NormArgs& args, const engine::Launch& launch) {
      return enqueue(config, count, args, launch);
    };
    return recipe;
  }
  return std::nullopt;
}

std::vector<engine::Config> searches(const NormProblem& p, const Device& device) {
  std::vector<engine::Config> list;
  for (const Config& config : configs_for(p, device)) list.push_back(engine::main_config(config));
  return list;
}

std::vector<NormProblem> representatives(const Device&) {
  constexpr NormOp kOp = NormOp::kBackward;
  return {representative(kOp, DType::kBFloat16, 4096, true, true, true),
          representative(kOp, DType::kFloat16, 1365, true, true, false),
          representative(kOp, DType::kFloat32, 100000, true, true, false)};
}

}  // namespace

Implementation backward() {
  return {"norm_backward",
          NormFamily::bit_of(NormOp::kBackward),
          {"norm/backward.cuh", "norm/parameter_gradients.cuh"},
          gpu_refuses,
          offers,
          recipe,
          searches,
          representatives};
}

}  // namespace tessera::norm
