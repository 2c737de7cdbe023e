// Small problems to check a tuner's candidates on.
#include <algorithm>
#include <numeric>

#include "verify/attention/cases.h"

namespace tessera::cases {
namespace {

// Lengths around the edges of tiles and splits, empty ones too; pages, new keys and rotary embedding as the problem has
// them.
std::vector<Case> decode_checks(const Case& problem) {
  Case c = problem;
  AttentionProblem& p = c.problem;
  const std::int64_t group = p.heads_q / p.heads_kv;
  p.with_lse = true;
  p.heads_kv = 2;
  p.heads_q = 2 * group;
  p.window_left = std::min<std::int64_t>(p.window_left, 70);
  p.window_right = std::min<std::int64_t>(p.window_right, 70);
  p.seq_k = 1100 + p.seq_new;
  c.cache_lengths = {1100, 0, 17, 1023, 256};
  p.batch = static_cast<std::int64_t>(c.cache_lengths.size());
  if (p.paged) {
    p.max_pages_per_seq = (p.seq_k + p.page_size - 1) / p.page_size;
    p.seq_k = p.max_pages_per_seq * p.page_size;
    p.num_pages = p.batch * p.max_pages_per_seq + 2;
  } else {
    p.cache_rows = p.batch;
  }
  if (p.rotary_dim > 0) p.rotary_rows = p.seq_k + p.seq_q;
  c.rotary_lengths = {};
  if (!c.cache_batch_idx.empty()) c.cache_batch_idx = {4, 3, 0, 1, 2};
  if (!c.leftpad.empty()) c.leftpad = {300, 0, 5, 1000, 0};
  c.layout = Layout::kCompact;
  c.distribution = Distribution::kNormal;
  c.name = "ragged lengths";
  return {c};
}

}  // namespace

std::vector<Case> tuning_checks(const Case& problem) {
  if (problem.problem.op == AttentionOp::kDecode) return decode_checks(problem);
  constexpr std::int64_t kWindow = 70;  // cuts through tiles of every size
  Case c = problem;
  AttentionProblem& p = c.problem;
  p.with_lse = true;
  p.varlen = false;
  p.total_q = p.total_k = 0;
  p.window_left = std::min(p.window_left, kWindow);
  p.window_right = std::min(p.window_right, kWindow);
  c.lengths_q = c.lengths_k = {};
  c.layout = Layout::kCompact;
  c.distribution = Distribution::kNormal;
  c.sample = 0;

  const auto shaped = [&](const char* name, std::int64_t batch, std::int64_t heads_q, std::int64_t heads_kv,
                          std::int64_t seq_q, std::int64_t seq_k) {
    Case shape = c;
    shape.name = name;
    shape.problem.batch = batch;
    shape.problem.heads_q = heads_q;
    shape.problem.heads_kv = heads_kv;
    shape.problem.seq_q = seq_q;
    shape.problem.seq_k = seq_k;
    return shape;
  };
  // The problem's own group: which Configs fit depends on it.
  const std::int64_t group = c.problem.heads_q / c.problem.heads_kv;
  const auto heads = [&](std::int64_t about) { return (about + group - 1) / group; };  // of keys
  const Case ragged = shaped("ragged lengths", 2, heads(4) * group, heads(4), 197, 333);
  Case packed = shaped("packed sequences", 5, heads(4) * group, heads(4), 211, 300);
  packed.lengths_q = {0, 1, 130, 70, 211};
  packed.lengths_k = {17, 70, 0, 300, 129};
  packed.problem.varlen = true;
  packed.problem.total_q = std::accumulate(packed.lengths_q.begin(), packed.lengths_q.end(), std::int64_t{0});
  packed.problem.total_k = std::accumulate(packed.lengths_k.begin(), packed.lengths_k.end(), std::int64_t{0});
  Case many = shaped("many tiles", 2, heads(12) * group, heads(12), 1100, 900);
  many.sample = 12;
  return {ragged, packed, many};
}

}  // namespace tessera::cases
