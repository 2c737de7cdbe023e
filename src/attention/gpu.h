// What the GPU kernels' host files share: refusals, the cost of a tile shape, and representative problems.
#pragma once

#include <optional>
#include <string>

#include "attention/problem.h"
#include "engine/device.h"

namespace tessera::attention {

using engine::Device;

// What every GPU kernel requires of a problem.
std::optional<std::string> gpu_refuses(const AttentionProblem& problem, const Device& device);
// The same for kernels of e4m3.
std::optional<std::string> fp8_refuses(const AttentionProblem& problem, const Device& device);
// And what kernels on TMA and wgmma require in addition.
std::optional<std::string> hopper_refuses(const AttentionProblem& problem, const Device& device);
// What e4m3 on wgmma requires; the portable kernel serves the rest.
std::optional<std::string> fp8_hopper_refuses(const AttentionProblem& problem, const Device& device);

// The most keys that a query sees.
std::int64_t most_keys_seen(const AttentionProblem& problem);

// What the tensor cores' truncation takes from a sum of e4m3 products is 1 % at so many keys, if V has a mean, and grows with
// them. Longer sums are in fp32, unless the caller allows the others.
inline constexpr std::int64_t kTruncatedKeys = 1024;
bool needs_fp32_sums(const AttentionProblem& problem);

// What a forward kernel requires of decode: of a cache, which it serves for many queries.
std::optional<std::string> cache_refuses(const AttentionProblem& problem);

// Score elements that the tiles of a head compute, masked ones included: what a mask costs a tile shape.
struct ComputedScores {
  double all = 0;
  double of_longest = 0;  // of the query tile that computes the most
};
ComputedScores computed_scores(const AttentionProblem& problem, int block_q, int block_k);

// What explain says of an e4m3 kernel that computes so many scores of a head.
std::string fp8_remark(const AttentionProblem& problem, double scores);

// CTAs per SM of a kernel of 256 threads that waits for memory: 1024 threads, what sm_75 can hold, at 64 registers each.
// If no minimum is stated, ptxas saves registers by using one load's result before it issues the next.
inline constexpr int kMemoryBoundCtas = 4;

// Scores that the portable forward computes per microsecond at head dim 64 on the whole GPU, roughly.
double portable_rate(const Device& device);

// A representative problem for the compile gate: one sequence of 4096, in the most common type on the device.
AttentionProblem representative(const Device& device, AttentionOp op, int dim_qk, int dim_v);
// With no mask, with a causal one, and with a causal one and softcap: the three variants that kernels compile to.
struct Variant {
  bool masked;
  bool score_mod;
};
inline constexpr Variant kVariants[] = {{false, false}, {true, false}, {true, true}};
AttentionProblem with_variant(AttentionProblem problem, const Variant& variant);

}  // namespace tessera::attention
