// Small problems to check a tuner's candidates on.
#include <algorithm>
#include <numeric>

#include "verify/attention/cases.h"

namespace tessera::cases {

std::vector<Case> tuning_checks(const Case& problem) {
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
