// The likelihood of Gaussian mixtures whose parameters are the result of an MLP, on whatever device: the MLP, then the
// likelihood, each as its family would compute it. The parameters are in the workspace.
#include <algorithm>

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/format.h"
#include "engine/embedded.h"
#include "gemm/gpu.h"
#include "loss/family.h"
#include "mlp/family.h"

namespace tessera::loss {
namespace {

using engine::Device;

struct Parts {
  engine::Embedded<MlpFamily> mlp;
  engine::Embedded<LossFamily> likelihood;
  std::int64_t stride = 0;  // elements, from one row of parameters to the next
  std::size_t scratch = 0;  // where the parts' own workspace is: one after the other they use the same
  std::size_t bytes = 0;

  engine::Config config() const {
    engine::Config config = mlp.config;
    config.insert(config.end(), likelihood.config.begin(), likelihood.config.end());
    return config;
  }
};

Result<Parts> parts_of(const LossProblem& p, const Device& device) {
  auto mlp = engine::embed<MlpFamily>("mlp", p.mlp, device);
  if (!mlp.ok()) return mlp.status();
  LossProblem of_params = p;
  of_params.op = LossOp::kGmmNll;
  of_params.mlp = {};
  auto likelihood = engine::embed<LossFamily>("likelihood", of_params, device);
  if (!likelihood.ok()) return likelihood.status();
  Parts parts{*std::move(mlp), *std::move(likelihood)};
  const auto size = static_cast<std::int64_t>(size_of(p.dtype));
  parts.stride = ceil_div(p.mlp.n * size, 16) * 16 / size;
  parts.scratch = gemm::rounded_part(static_cast<std::size_t>(saturating_product(p.rows, parts.stride, size)));
  parts.bytes = parts.scratch + std::max(parts.mlp.recipe.workspace, parts.likelihood.recipe.workspace);
  return parts;
}

Status enqueue(const Parts& parts, const LossArgs& args, const engine::Launch& launch) {
  auto* workspace = static_cast<std::byte*>(launch.workspace);
  std::byte* scratch = workspace + parts.scratch;
  std::size_t next = 0;
  MlpArgs mlp = args.mlp;
  mlp[MlpTensor::kOut] = {workspace, parts.stride};
  TESSERA_CHECK(parts.mlp.enqueue(mlp, launch, next, scratch));
  LossArgs likelihood = args;
  likelihood.params = {workspace, parts.stride, 3};
  return parts.likelihood.enqueue(likelihood, launch, next, scratch);
}

std::optional<std::string> refuses(const LossProblem& p, const Device& device) {
  const auto parts = parts_of(p, device);
  if (!parts.ok()) return std::string(parts.status().message());
  return std::nullopt;
}

std::vector<engine::Offer> offers(const LossProblem& p, const Device& device) {
  const auto parts = parts_of(p, device);
  if (!parts.ok()) return {};
  return {{parts->config(), parts->bytes, parts->mlp.microseconds + parts->likelihood.microseconds,
           format("the MLP {:.3g} us, then the likelihood {:.3g} us", parts->mlp.microseconds,
                  parts->likelihood.microseconds)}};
}

std::optional<Recipe> recipe(const LossProblem& p, const Device& device, const engine::Config& config) {
  auto parts = parts_of(p, device);
  if (!parts.ok() || parts->config() != config) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  parts->mlp.add_steps(recipe.steps);
  parts->likelihood.add_steps(recipe.steps);
  recipe.workspace = parts->bytes;
  recipe.enqueue = [parts = *std::move(parts)](const LossArgs& args, const engine::Launch& launch) {
    return enqueue(parts, args, launch);
  };
  return recipe;
}

}  // namespace

// Its parts are instances of other kernels, which the gate compiles for them.
Implementation mlp_gmm_nll() {
  return {"loss_mlp_gmm_nll",
          LossFamily::bit_of(LossOp::kMlpGmmNll),
          {"gemm/dense.cuh", "gemm/dense_sm90.cuh", "gemm/split_reduce.cuh", "gemm/pad_rows.cuh", "loss/gmm_nll.cuh",
           "loss/sum_partials.cuh", "mlp/narrow_sm90.cuh"},
          refuses,
          offers,
          recipe,
          nullptr,
          nullptr};
}

}  // namespace tessera::loss
