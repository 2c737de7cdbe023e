// Norms and rotary embedding on the CPU (norm/cpu/).
#include "base/format.h"
#include "norm/cpu/run.h"
#include "norm/family.h"

namespace tessera::norm {
namespace {

using engine::Device;

std::optional<std::string> refuses(const NormProblem&, const Device& device) {
  if (!device.is_cpu()) return format("reads host memory; the tensors are on {}", device.name);
  return std::nullopt;
}

engine::Config config_for(const Device& device) {
  return {{"main", {{"threads", static_cast<std::int64_t>(device.threads)}}}};
}

std::vector<engine::Offer> offers(const NormProblem& p, const Device& device) {
  constexpr double kElements = 500;  // per microsecond and thread, roughly
  const double elements = static_cast<double>(p.rows) * static_cast<double>(p.columns);
  return {{config_for(device), cpu_backend::workspace_bytes(p, device.threads), elements / (kElements * device.threads),
           "the one CPU kernel: every dtype and stride"}};
}

std::optional<Recipe> recipe(const NormProblem& p, const Device& device, const engine::Config& config) {
  if (config != config_for(device)) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  recipe.steps = {{"main", std::nullopt}};
  recipe.workspace = cpu_backend::workspace_bytes(p, device.threads);
  recipe.enqueue = [threads = device.threads](const NormArgs& args, const engine::Launch& launch) {
    return cpu_backend::run(args, threads, launch.workspace);
  };
  return recipe;
}

}  // namespace

Implementation cpu() {
  return {"cpu_norm",
          NormFamily::bit_of(NormOp::kForward) | NormFamily::bit_of(NormOp::kBackward) |
              NormFamily::bit_of(NormOp::kRotary),
          {},
          refuses,
          offers,
          recipe,
          nullptr,
          nullptr};
}

}  // namespace tessera::norm
