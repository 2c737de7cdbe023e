#include "gemm/embedded.h"

#include "base/format.h"
#include "engine/select.h"

namespace tessera::gemm {
namespace {

std::string named(const std::string& product, const std::string& step) {
  return step == "main" ? product : format("{}_{}", product, step);
}

}  // namespace

void Embedded::add_steps(std::vector<engine::Step>& steps) const {
  for (const engine::Step& step : recipe.steps) steps.push_back({named(name, step.name), step.kernel});
}

Status Embedded::enqueue(GemmArgs args, const engine::Launch& whole, std::size_t& next, void* workspace) const {
  args.problem = recipe.problem;
  std::vector<const cuda::Kernel*> kernels;
  for (const engine::Step& step : recipe.steps) {
    if (step.kernel) kernels.push_back(whole.kernels[next++]);
  }
  return recipe.enqueue(args, {kernels, workspace, whole.stream});
}

Result<Embedded> embed(std::string name, const GemmProblem& problem, const engine::Device& device) {
  const auto selection = engine::select<GemmFamily>(problem, device);
  if (selection.candidates.empty()) {
    const bool has_reason = !selection.refusals.empty();
    return Status(TESSERA_UNSUPPORTED, has_reason ? selection.refusals.front().reason : "no kernel for its products");
  }
  const auto& best = selection.candidates.front();
  auto recipe = best.implementation->recipe(problem, device, best.offer.config);
  if (!recipe) return Status(TESSERA_INTERNAL, format("{} does not take its own Config", best.implementation->name));
  Embedded product{std::move(name), best.offer.config, best.offer.microseconds, *std::move(recipe)};
  for (engine::StepConfig& step : product.config) step.step = named(product.name, step.step);
  return product;
}

}  // namespace tessera::gemm
