// Losses on the CPU (loss/cpu/).
#include "base/format.h"
#include "loss/cpu/run.h"
#include "loss/family.h"

namespace tessera::loss {
namespace {

using engine::Device;

std::optional<std::string> refuses(const LossProblem&, const Device& device) {
  if (!device.is_cpu()) return format("reads host memory; the tensors are on {}", device.name);
  return std::nullopt;
}

engine::Config config_for(const Device& device) {
  return {{"main", {{"threads", static_cast<std::int64_t>(device.threads)}}}};
}

std::vector<engine::Offer> offers(const LossProblem& p, const Device& device) {
  constexpr double kElements = 20;  // per microsecond and thread, roughly
  const double elements = static_cast<double>(p.rows) * static_cast<double>(p.components);
  return {{config_for(device), cpu_backend::workspace_bytes(p, device.threads), elements / (kElements * device.threads),
           "the one CPU kernel: every dtype, stride and number of components"}};
}

std::optional<Recipe> recipe(const LossProblem& p, const Device& device, const engine::Config& config) {
  if (config != config_for(device)) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  recipe.steps = {{"main", std::nullopt}};
  recipe.workspace = cpu_backend::workspace_bytes(p, device.threads);
  recipe.enqueue = [threads = device.threads](const LossArgs& args, const engine::Launch& launch) {
    return cpu_backend::run(args, threads, launch.workspace);
  };
  return recipe;
}

}  // namespace

Implementation cpu() {
  return {"cpu_loss", LossFamily::bit_of(LossOp::kGmmNll), {}, refuses, offers, recipe, nullptr, nullptr};
}

}  // namespace tessera::loss
