// The forward's Configs that are worth a try for a problem: what the tuner searches. Pure, like all of this room.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "ops/attention.h"
#include "select/device.h"
#include "select/kernels.h"

namespace tessera::select {

// Of whichever kernel.
using ForwardConfig = std::variant<AttentionForwardConfig, AttentionForwardSm90Config>;

const char* kernel_name(const ForwardConfig& config);
jit::KernelInstance instance_of(const ForwardConfig& config);

// Back from instance_of(config).config; nothing for what this version's kernels cannot be.
std::optional<ForwardConfig> forward_config_from_text(std::string_view text);

// Can the kernel be compiled with it and be launched for this problem? Whether the kernel takes the problem at all is
// the selector's to say.
bool fits(const ForwardConfig& config, const AttentionProblem& problem, const Device& device);

// The Hopper kernel's registers of a consumer's thread, about: scores, probabilities and output live at once.
constexpr int estimated_registers(const AttentionForwardSm90Config& config) {
  constexpr int kRest = 32;  // addresses, the rows' maxima and sums
  return config.block_k / 2 + config.block_k / 4 + config.dim_v / 2 + kRest;
}

// Every Config that fits, of every forward kernel that serves the problem; those that the selector offers come first,
// its choice before all. Hopper's are left out where they would spill by the estimate, and where two blocks would not
// fit on an SM together. Empty where no GPU kernel serves the problem.
std::vector<ForwardConfig> forward_search_space(const AttentionProblem& problem, const Device& device);

// A Config as numbers, for a search that changes one or two of them: the kernel's first, then its fields in order.
std::vector<int> genes_of(const ForwardConfig& config);

}  // namespace tessera::select
