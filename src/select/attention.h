// Problem x Device -> the kernels that serve it, best first, and why each other one does not. Pure: no I/O, no device.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "ops/attention.h"
#include "select/device.h"
#include "select/kernels.h"
#include "select/search_space.h"

namespace tessera::select {

struct Candidate {
  std::string kernel;
  std::string config;  // by field name
  std::size_t workspace = 0;
  double score = 0;  // larger is better; comparable within one selection only
  std::string why;
  std::optional<AttentionForwardConfig> forward;  // where `kernel` is the GPU's forward
  std::optional<AttentionForwardSm90Config> forward_sm90;
  std::optional<BackwardConfigs> backward;  // likewise
  std::optional<AttentionBackwardSm90Config> backward_sm90;
};

struct Refusal {
  std::string kernel;
  std::string reason;
};

struct Selection {
  std::vector<Candidate> candidates;  // best first
  std::vector<Refusal> refusals;
};

// What was found to be the fastest for such a problem, by measuring.
struct TunedForward {
  ForwardConfig config;
  double microseconds = 0;
  double default_microseconds = 0;  // of the selector's own choice, in the same run
};

// tuned: comes first, where it fits and its kernel takes the problem; else it is ignored. May be null.
Selection select_attention(const AttentionProblem& problem, const Device& device, const TunedForward* tuned = nullptr);

// The selection as a person reads it; the first line is the problem.
std::string explain(const AttentionProblem& problem, const Device& device, const Selection& selection);

std::string describe(const AttentionProblem& problem);

}  // namespace tessera::select
