// A plan: the chosen recipe with its kernels loaded, ready to be run any number of times without compiling or
// allocating. Plan itself knows nothing of the family; PlanOf<Family> holds the family's part.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "base/tensor.h"
#include "engine/select.h"
#include "engine/tuned.h"

namespace tessera::engine {

class Plan {
 public:
  virtual ~Plan() = default;

  const char* family = nullptr;  // Family::kName
  tessera_device place{};
  Device device;
  std::vector<const cuda::Kernel*> kernels;
  std::size_t workspace = 0;  // bytes, including room for alignment
  Explanation explanation;

  // Computed on the first call; valid as long as the plan.
  const char* text() const;
  const char* json() const;

 private:
  mutable std::once_flag text_once_, json_once_;
  mutable std::string text_, json_;
};

template <class Family>
struct PlanOf : Plan {
  Recipe<Family> recipe;
};

// The device that a tensor is on, as the selector sees it.
Result<Device> device_at(tessera_device place);

// A caller's workspace, aligned; or what is wrong with it.
Result<void*> usable_workspace(const Plan& plan, void* workspace, std::size_t bytes);

// Compiles what is in no cache, and loads it.
Status load_kernels(const std::vector<Step>& steps, Plan& plan);

std::size_t with_room_to_align(std::size_t workspace);

// Selects with what the tuning table knows of this GPU.
template <class Family>
Selection<Family> select_at(tessera_device place, const Device& device, const typename Family::Problem& problem) {
  std::optional<Tuned> tuned;
  if (place.type == TESSERA_CUDA) {
    if (const auto info = cuda::device(place.index); info.ok()) tuned = find_tuned<Family>(*info, problem);
  }
  return select<Family>(problem, device, tuned ? &*tuned : nullptr);
}

enum class Explained : bool { kNo, kYes };

// Compiles and loads nothing yet. A plan that is run only once needs no explanation.
template <class Family>
Result<std::unique_ptr<PlanOf<Family>>> choose(tessera_device place, const typename Family::Problem& problem,
                                               Explained explained) {
  auto device = device_at(place);
  if (!device.ok()) return device.status();
  const Selection<Family> selection = select_at<Family>(place, *device, problem);
  if (selection.candidates.empty()) {
    return Status(TESSERA_UNSUPPORTED, text_of(explain<Family>(problem, *device, selection)));
  }
  const Candidate<Family>& best = selection.candidates.front();
  auto recipe = best.implementation->recipe(problem, *device, best.offer.config);
  if (!recipe) {
    return Status(TESSERA_INTERNAL,
                  format("{} does not take its own Config {}", best.implementation->name, text_of(best.offer.config)));
  }
  auto plan = std::make_unique<PlanOf<Family>>();
  plan->family = Family::kName;
  plan->place = place;
  if (explained == Explained::kYes) plan->explanation = explain<Family>(problem, *device, selection);
  plan->device = *std::move(device);
  plan->recipe = *std::move(recipe);
  plan->workspace = with_room_to_align(plan->recipe.workspace);
  return plan;
}

template <class Family>
Result<std::unique_ptr<PlanOf<Family>>> make_plan(tessera_device place, const typename Family::Problem& problem,
                                                  Explained explained) {
  auto plan = choose<Family>(place, problem, explained);
  if (!plan.ok()) return plan;
  if (Status s = load_kernels((*plan)->recipe.steps, **plan); !s.ok()) return s;
  return plan;
}

// args: on the plan's device, for a problem that the plan covers.
template <class Family>
Status run(const PlanOf<Family>& plan, const typename Family::Args& args, void* workspace, std::size_t bytes,
           void* stream) {
  const auto scratch = usable_workspace(plan, workspace, bytes);
  if (!scratch.ok()) return scratch.status();
  return plan.recipe.enqueue(args, {plan.kernels, *scratch, static_cast<cuda::CUstream>(stream)});
}

}  // namespace tessera::engine
