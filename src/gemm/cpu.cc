// GEMM on the CPU (gemm/cpu/).
#include "base/format.h"
#include "gemm/cpu/run.h"
#include "gemm/family.h"
#include "gemm/gpu.h"

namespace tessera::gemm {
namespace {

using engine::Device;

std::optional<std::string> refuses(const GemmProblem& p, const Device& device) {
  if (!device.is_cpu()) return format("reads host memory; the tensors are on {}", device.name);
  return refuses_recipe_features(p);
}

engine::Config config_for(const Device& device) {
  return {{"main", {{"threads", static_cast<std::int64_t>(device.threads)}}}};
}

std::vector<engine::Offer> offers(const GemmProblem& p, const Device& device) {
  constexpr double kMultiplyAdds = 2e4;  // per microsecond and thread, roughly
  const double products = static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) *
                          static_cast<double>(p.grouping == kBatched ? p.groups : 1);
  return {{config_for(device), cpu_backend::workspace_bytes(p, device.threads),
           products / (kMultiplyAdds * device.threads), "the one CPU kernel: every dtype, epilogue and stride"}};
}

std::optional<Recipe> recipe(const GemmProblem& p, const Device& device, const engine::Config& config) {
  if (config != config_for(device)) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  recipe.steps = {{"main", std::nullopt}};
  recipe.workspace = cpu_backend::workspace_bytes(p, device.threads);
  recipe.enqueue = [threads = device.threads](const GemmArgs& args, const engine::Launch& launch) {
    return cpu_backend::run(args, threads, launch.workspace);
  };
  return recipe;
}

}  // namespace

Implementation cpu() {
  return {"cpu_gemm", GemmFamily::bit_of(GemmOp::kDense) | GemmFamily::bit_of(GemmOp::kGrouped),
          {},         refuses,
          offers,     recipe,
          nullptr,    nullptr};
}

}  // namespace tessera::gemm
