// An op as a part of another op's recipe.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "engine/implementation.h"
#include "engine/select.h"

namespace tessera::engine {

// A problem with the recipe that its family would choose. Its steps and Configs have its name: "up", "up_reduce".
template <class Family>
struct Embedded {
  std::string name;
  Config config;
  double microseconds = 0;
  Recipe<Family> recipe;

  std::string named(const std::string& step) const { return step == "main" ? name : format("{}_{}", name, step); }
  void add_steps(std::vector<Step>& steps) const {
    for (const Step& step : recipe.steps) steps.push_back({named(step.name), step.kernel});
  }
  // next: where its kernels begin among those of the whole recipe, and afterwards where they end.
  Status enqueue(typename Family::Args args, const Launch& whole, std::size_t& next, void* workspace) const {
    args.problem = recipe.problem;
    std::vector<const cuda::Kernel*> kernels;
    for (const Step& step : recipe.steps) {
      if (step.kernel) kernels.push_back(whole.kernels[next++]);
    }
    return recipe.enqueue(args, {kernels, workspace, whole.stream});
  }
};

template <class Family>
Result<Embedded<Family>> embed(std::string name, const typename Family::Problem& problem, const Device& device) {
  const auto selection = select<Family>(problem, device);
  if (selection.candidates.empty()) {
    const bool has_reason = !selection.refusals.empty();
    return Status(TESSERA_UNSUPPORTED, has_reason ? selection.refusals.front().reason : "no kernel for its parts");
  }
  const auto& best = selection.candidates.front();
  auto recipe = best.implementation->recipe(problem, device, best.offer.config);
  if (!recipe) return Status(TESSERA_INTERNAL, format("{} does not take its own Config", best.implementation->name));
  Embedded<Family> part{std::move(name), best.offer.config, best.offer.microseconds, *std::move(recipe)};
  for (StepConfig& step : part.config) step.step = part.named(step.step);
  return part;
}

}  // namespace tessera::engine
