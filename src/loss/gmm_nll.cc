// The likelihood of Gaussian mixtures (kernels/loss/gmm_nll.cuh), and the sum over its CTAs
// (kernels/loss/sum_partials.cuh).
#include "loss/gmm_nll.h"

#include <algorithm>

#include "base/arithmetic.h"
#include "base/format.h"
#include "jit/config_text.h"
#include "loss/family.h"

namespace tessera::loss {
namespace {

using Config = LossGmmNllConfig;
using engine::Device;

constexpr int kCtasPerSm = 4;
constexpr int kMostPerLane = 16;  // components
constexpr int kSumThreads = 512;

// About three components per lane: the exchange between lanes is short, and a warp still reads consecutive addresses.
Config config_of(const LossProblem& p) {
  constexpr std::int64_t kWanted = 3, kMostLanes = 32;
  std::int64_t lanes = 1;
  while (lanes < kMostLanes && lanes * kWanted < p.components) lanes *= 2;
  return {.dtype = p.dtype,
          .target_dtype = p.target_dtype,
          .lanes = static_cast<int>(lanes),
          .components = static_cast<int>(ceil_div(p.components, lanes)),
          .gradient = p.gradient,
          .reduced = p.reduction != Reduction::kNone};
}

jit::KernelInstance main_kernel(const Config& config) {
  return {
      .name = format("loss_gmm_nll_{}_{}_{}x{}{}{}", name_of(config.dtype), name_of(config.target_dtype), config.lanes,
                     config.components, config.gradient ? "_gradient" : "", config.reduced ? "" : "_rows"),
      .header = "loss/gmm_nll.cuh",
      .entry = "loss_gmm_nll",
      .params = "LossGmmNllParams",
      .config = jit::config_text("LossGmmNllConfig", config),
      .threads = kLossGmmNllThreads,
      .min_blocks = config.components > 6 ? 2 : kCtasPerSm,
      .dynamic_smem_bytes = 0,
      .pdl = true};
}

std::int64_t ctas_of(const Config& config, const LossProblem& p, int multiprocessors) {
  return std::min(ceil_div(p.rows, kLossGmmNllThreads / config.lanes), std::int64_t{multiprocessors} * kCtasPerSm);
}

std::size_t workspace_of(const Config& config, const LossProblem& p, const Device& device) {
  return config.reduced ? static_cast<std::size_t>(ctas_of(config, p, device.multiprocessors)) * sizeof(float) : 0;
}

std::optional<std::string> refuses(const LossProblem& p, const Device& device) {
  constexpr std::int64_t kMost = 32 * kMostPerLane;
  if (device.is_cpu()) return "runs on GPUs; the tensors are on the CPU";
  if (p.components > kMost) return format("takes up to {} components, not {}", kMost, p.components);
  return std::nullopt;
}

Status enqueue(const Config& config, int multiprocessors, const LossArgs& args, const engine::Launch& launch) {
  const std::int64_t ctas = ctas_of(config, args.problem, multiprocessors);
  cuda::Work<LossGmmNllParams> work = {};
  work.params = gmm_nll_params(args, launch.workspace);
  work.params.params = args.params.data;
  work.params.row_stride = args.params.row_stride;
  work.params.component_stride = args.params.component_stride;
  work.grid = {static_cast<unsigned>(ctas), 1, 1};
  if (Status s = cuda::launch(*launch.kernels[0], work, launch.stream); !s.ok() || !config.reduced) return s;
  return cuda::launch(*launch.kernels[1], sum_partials_work(args, launch.workspace, ctas), launch.stream);
}

std::vector<engine::Offer> offers(const LossProblem& p, const Device& device) {
  const Config config = config_of(p);
  const double bytes = 3 * static_cast<double>(p.rows) * static_cast<double>(p.components) *
                       static_cast<double>(size_of(p.dtype)) * (p.gradient ? 2 : 1);
  return {{engine::main_config(config), workspace_of(config, p, device), 4.0 + bytes / 2e6,
           format("{} lanes per row, {} components each", config.lanes, config.components)}};
}

std::optional<Recipe> recipe(const LossProblem& p, const Device& device, const engine::Config& named) {
  const Config config = config_of(p);
  if (engine::main_config(config) != named) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  recipe.steps = {{"main", main_kernel(config)}};
  if (config.reduced) recipe.steps.push_back({"sum", sum_partials_instance()});
  recipe.workspace = workspace_of(config, p, device);
  recipe.enqueue = [config, count = device.multiprocessors](const LossArgs& args, const engine::Launch& launch) {
    return enqueue(config, count, args, launch);
  };
  return recipe;
}

std::vector<LossProblem> representatives(const Device&) {
  std::vector<LossProblem> list;
  for (const int components : {10, 512}) {
    LossProblem p;
    p.dtype = components == 10 ? DType::kBFloat16 : DType::kFloat32;
    p.rows = 32000;
    p.components = components;
    p.gradient = true;
    list.push_back(p);
  }
  return list;
}

}  // namespace

LossGmmNllParams gmm_nll_params(const LossArgs& args, void* sums) {
  const LossProblem& p = args.problem;
  LossGmmNllParams params = {};
  params.dparams = args.dparams.data;
  params.drow_stride = args.dparams.row_stride;
  params.dcomponent_stride = args.dparams.component_stride;
  params.target = args.target.data;
  params.target_stride = args.target.row_stride;
  params.out = static_cast<float*>(p.reduction == Reduction::kNone ? args.out.data : sums);
  params.rows = p.rows;
  params.components = static_cast<int>(p.components);
  params.scale = p.reduction == Reduction::kMean ? 1.0f / static_cast<float>(p.rows) : 1.0f;
  return params;
}

jit::KernelInstance sum_partials_instance() {
  const LossSumPartialsConfig config{.threads = kSumThreads};
  return {.name = format("loss_sum_partials_{}", config.threads),
          .header = "loss/sum_partials.cuh",
          .entry = "loss_sum_partials",
          .params = "LossSumPartialsParams",
          .config = jit::config_text("LossSumPartialsConfig", config),
          .threads = config.threads,
          .min_blocks = 1,
          .dynamic_smem_bytes = 0,
          .pdl = true};
}

cuda::Work<LossSumPartialsParams> sum_partials_work(const LossArgs& args, const void* sums, std::int64_t count) {
  cuda::Work<LossSumPartialsParams> work = {};
  work.params = {static_cast<const float*>(sums), static_cast<int>(count), static_cast<float*>(args.out.data)};
  work.grid = {1, 1, 1};
  return work;
}

Implementation gmm_nll() {
  return {"loss_gmm_nll",
          LossFamily::bit_of(LossOp::kGmmNll),
          {"loss/gmm_nll.cuh", "loss/sum_partials.cuh"},
          refuses,
          offers,
          recipe,
          nullptr,
          representatives};
}

}  // namespace tessera::loss
