#include "select/attention.h"

#include <algorithm>
#include <optional>

#include "cpu/attention.h"
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
           1.0, "the one CPU kernel: every dtype, mask and head dim"}};
}

constexpr Implementation kImplementations[] = {
    {"cpu_attention", cpu_refuses, cpu_offers},
};

std::string human_bytes(std::size_t bytes) {
  if (bytes < 1024) return format("{} B", bytes);
  if (bytes < 1024 * 1024) return format("{:.1f} KiB", static_cast<double>(bytes) / 1024);
  return format("{:.1f} MiB", static_cast<double>(bytes) / (1024 * 1024));
}

}  // namespace

Selection select_attention(const AttentionProblem& problem, const Device& device) {
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
