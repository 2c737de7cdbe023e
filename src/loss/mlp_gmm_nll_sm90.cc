// The likelihood of Gaussian mixtures as the epilogue of an MLP with few output columns, for Hopper
// (kernels/loss/mlp_gmm_nll_sm90.cuh), and the sum over its CTAs.
#include "loss/mlp_gmm_nll_sm90_config.h"

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/format.h"
#include "cuda/kernel.h"
#include "gemm/gpu.h"
#include "jit/config_text.h"
#include "loss/family.h"
#include "loss/gmm_nll.h"
#include "mlp/narrow_sm90.h"

namespace tessera::loss {
namespace {

namespace fused = tessera::mlp_gmm_nll_sm90;
using engine::Device;
using Config = LossMlpGmmNllSm90Config;

jit::KernelInstance main_kernel(const Config& config) {
  GemmEpilogueConfig activation = {};
  activation.activation = config.activation;
  return {
      .name = format("loss_mlp_gmm_nll_sm90_{}_{}_h{}s{}{}{}{}", name_of(config.dtype), name_of(config.target_dtype),
                     config.block_h, config.stages, config.cluster > 1 ? "_cluster" : "", config.reduced ? "" : "_rows",
                     gemm::epilogue_suffix(activation)),
      .header = "loss/mlp_gmm_nll_sm90.cuh",
      .entry = "loss_mlp_gmm_nll_sm90",
      .params = "LossMlpGmmNllSm90Params",
      .config = jit::config_text("LossMlpGmmNllSm90Config", config),
      .threads = mlp_narrow_sm90::kThreads,
      .min_blocks = 1,
      .dynamic_smem_bytes = mlp_narrow_sm90::layout(fused::mlp_config(config)).bytes,
      .pdl = true,
      .cluster = config.cluster};
}

std::optional<std::string> refuses(const LossProblem& p, const Device& device) {
  if (p.components > fused::kMostComponents) {
    return format("K is {}; the parameters of up to {} components are kept in registers", p.components,
                  fused::kMostComponents);
  }
  if (p.gradient) return "makes no gradient";
  return mlp::narrow_refuses(p.mlp, device);
}

std::vector<Config> configs_for(const LossProblem& p) {
  std::vector<Config> list;
  for (const MlpNarrowSm90Config& of_mlp : mlp::narrow_configs(p.mlp)) {
    list.push_back({.dtype = of_mlp.dtype,
                    .block_h = of_mlp.block_h,
                    .stages = of_mlp.stages,
                    .cluster = of_mlp.cluster,
                    .activation = of_mlp.activation,
                    .target_dtype = p.target_dtype,
                    .reduced = p.reduction != Reduction::kNone});
  }
  return list;
}

// One per consumer warp and row tile.
std::int64_t sums_of(const Config& config, const LossProblem& p) {
  return config.reduced ? mlp::narrow_row_tiles(p.mlp, fused::mlp_config(config)) * fused::kSumsPerTile : 0;
}
std::size_t workspace_of(const Config& config, const LossProblem& p) {
  return static_cast<std::size_t>(saturating_product(sums_of(config, p), sizeof(float)));
}

Status enqueue(const Config& config, const LossArgs& args, const engine::Launch& launch) {
  const LossProblem& p = args.problem;
  const cuda::Kernel& kernel = *launch.kernels[0];
  if (p.rows > 0) {
    const auto scope = cuda::ContextScope::enter(kernel.device);  // which the driver needs to encode tensor maps
    if (!scope.ok()) return scope.status();
    cuda::Work<LossMlpGmmNllSm90Params> work = {};
    const MlpNarrowSm90Config of_mlp = fused::mlp_config(config);
    TESSERA_CHECK(mlp::set_narrow_params(of_mlp, args.mlp, work.params.mlp));
    work.params.loss = gmm_nll_params(args, launch.workspace);
    work.grid = {mlp::narrow_ctas(p.mlp, of_mlp, kernel.multiprocessors), 1, 1};
    TESSERA_CHECK(cuda::launch(kernel, work, launch.stream));
  }
  if (!config.reduced) return {};
  return cuda::launch(*launch.kernels[1], sum_partials_work(args, launch.workspace, sums_of(config, p)), launch.stream);
}

std::vector<engine::Offer> offers(const LossProblem& p, const Device& device) {
  constexpr double kLikelihood = 3;  // microseconds
  std::vector<engine::Offer> offers;
  for (const Config& config : configs_for(p)) {
    offers.push_back({engine::main_config(config), workspace_of(config, p),
                      mlp::narrow_time(p.mlp, device, fused::mlp_config(config)) + kLikelihood,
                      "the likelihood is an epilogue of the MLP, whose results stay in registers"});
  }
  return offers;
}

std::optional<Recipe> recipe(const LossProblem& p, const Device&, const engine::Config& named) {
  for (const Config& config : configs_for(p)) {
    if (engine::main_config(config) != named) continue;
    Recipe recipe;
    recipe.problem = p;
    recipe.steps = {{"main", main_kernel(config)}};
    if (config.reduced) recipe.steps.push_back({"sum", sum_partials_instance()});
    recipe.workspace = workspace_of(config, p);
    recipe.enqueue = [config](const LossArgs& args, const engine::Launch& launch) {
      return enqueue(config, args, launch);
    };
    return recipe;
  }
  return std::nullopt;
}

std::vector<engine::Config> searches(const LossProblem& p, const Device&) {
  std::vector<engine::Config> list;
  for (const Config& config : configs_for(p)) list.push_back(engine::main_config(config));
  return list;
}

std::vector<LossProblem> representatives(const Device&) {
  LossProblem p;
  p.op = LossOp::kMlpGmmNll;
  p.dtype = p.mlp.dtype = DType::kBFloat16;
  p.rows = p.mlp.m = 32000;
  p.components = 10;
  p.mlp.k = 512;
  p.mlp.hidden = 13650;
  p.mlp.n = 30;
  std::vector<LossProblem> list(3, p);
  list[1].reduction = Reduction::kNone;
  list[1].mlp.activation = kGeluTanh;
  list[2].dtype = list[2].mlp.dtype = list[2].target_dtype = DType::kFloat16;
  list[2].mlp.activation = kGeluErf;
  return list;
}

}  // namespace

Implementation mlp_gmm_nll_sm90() {
  return {"loss_mlp_gmm_nll_sm90",
          LossFamily::bit_of(LossOp::kMlpGmmNll),
          {"loss/mlp_gmm_nll_sm90.cuh", "loss/sum_partials.cuh"},
          refuses,
          offers,
          recipe,
          searches,
          representatives};
}

}  // namespace tessera::loss
