#include "verify/attention/cases.h"

#include <algorithm>

#include "tile/mask.h"

namespace tessera::cases {
namespace {

struct Lengths {
  std::int64_t q = 0;
  std::int64_t k = 0;          // appended ones included
  std::int64_t first_key = 0;  // behind left padding
};

// By sequence.
std::vector<Lengths> lengths_of(const Case& c) {
  const AttentionProblem& p = c.problem;
  oracle::Inputs shapes;
  if (c.refused) shapes = make_shapes(c);
  std::vector<Lengths> list;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const auto at = static_cast<std::size_t>(b);
    Lengths& len = list.emplace_back();
    const std::int64_t queries = p.varlen ? c.lengths_q[at] : p.seq_q;
    if (!c.lengths_k.empty()) {
      len = {queries, c.lengths_k[at], 0};
    } else {
      len = {queries, c.cache_lengths.empty() ? p.seq_k : c.cache_lengths[at] + p.seq_new, 0};
    }
    if (!c.leftpad.empty()) len.first_key = std::min<std::int64_t>(len.k, c.leftpad[at]);
    if (c.refused && oracle::is_refused(shapes, b)) len.k = len.first_key = 0;
  }
  return list;
}

}  // namespace

const char* name_of(Distribution distribution) {
  switch (distribution) {
    case Distribution::kNormal:
      return "normal";
    case Distribution::kLogits120:
      return "logits_120";
    case Distribution::kLogits1e4:
      return "logits_1e4";
    case Distribution::kLogits1e10:
      return "logits_1e10";
    case Distribution::kLogitsMinus120:
      return "logits_minus_120";
    case Distribution::kSteps:
      return "steps";
    case Distribution::kSink:
      return "sink";
    case Distribution::kOneHot:
      return "one_hot";
    case Distribution::kConstant:
      return "constant";
    case Distribution::kHugeValues:
      return "huge_values";
    case Distribution::kMeanValues:
      return "mean_values";
  }
  return "?";
}

std::int64_t Case::visible_pairs() const {
  const AttentionProblem& p = problem;
  const Mask mask{p.causal, p.alignment == Alignment::kBottomRight, p.window_left, p.window_right, p.chunk};
  std::int64_t pairs = 0;
  for (const Lengths& len : lengths_of(*this)) {
    if (mask.everything()) {
      pairs += len.q * (len.k - len.first_key);
      continue;
    }
    for (std::int64_t i = 0; i < len.q; ++i) {
      const Range keys = visible_keys(mask, i, len.q, len.k);
      pairs += std::max<Index>(0, keys.end - std::max<Index>(keys.begin, len.first_key));
    }
  }
  return pairs;
}

double Case::flops() const {
  const AttentionProblem& p = problem;
  const double pairs = static_cast<double>(visible_pairs()) * static_cast<double>(p.heads_q);
  const auto dqk = static_cast<double>(p.dim_qk);
  const auto dv = static_cast<double>(p.dim_v);
  // Forward: S = Q K^T, O = P V. Backward: S again, dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q.
  return p.op == AttentionOp::kBackward ? 2 * pairs * (3 * dqk + 2 * dv) : 2 * pairs * (dqk + dv);
}

double Case::bytes() const {
  const AttentionProblem& p = problem;
  double rows_q = 0;
  double rows_k = 0;
  for (const Lengths& len : lengths_of(*this)) {
    rows_q += static_cast<double>(len.q);
    rows_k += static_cast<double>(len.k - len.first_key);
    rows_k += len.k > 0 ? static_cast<double>(p.seq_new) : 0;  // read, and written to the cache
  }
  const double element = p.fp8 ? 1 : static_cast<double>(size_of(p.dtype));
  const double q = rows_q * static_cast<double>(p.heads_q * p.dim_qk) * element;
  const double o = rows_q * static_cast<double>(p.heads_q * p.dim_v) * static_cast<double>(size_of(p.dtype));
  const double kv = rows_k * static_cast<double>(p.heads_kv * (p.dim_qk + p.dim_v)) * (p.fp8_cache ? 1 : element) +
                    (p.cache_scales == CacheScales::kPerToken ? rows_k * static_cast<double>(p.heads_kv) * 8 : 0);
  const double lse = p.with_lse || p.op == AttentionOp::kBackward ? rows_q * static_cast<double>(p.heads_q) * 4 : 0;
  if (p.op == AttentionOp::kBackward) return 2 * q + 2 * o + 2 * kv + lse;  // reads q k v o do lse, writes dq dk dv
  return q + o + kv + lse;
}

double Case::unfused_bytes() const {
  const AttentionProblem& p = problem;
  double scores = 0;
  for (const Lengths& len : lengths_of(*this)) scores += static_cast<double>(len.q) * static_cast<double>(len.k);
  scores *= static_cast<double>(p.heads_q) * static_cast<double>(size_of(p.dtype));
  // Forward: S written and read, P written and read. Backward: P read twice, dP and dS written, dP read, dS read twice.
  return bytes() + scores * (p.op == AttentionOp::kBackward ? 7 : 4);
}

}  // namespace tessera::cases
