#include "select/attention.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "contract/arch.h"
#include "contract/mask.h"
#include "cpu/attention.h"
#include "ops/attention_backward.h"
#include "ops/attention_backward_sm90.h"
#include "ops/attention_forward_sm90.h"
#include "ops/attention_params.h"
#include "ops/extents.h"
#include "ops/format.h"

namespace tessera::select {
namespace {

// One way to compute attention: why it cannot serve a problem, or the candidates it offers.
struct Implementation {
  const char* name;
  std::optional<std::string> (*refuses)(const AttentionProblem&, const Device&);
  std::vector<Candidate> (*offers)(const AttentionProblem&, const Device&);
};

std::optional<std::string> cpu_refuses(const AttentionProblem&, const Device& device) {
  if (!device.is_cpu()) return format("reads host memory; the tensors are on {}", device.name);
  return std::nullopt;
}

std::vector<Candidate> cpu_offers(const AttentionProblem& problem, const Device& device) {
  return {{"cpu_attention", format("{{.threads = {}}}", device.threads), cpu::workspace_bytes(problem, device.threads),
           1.0, "the one CPU kernel: every dtype, mask and head dim", std::nullopt, std::nullopt, std::nullopt,
           std::nullopt}};
}

// What every GPU kernel asks of a problem.
std::optional<std::string> gpu_refuses(const AttentionProblem& p, const Device& device) {
  constexpr std::int64_t kLargestDim = 256;
  if (device.is_cpu()) return "runs on GPUs; the tensors are on the CPU";
  if (p.dtype == DType::kFloat32) return "takes fp16 and bf16, not fp32";
  if (p.dtype == DType::kBFloat16 && device.compute < 80) return "bf16 needs sm_80 or newer";
  for (const std::int64_t dim : {p.dim_qk, p.dim_v}) {
    if (dim % 8 != 0 || dim > kLargestDim) return format("head dims are multiples of 8 up to 256, not {}", dim);
  }
  if (p.seq_q >= kUnbounded || p.seq_k >= kUnbounded) return "sequences are shorter than 2^30";
  return std::nullopt;
}

std::optional<std::string> forward_refuses(const AttentionProblem& p, const Device& device) {
  if (p.op != AttentionOp::kForward) return format("computes attention_forward, not {}", name_of(p.op));
  return gpu_refuses(p, device);
}

// Score elements that the tiles of a head compute, masked ones included: what a mask costs a tile shape.
struct ComputedScores {
  double all = 0;
  double of_longest = 0;  // tile of queries
};
ComputedScores computed_scores(const AttentionProblem& p, int block_q, int block_k) {
  constexpr std::int64_t kLooks = 64;  // tiles of queries to look at, evenly apart: a mask is a band
  const Mask mask{p.causal, p.alignment == Alignment::kBottomRight, p.window_left, p.window_right};
  const std::int64_t q_tiles = ceil_div(p.seq_q, block_q);
  const std::int64_t looks = std::min(q_tiles, kLooks);
  ComputedScores computed;
  for (std::int64_t look = 0; look < looks; ++look) {
    const std::int64_t first = (2 * look + 1) * q_tiles / (2 * looks) * block_q;
    const std::int64_t last = std::min(first + block_q, p.seq_q) - 1;
    const Range seen{visible_keys(mask, first, p.seq_q, p.seq_k).begin,
                     std::min<std::int64_t>(visible_keys(mask, last, p.seq_q, p.seq_k).end, p.seq_k)};
    if (seen.empty()) continue;
    const std::int64_t tiles = ceil_div(seen.end, block_k) - seen.begin / block_k;
    const double scores = static_cast<double>(tiles) * block_k * block_q;
    computed.all += scores * static_cast<double>(q_tiles) / static_cast<double>(looks);
    computed.of_longest = std::max(computed.of_longest, scores);
  }
  return computed;
}

std::vector<Candidate> forward_offers(const AttentionProblem& p, const Device& device) {
  constexpr double kSmallTileRate = 0.86;  // of the large one's, where no tile is masked: measured on an H200
  std::vector<Candidate> candidates;
  for (const AttentionForwardConfig& config :
       forward_configs(device.compute, p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v),
                       p.vectors ? 8 : 1, is_banded(p), is_general(p))) {
    if (static_cast<std::size_t>(forward_shared_bytes(config)) > device.shared_memory_per_block) continue;
    // Exact sums cost a third of the speed, which is nothing where there is one tile of queries.
    if (config.in_halves && p.seq_q > config.block_q) continue;
    const double computed = computed_scores(p, config.block_q, config.block_k).all;
    Candidate candidate;
    candidate.kernel = "attention_forward";
    candidate.config = instance_of(config).config;
    candidate.score = (config.in_halves ? 1.01 : candidates.empty() ? 1.0 : kSmallTileRate) / std::max(computed, 1.0);
    candidate.why = format("computes {:.3g} scores a head", computed);
    candidate.forward = config;
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

std::optional<std::string> hopper_refuses(const AttentionProblem& p, const Device& device) {
  if (device.compute != 90 || !device.specific) return "needs wgmma and the copy engine of sm_90a";
  if (!p.vectors || !p.tensor_maps) return "needs rows at multiples of 16 bytes, and positive strides below 2^40 bytes";
  return std::nullopt;
}

std::optional<std::string> forward_sm90_refuses(const AttentionProblem& p, const Device& device) {
  if (auto reason = forward_refuses(p, device)) return reason;
  if (auto reason = hopper_refuses(p, device)) return reason;
  if (p.seq_k == 0 || (p.varlen && p.total_k == 0)) return "there are no keys to load";
  return std::nullopt;
}

// Of a column of tiles: queries, or where joined all heads of each.
std::int64_t rows_of(const AttentionProblem& p, const AttentionForwardSm90Config& config) {
  return config.joined ? p.seq_q * (p.heads_q / p.heads_kv) : p.seq_q;
}

ComputedScores computed_scores(const AttentionProblem& p, const AttentionForwardSm90Config& config) {
  if (!config.joined) return computed_scores(p, block_q_of(config), config.block_k);
  const auto group = static_cast<int>(p.heads_q / p.heads_kv);
  const ComputedScores one = computed_scores(p, block_q_of(config) / group, config.block_k);
  return {one.all * group, one.of_longest * group};
}

// Microseconds, about: measured on an H200 and scaled by the head dim; only their order matters.
double forward_sm90_time(const AttentionProblem& p, const AttentionForwardSm90Config& config, const Device& device,
                         const ComputedScores& computed) {
  constexpr double kMerge = 0.3;                                 // what split consumers have, into one
  const double each_tile = 2.0 + (config.split ? kMerge : 0.0);  // of queries, beside its scores
  // Of the whole GPU, at head dim 64.
  const int best_step = forward_sm90_tile(config.dim_qk, config.dim_v, config.general).block_k;
  const double alone = config.block_k < best_step ? 2.1e6 : 2.2e6;
  const double several = config.consumers > 1 ? 1.55e6 : 1.4e6;
  const double scores_per_us = config.blocks > 1 ? several : alone;
  const double columns = static_cast<double>(p.batch) * static_cast<double>(config.joined ? p.heads_kv : p.heads_q);
  const double items = columns * static_cast<double>(ceil_div(rows_of(p, config), block_q_of(config)));
  // Blocks that have an SM for themselves are not slowed by others.
  const double blocks = std::clamp(std::ceil(items / device.multiprocessors), 1.0, static_cast<double>(config.blocks));
  const double slots = device.multiprocessors * blocks;
  const double rounds = std::ceil(items / slots);
  const double slot_rate = scores_per_us / slots * 64.0 / static_cast<double>(std::max(p.dim_qk, p.dim_v));
  // The end of a tile and the start of the next are partly one.
  const double by_work = rounds * computed.all * columns / std::max(items, 1.0) / slot_rate +
                         each_tile * (1.0 + 0.6 * std::max(0.0, rounds - 1.0));
  const double by_longest = computed.of_longest / slot_rate + each_tile;
  // Of a mask's long and short tiles, tickets give each block its share, for a word to be zeroed first. Several blocks
  // an SM even out by themselves, and so do tiles that take little time.
  const bool tickets_pay = rounds > 4 && p.seq_k * std::max(p.dim_qk, p.dim_v) > 96 * 1024;
  const bool even = !config.banded || config.blocks > 1 || config.tickets == tickets_pay;
  const double imbalance = even ? 1.0 : 1.05;
  // Consumers that share a tile wait through its start and its end together; with tiles for all, each has its own.
  const double shared_rows = config.split && rounds > 1 ? 1.5 : 1.0;
  return std::max(by_work, by_longest) * imbalance * shared_rows;
}

std::vector<Candidate> forward_sm90_offers(const AttentionProblem& p, const Device& device) {
  constexpr std::int64_t kFewRows = 16;  // a tile of 64 would be nearly empty
  std::vector<Candidate> candidates;
  const auto offer = [&](const AttentionForwardSm90Config& config) {
    if (static_cast<std::size_t>(forward_sm90_layout(config).bytes) > device.shared_memory_per_block) return;
    const ComputedScores computed = computed_scores(p, config);
    const double time = forward_sm90_time(p, config, device, computed);
    Candidate candidate;
    candidate.kernel = "attention_forward_sm90";
    candidate.config = instance_of(config).config;
    candidate.workspace = forward_sm90_workspace(config);
    // Above the portable kernel's, which are below one, but for few queries that no other heads join.
    const bool few = rows_of(p, config) <= kFewRows && !config.joined;
    candidate.score = few ? 1e-12 / (1.0 + time) : 1.0 + 1.0 / (1.0 + time);
    candidate.why = format("computes {:.3g} scores a {}head, about {:.3g} us on an H200", computed.all,
                           config.joined ? "key " : "", time);
    candidate.forward_sm90 = config;
    candidates.push_back(std::move(candidate));
  };
  for (AttentionForwardSm90Config config : forward_sm90_configs(
           p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v), is_banded(p), is_general(p))) {
    offer(config);
    // Where queries do not fill a tile.
    config.joined = true;
    if (p.seq_q < block_q_of(config) && can_join_heads(p, config)) offer(config);
  }
  return candidates;
}

// Whose tiles to take: those made for 99 KB of shared memory also where a newer architecture has no more.
int tile_arch(const Device& device) {
  const auto needed = static_cast<std::size_t>(limits_of(80).shared_memory_per_block);
  return device.compute > 80 && device.shared_memory_per_block < needed ? 86 : device.compute;
}

std::vector<BackwardConfigs> backward_configs_for(const AttentionProblem& p, const Device& device) {
  return backward_configs(tile_arch(device), p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v),
                          p.vectors ? 8 : 1, is_banded(p), is_general(p), p.deterministic);
}

std::optional<std::string> backward_refuses(const AttentionProblem& p, const Device& device) {
  if (p.op != AttentionOp::kBackward) return format("computes attention_backward, not {}", name_of(p.op));
  if (auto reason = gpu_refuses(p, device)) return reason;
  const BackwardConfigs configs = backward_configs_for(p, device).front();
  const auto workspace = backward_workspace(p, configs);
  if (!workspace.ok()) return workspace.status().message();
  const int smem =
      std::max(backward_layout(configs.main).bytes, configs.main.adds_dq ? 0 : backward_dq_shared_bytes(configs.dq));
  if (static_cast<std::size_t>(smem) > device.shared_memory_per_block) {
    return format("needs {} bytes of shared memory a block; {} has {}", smem, device.name,
                  device.shared_memory_per_block);
  }
  return std::nullopt;
}

std::vector<Candidate> backward_offers(const AttentionProblem& p, const Device& device) {
  constexpr double kSmallTileRate = 0.5;  // of the large one's, about: it is for few queries
  std::vector<Candidate> candidates;
  for (const BackwardConfigs& configs : backward_configs_for(p, device)) {
    const auto workspace = backward_workspace(p, configs);
    if (!workspace.ok()) continue;  // the small tile, where only the large one's grid is small enough
    const double rows = static_cast<double>(ceil_div(p.seq_q, configs.main.block_q) * configs.main.block_q);
    Candidate candidate;
    candidate.kernel = "attention_backward";
    candidate.config = instance_of(configs.main).config;
    candidate.workspace = *workspace;
    candidate.score = (candidates.empty() ? 1.0 : kSmallTileRate) / std::max(rows, 1.0);
    candidate.why = format("computes {:.3g} rows a head; {}", rows,
                           p.deterministic ? "dQ by " + instance_of(configs.dq).config + ", no atomics"
                                           : std::string("dQ added up in fp32 by atomics"));
    candidate.backward = configs;
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

std::vector<AttentionBackwardSm90Config> backward_sm90_configs_for(const AttentionProblem& p) {
  return backward_sm90_configs(p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v), is_banded(p));
}

std::optional<std::string> backward_sm90_refuses(const AttentionProblem& p, const Device& device) {
  if (p.op != AttentionOp::kBackward) return format("computes attention_backward, not {}", name_of(p.op));
  if (auto reason = gpu_refuses(p, device)) return reason;
  if (auto reason = hopper_refuses(p, device)) return reason;
  if (p.deterministic) return "adds dQ up by atomics, in any order";
  if (is_general(p)) return "takes neither softcap nor ALiBi nor a scale that is not above 0";
  if (p.batch == 0 || p.seq_q == 0 || p.seq_k == 0 || (p.varlen && (p.total_q == 0 || p.total_k == 0))) {
    return "there is nothing to load";
  }
  const auto configs = backward_sm90_configs_for(p);
  if (configs.empty()) return format("takes head dims up to 128, not {}", std::max(p.dim_qk, p.dim_v));
  const auto workspace = backward_sm90_workspace(p, configs.front());
  if (!workspace.ok()) return workspace.status().message();
  return std::nullopt;
}

std::vector<Candidate> backward_sm90_offers(const AttentionProblem& p, const Device& device) {
  // Of the portable kernel's large tile: 1.5 to 2 on an H200. Up to head dim 64 that one has half as many keys, so that
  // more SMs have something to do where there are few; but one block alone would have to run at 0.85 of what three do.
  constexpr double kRate = 1.7;
  std::vector<Candidate> candidates;
  for (const AttentionBackwardSm90Config& config : backward_sm90_configs_for(p)) {
    const auto workspace = backward_sm90_workspace(p, config);
    if (!workspace.ok()) continue;
    if (static_cast<std::size_t>(backward_sm90_layout(config).bytes) > device.shared_memory_per_block) continue;
    const double rows = static_cast<double>(ceil_div(p.seq_q, config.block_q) * config.block_q);
    Candidate candidate;
    candidate.kernel = "attention_backward_sm90";
    candidate.config = instance_of(config).config;
    candidate.workspace = *workspace;
    candidate.score = kRate / rows;
    candidate.why = format("computes {:.3g} rows a head; dQ added up in fp32 by atomics", rows);
    candidate.backward_sm90 = config;
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

constexpr Implementation kImplementations[] = {
    {"attention_backward", backward_refuses, backward_offers},
    {"attention_backward_sm90", backward_sm90_refuses, backward_sm90_offers},
    {"attention_forward", forward_refuses, forward_offers},
    {"attention_forward_sm90", forward_sm90_refuses, forward_sm90_offers},
    {"cpu_attention", cpu_refuses, cpu_offers},
};

// The tuned Config as a candidate that is better than all others; what the selector offers of the same is taken away.
void put_first(const TunedForward& tuned, std::vector<Candidate>& candidates) {
  Candidate best;
  best.kernel = kernel_name(tuned.config);
  best.config = instance_of(tuned.config).config;
  if (const auto* config = std::get_if<AttentionForwardConfig>(&tuned.config)) best.forward = *config;
  if (const auto* config = std::get_if<AttentionForwardSm90Config>(&tuned.config)) {
    best.forward_sm90 = *config;
    best.workspace = forward_sm90_workspace(*config);
  }
  best.score = candidates.empty() ? 1 : 2 * candidates.front().score;
  best.why = format("tuned on this GPU: {:.1f} us, default {:.1f} us", tuned.microseconds, tuned.default_microseconds);
  std::erase_if(candidates, [&](const Candidate& c) { return c.config == best.config; });
  candidates.insert(candidates.begin(), std::move(best));
}

std::string human_bytes(std::size_t bytes) {
  if (bytes < 1024) return format("{} B", bytes);
  if (bytes < 1024 * 1024) return format("{:.1f} KiB", static_cast<double>(bytes) / 1024);
  return format("{:.1f} MiB", static_cast<double>(bytes) / (1024 * 1024));
}

}  // namespace

Selection select_attention(const AttentionProblem& problem, const Device& device, const TunedForward* tuned) {
  Selection selection;
  for (const Implementation& implementation : kImplementations) {
    if (auto reason = implementation.refuses(problem, device)) {
      selection.refusals.push_back({implementation.name, *reason});
      continue;
    }
    for (Candidate& candidate : implementation.offers(problem, device)) {
      selection.candidates.push_back(std::move(candidate));
    }
  }
  std::stable_sort(selection.candidates.begin(), selection.candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
  if (tuned == nullptr || !fits(tuned->config, problem, device)) return selection;
  const bool refused = std::any_of(selection.refusals.begin(), selection.refusals.end(),
                                   [&](const Refusal& r) { return r.kernel == kernel_name(tuned->config); });
  if (!refused) put_first(*tuned, selection.candidates);
  return selection;
}

std::string describe(const AttentionProblem& p) {
  std::string text = format("{} {} ", name_of(p.op), name_of(p.dtype));
  if (p.varlen) {
    text += format("{} packed sequences, Sq<={} Sk<={}", p.batch, p.seq_q, p.seq_k);
  } else {
    text += format("B={} Sq={} Sk={}", p.batch, p.seq_q, p.seq_k);
  }
  text += format(" Hq={} Hkv={} Dqk={} Dv={}", p.heads_q, p.heads_kv, p.dim_qk, p.dim_v);
  if (p.paged) text += format(" pages of {}", p.page_size);
  const bool by_position = p.causal || p.window_left >= 0 || p.window_right >= 0 || p.alibi;
  if (p.causal) text += " causal";
  if (p.window_left >= 0 || p.window_right >= 0) text += format(" window({}, {})", p.window_left, p.window_right);
  if (p.alibi) text += " alibi";
  if (by_position) text += p.alignment == Alignment::kTopLeft ? " top-left" : " bottom-right";
  if (p.softcap > 0) text += format(" softcap={}", p.softcap);
  if (p.with_dlse) text += " dlse";
  if (p.deterministic) text += " deterministic";
  return text;
}

std::string explain(const AttentionProblem& problem, const Device& device, const Selection& selection) {
  std::string text = format("{}\non {}\n", describe(problem), device.name);
  if (selection.candidates.empty()) text += "no kernel of this version serves it\n";
  const char* verdict = "chosen ";
  for (const Candidate& c : selection.candidates) {
    text += format("{} {} {}  workspace {}: {}\n", verdict, c.kernel, c.config, human_bytes(c.workspace), c.why);
    verdict = "offered";
  }
  for (const Refusal& r : selection.refusals) text += format("refused {}: {}\n", r.kernel, r.reason);
  return text;
}

}  // namespace tessera::select
