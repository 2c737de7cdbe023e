#include "select/search_space.h"

#include <algorithm>
#include <utility>

#include "jit/config_text.h"
#include "ops/attention_forward_sm90.h"
#include "ops/attention_params.h"
#include "select/attention.h"

namespace tessera::select {
namespace {

constexpr int kFewestKeys = 48;  // of a step: fewer leave the tensor cores idle
constexpr int kMostKeys = 256;
constexpr int kMostRegisters = 255;
constexpr int kMostBlocks = 4;                                                       // on an SM
constexpr std::pair<int, int> kStages[] = {{2, 1}, {2, 2}, {3, 1}, {3, 2}, {4, 2}};  // of K and V, of Q
// Of each consumer's K and V, where they share rows.
constexpr std::pair<int, int> kSplitStages[] = {{1, 1}, {2, 1}, {2, 2}};

bool is_of(const auto& config, const AttentionProblem& p) {
  return config.dtype == p.dtype && config.dim_qk == p.dim_qk && config.dim_v == p.dim_v &&
         config.banded == is_banded(p) && config.general == is_general(p);
}

bool fits_one(const AttentionForwardConfig& config, const AttentionProblem& p, const Device& device) {
  if (!is_of(config, p) || config.vector != (p.vectors ? 8 : 1)) return false;
  if (static_cast<std::size_t>(forward_shared_bytes(config)) > device.shared_memory_per_block) return false;
  const auto known = forward_configs(device.compute, config.dtype, config.dim_qk, config.dim_v, config.vector,
                                     config.banded, config.general);
  return std::any_of(known.begin(), known.end(), [&](const AttentionForwardConfig& k) {
    return instance_of(k).config == instance_of(config).config;
  });
}

// What the kernel's static_asserts and the copy engine's boxes allow.
bool fits_one(const AttentionForwardSm90Config& c, const AttentionProblem& p, const Device& device) {
  return device.compute == 90 && device.specific && is_of(c, p) && c.consumers >= 1 && c.consumers <= 3 &&
         c.block_k >= 16 && c.block_k % 16 == 0 && c.block_k <= kMostKeys && c.stages >= 2 && c.stages <= 8 &&
         (c.q_stages == 1 || c.q_stages == 2) && (!c.joined || can_join_heads(p, c)) &&
         (!c.split || (c.consumers > 1 && c.stages % c.consumers == 0 && !c.ping_pong)) &&
         (c.blocks == 1 || (c.blocks >= 2 && c.blocks <= kMostBlocks && c.consumers == 1)) &&
         (c.narrowest_panel == 64 || c.narrowest_panel == 16) && c.polynomial == 0 &&
         static_cast<std::size_t>(forward_sm90_layout(c).bytes) <= device.shared_memory_per_block;
}

bool is_worth_a_try(const AttentionForwardSm90Config& c, const AttentionProblem& p, const Device& device) {
  constexpr std::size_t kReserved = 1024;  // of a block's shared memory by the system
  const int registers = c.consumers * c.blocks > 1 ? register_split(c).consumer : kMostRegisters;
  if (estimated_registers(c) > registers) return false;
  // A tile more than the keys there are.
  if (c.block_k > kFewestKeys && c.block_k - 16 >= p.seq_k) return false;
  const auto blocks = static_cast<std::size_t>(c.blocks);
  const auto bytes = static_cast<std::size_t>(forward_sm90_layout(c).bytes);
  return blocks * (bytes + kReserved) <= device.shared_memory_per_block + kReserved;
}

// A share of the exponentials by a polynomial is not among them: it has not paid, and does not show an overflow.
template <class Visitor>
void for_each_sm90(const AttentionProblem& p, Visitor&& visit) {
  AttentionForwardSm90Config c{};
  c.dtype = p.dtype;
  c.dim_qk = static_cast<int>(p.dim_qk);
  c.dim_v = static_cast<int>(p.dim_v);
  c.banded = is_banded(p);
  c.general = is_general(p);
  const bool panels_differ = p.dim_qk % kWidestPanel != 0 || p.dim_v % kWidestPanel != 0;
  const auto visit_panels_tickets_and_joined = [&] {
    for (const int panel : {64, 16}) {
      if (panel == 16 && !panels_differ) continue;
      for (const bool tickets : {false, true}) {
        for (const bool joined : {false, true}) {
          c.narrowest_panel = panel;
          c.tickets = tickets;
          c.joined = joined;
          if (!joined || can_join_heads(p, c)) visit(c);
        }
      }
    }
  };
  for (c.consumers = 1; c.consumers <= 3; ++c.consumers) {
    for (c.block_k = kFewestKeys; c.block_k <= kMostKeys; c.block_k += 16) {
      c.split = false;
      for (const auto& [stages, q_stages] : kStages) {
        c.stages = stages;
        c.q_stages = q_stages;
        for (c.blocks = 1; c.blocks <= (c.consumers == 1 ? kMostBlocks : 1); ++c.blocks) {
          for (const bool ping_pong : {false, true}) {
            if (ping_pong && c.consumers == 1) continue;  // takes no turns with itself
            c.ping_pong = ping_pong;
            visit_panels_tickets_and_joined();
          }
        }
      }
      if (c.consumers == 1) continue;  // has no one to share with
      c.split = true;
      c.ping_pong = false;
      c.blocks = 1;
      for (const auto& [stages, q_stages] : kSplitStages) {
        c.stages = c.consumers * stages;
        c.q_stages = q_stages;
        visit_panels_tickets_and_joined();
      }
    }
  }
}

}  // namespace

const char* kernel_name(const ForwardConfig& config) {
  return std::holds_alternative<AttentionForwardConfig>(config) ? "attention_forward" : "attention_forward_sm90";
}

jit::KernelInstance instance_of(const ForwardConfig& config) {
  return std::visit([](const auto& one) { return instance_of(one); }, config);
}

std::optional<ForwardConfig> forward_config_from_text(std::string_view text) {
  if (const auto config = jit::config_from_text<AttentionForwardSm90Config>("AttentionForwardSm90Config", text)) {
    return *config;
  }
  if (const auto config = jit::config_from_text<AttentionForwardConfig>("AttentionForwardConfig", text)) return *config;
  return std::nullopt;
}

bool fits(const ForwardConfig& config, const AttentionProblem& problem, const Device& device) {
  return std::visit([&](const auto& one) { return fits_one(one, problem, device); }, config);
}

std::vector<ForwardConfig> forward_search_space(const AttentionProblem& p, const Device& device) {
  std::vector<ForwardConfig> space;
  std::vector<std::string> offered;
  const Selection selection = select_attention(p, device);
  for (const Candidate& c : selection.candidates) {
    if (c.forward) space.emplace_back(*c.forward);
    if (c.forward_sm90) space.emplace_back(*c.forward_sm90);
    if (c.forward || c.forward_sm90) offered.push_back(c.config);
  }
  if (space.empty()) return space;
  const auto add = [&](const ForwardConfig& config) {
    const std::string text = instance_of(config).config;
    if (std::find(offered.begin(), offered.end(), text) == offered.end()) space.push_back(config);
  };
  for (const AttentionForwardConfig& config :
       forward_configs(device.compute, p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v),
                       p.vectors ? 8 : 1, is_banded(p), is_general(p))) {
    if (fits_one(config, p, device)) add(config);
  }
  const bool hopper = std::none_of(selection.refusals.begin(), selection.refusals.end(),
                                   [](const Refusal& r) { return r.kernel == "attention_forward_sm90"; });
  if (!hopper) return space;
  for_each_sm90(p, [&](const AttentionForwardSm90Config& config) {
    if (fits_one(config, p, device) && is_worth_a_try(config, p, device)) add(config);
  });
  return space;
}

std::vector<int> genes_of(const ForwardConfig& config) {
  std::vector<int> genes = {static_cast<int>(config.index())};
  std::visit(
      [&](const auto& one) {
        visit_fields(one, [&](const char*, const auto& value) { genes.push_back(static_cast<int>(value)); });
      },
      config);
  return genes;
}

}  // namespace tessera::select
