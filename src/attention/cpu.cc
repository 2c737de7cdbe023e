// Attention on the CPU (attention/cpu/), every op.
#include "attention/cpu/run.h"
#include "attention/family.h"
#include "base/format.h"

namespace tessera::attention {
namespace {

using engine::Device;

std::optional<std::string> refuses(const AttentionProblem&, const Device& device) {
  if (!device.is_cpu()) return format("reads host memory; the tensors are on {}", device.name);
  return std::nullopt;
}

engine::Config config_for(const Device& device) {
  return {{"main", {{"threads", static_cast<std::int64_t>(device.threads)}}}};
}

std::vector<engine::Offer> offers(const AttentionProblem& p, const Device& device) {
  constexpr double kScoresPerMicrosecond = 500.0;  // of a thread, at head dim 64, roughly
  const double scores = static_cast<double>(p.batch) * static_cast<double>(p.heads_q) * static_cast<double>(p.seq_q) *
                        static_cast<double>(p.seq_k);
  const double rate = kScoresPerMicrosecond * device.threads * 64.0 / static_cast<double>(p.dim_qk + p.dim_v) * 2.0;
  return {{config_for(device), cpu::workspace_bytes(p, device.threads), scores / rate,
           p.op == AttentionOp::kDecode ? "the one CPU kernel: every dtype, mask and head dim; batch invariant"
                                        : "the one CPU kernel: every dtype, mask and head dim"}};
}

std::optional<Recipe> recipe(const AttentionProblem& p, const Device& device, const engine::Config& config) {
  if (config != config_for(device)) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  recipe.steps = {{"main", std::nullopt}};
  recipe.workspace = cpu::workspace_bytes(p, device.threads);
  recipe.enqueue = [threads = device.threads](const AttentionArgs& args, const engine::Launch& launch) {
    return cpu::run(args, threads, launch.workspace);
  };
  return recipe;
}

}  // namespace

Implementation cpu() {
  return {"cpu_attention",
          AttentionFamily::bit_of(AttentionOp::kForward) | AttentionFamily::bit_of(AttentionOp::kBackward) |
              AttentionFamily::bit_of(AttentionOp::kDecode),
          {},
          refuses,
          offers,
          recipe,
          nullptr,
          nullptr};
}

}  // namespace tessera::attention
