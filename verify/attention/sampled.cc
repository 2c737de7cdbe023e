#include "verify/attention/sampled.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <set>

#include "verify/parallel.h"

namespace tessera::oracle {
namespace {

using Index = std::int64_t;

template <class Real>
Real dot(const Real* a, const Real* b, Index n) {
  Real sum = 0;
  for (Index d = 0; d < n; ++d) sum += a[d] * b[d];
  return sum;
}

// Sum of the absolute terms of a dot product.
template <class Real>
double terms_of(const Real* a, const Real* b, Index n) {
  double sum = 0;
  for (Index d = 0; d < n; ++d) sum += std::abs(static_cast<double>(a[d]) * static_cast<double>(b[d]));
  return sum;
}

// Real = double without rounding: the oracle. Real = float with rounding: the plain computation.
template <class Real>
class Sampled {
 public:
  Sampled(const Inputs& inputs, const Sample& sample, const HostTensor& saved_o, const HostTensor& saved_lse)
      : in_(inputs),
        p_(inputs.problem),
        sample_(sample),
        saved_lse_(saved_lse),
        q_(in_.q.data.begin(), in_.q.data.end()),
        k_(in_.k.data.begin(), in_.k.data.end()),
        v_(in_.v.data.begin(), in_.v.data.end()),
        d_o_(in_.d_o.data.begin(), in_.d_o.data.end()) {
    largest_q_ = largest(q_);
    largest_k_ = largest(k_);
    largest_v_ = largest(v_);
    largest_do_ = largest(d_o_);
    const auto rows = static_cast<Index>(sample.rows.size());
    const auto keys = static_cast<Index>(sample.keys.size());
    out_.o = HostTensor(p_.batch, rows, p_.heads_q, p_.dim_v);
    out_.lse = HostTensor(p_.batch, p_.heads_q, rows, 1);
    if (p_.op != AttentionOp::kBackward) return;
    out_.dq = HostTensor(p_.batch, rows, p_.heads_q, p_.dim_qk);
    out_.dq.row_noise.assign(static_cast<std::size_t>(p_.batch * rows * p_.heads_q), 0);
    out_.dk = HostTensor(p_.batch, keys, p_.heads_kv, p_.dim_qk);
    out_.dv = HostTensor(p_.batch, keys, p_.heads_kv, p_.dim_v);
    saved_o_.assign(saved_o.data.begin(), saved_o.data.end());
  }

  Outputs run(int threads) {
    const auto rows = static_cast<Index>(sample_.rows.size());
    verify::in_parallel(p_.batch * p_.heads_q * rows, threads, [&](Index task) { one_row(task / rows, task % rows); });
    if (p_.op == AttentionOp::kBackward) {
      const auto keys = static_cast<Index>(sample_.keys.size());
      verify::in_parallel(p_.batch * p_.heads_kv * keys, threads,
                          [&](Index task) { one_key(task / keys, task % keys); });
    }
    // An error in a score, which grows with the score, is a relative error of its weight.
    const double per_weight = 1 + out_.lse.terms;
    out_.o.terms = largest_v_ * per_weight;
    for (HostTensor* t : {&out_.dq, &out_.dk, &out_.dv}) t->terms *= per_weight;
    return std::move(out_);
  }

 private:
  static constexpr bool kOracle = std::is_same_v<Real, double>;

  Real rounded(Real x) const { return kOracle ? x : static_cast<Real>(verify::round_to(p_.dtype, x)); }

  static double largest(const std::vector<Real>& values) {
    double most = 0;
    for (Real x : values) most = std::max(most, static_cast<double>(std::abs(x)));
    return most;
  }

  void keep_terms(HostTensor& t, double terms) {
    const std::lock_guard lock(mutex_);
    t.terms = std::max(t.terms, terms);
  }

  // The score of query i at key j, and its derivative by the raw one.
  Real score(Index b, Index h, Index i, Index j, const Real* q_row, const Real* k_row, Real* d_cap) const {
    Real s = static_cast<Real>(p_.scale) * dot(q_row, k_row, p_.dim_qk);
    *d_cap = 1;
    if (p_.softcap > 0) {
      const auto cap = static_cast<Real>(p_.softcap);
      const Real t = std::tanh(s / cap);
      s = cap * t;
      *d_cap = 1 - t * t;
    }
    if (p_.alibi) {
      const bool per_batch = static_cast<Index>(in_.alibi_slopes.size()) > p_.heads_q;
      const Index position = i + (p_.alignment == Alignment::kBottomRight ? p_.seq_k - p_.seq_q : 0);
      s -= static_cast<Real>(in_.alibi_slopes[static_cast<std::size_t>(per_batch ? b * p_.heads_q + h : h)]) *
           static_cast<Real>(std::abs(position - j));
    }
    return s;
  }

  // O, LSE and dQ of one sampled query: one pass for the scores, one for each product.
  void one_row(Index batch_head, Index at) {
    const Index b = batch_head / p_.heads_q, h = batch_head % p_.heads_q,
                i = sample_.rows[static_cast<std::size_t>(at)];
    const Index head_kv = h / (p_.heads_q / p_.heads_kv);
    const Real* q_row = q_.data() + in_.q.offset(b, i, h);
    std::vector<Index> keys;
    std::vector<Real> scores, d_caps;
    double lse_terms = 0;
    for (Index j = 0; j < p_.seq_k; ++j) {
      if (!is_visible(p_, i, j, p_.seq_q, p_.seq_k)) continue;
      const Real* k_row = k_.data() + in_.k.offset(b, j, head_kv);
      Real d_cap = 1;
      keys.push_back(j);
      scores.push_back(score(b, h, i, j, q_row, k_row, &d_cap));
      d_caps.push_back(d_cap);
      if (kOracle) lse_terms = std::max(lse_terms, std::abs(p_.scale) * terms_of(q_row, k_row, p_.dim_qk));
    }
    double& lse_out = out_.lse.at(b, h, at);
    lse_out = -std::numeric_limits<double>::infinity();
    if (keys.empty()) return;
    keep_terms(out_.lse, lse_terms);
    const Real row_max = *std::max_element(scores.begin(), scores.end());
    Real sum = 0;
    for (Real s : scores) sum += std::exp(s - row_max);
    const Real lse = row_max + std::log(sum);
    lse_out = lse;

    std::vector<Real> o_row(static_cast<std::size_t>(p_.dim_v), 0);
    for (std::size_t x = 0; x < keys.size(); ++x) {
      constexpr Real kE4m3Range = 196;  // as in oracle.cc
      const Real exponential = std::exp(scores[x] - row_max);
      const Real weight = !kOracle && (p_.fp8 || p_.rounds_to_fp8)
                              ? static_cast<Real>(verify::round_to_e4m3(exponential * kE4m3Range)) / kE4m3Range / sum
                              : rounded(exponential / sum);
      const Real* v_row = v_.data() + in_.v.offset(b, keys[x], head_kv);
      for (std::size_t d = 0; d < o_row.size(); ++d) o_row[d] += weight * v_row[d];
    }
    for (Real& x : o_row) x = rounded(x);
    std::copy(o_row.begin(), o_row.end(), out_.o.data.begin() + out_.o.offset(b, at, h));
    if (p_.op != AttentionOp::kBackward) return;

    const Real* do_row = d_o_.data() + in_.d_o.offset(b, i, h);
    const Real delta = dot(do_row, o_row.data(), p_.dim_v);
    const Real d_lse = p_.with_dlse ? static_cast<Real>(in_.d_lse.at(b, h, i)) : 0;
    const double delta_terms = terms_of(do_row, o_row.data(), p_.dim_v);
    double delta_noise = 0;
    for (std::size_t d = 0; d < o_row.size(); ++d) {
      delta_noise += std::pow(static_cast<double>(do_row[d]) * static_cast<double>(o_row[d]), 2);
    }
    delta_noise = verify::epsilon_of(p_.dtype) * std::sqrt(delta_noise) * std::abs(p_.scale);
    std::vector<Real> dq_row(static_cast<std::size_t>(p_.dim_qk), 0);
    std::vector<double> mean_key(dq_row.size(), 0);
    double ds_of_row = 0;
    for (std::size_t x = 0; x < keys.size(); ++x) {
      const Real* k_row = k_.data() + in_.k.offset(b, keys[x], head_kv);
      const Real* v_row = v_.data() + in_.v.offset(b, keys[x], head_kv);
      const Real weight = std::exp(scores[x] - lse);
      const Real ds = rounded(weight * (dot(do_row, v_row, p_.dim_v) - delta + d_lse) * d_caps[x]);
      for (std::size_t d = 0; d < dq_row.size(); ++d) dq_row[d] += ds * k_row[d];
      if (!kOracle) continue;
      const auto share = static_cast<double>(weight * d_caps[x]);
      for (std::size_t d = 0; d < dq_row.size(); ++d) mean_key[d] += share * static_cast<double>(k_row[d]);
      ds_of_row += static_cast<double>(weight) * std::abs(p_.scale) *
                   (terms_of(do_row, v_row, p_.dim_v) + delta_terms + std::abs(static_cast<double>(d_lse)));
    }
    for (std::size_t d = 0; d < dq_row.size(); ++d) {
      out_.dq.at(b, at, h, static_cast<Index>(d)) = rounded(static_cast<Real>(p_.scale) * dq_row[d]);
    }
    if (!kOracle) return;
    out_.dq.row_noise[static_cast<std::size_t>(out_.dq.offset(b, at, h) / p_.dim_qk)] =
        delta_noise * std::sqrt(dot(mean_key.data(), mean_key.data(), p_.dim_qk));
    keep_terms(out_.dq, ds_of_row * largest_k_);
  }

  // dK and dV of one sampled key, from the o and lse that the backward is given.
  void one_key(Index batch_head, Index at) {
    const Index b = batch_head / p_.heads_kv, head_kv = batch_head % p_.heads_kv;
    const Index j = sample_.keys[static_cast<std::size_t>(at)];
    const Index group = p_.heads_q / p_.heads_kv;
    const Real* k_row = k_.data() + in_.k.offset(b, j, head_kv);
    const Real* v_row = v_.data() + in_.v.offset(b, j, head_kv);
    std::vector<Real> dk_row(static_cast<std::size_t>(p_.dim_qk), 0), dv_row(static_cast<std::size_t>(p_.dim_v), 0);
    double ds_of_key = 0, p_of_key = 0;
    for (Index h = head_kv * group; h < (head_kv + 1) * group; ++h) {
      for (Index i = 0; i < p_.seq_q; ++i) {
        if (!is_visible(p_, i, j, p_.seq_q, p_.seq_k)) continue;
        const Real* q_row = q_.data() + in_.q.offset(b, i, h);
        const Real* do_row = d_o_.data() + in_.d_o.offset(b, i, h);
        const Real* o_row = saved_o_.data() + (in_.d_o.offset(b, i, h));
        Real d_cap = 1;
        const Real s = score(b, h, i, j, q_row, k_row, &d_cap);
        const Real weight = std::exp(s - static_cast<Real>(saved_lse_.at(b, h, i)));
        const Real delta = dot(do_row, o_row, p_.dim_v);
        const Real d_lse = p_.with_dlse ? static_cast<Real>(in_.d_lse.at(b, h, i)) : 0;
        const Real ds = rounded(weight * (dot(do_row, v_row, p_.dim_v) - delta + d_lse) * d_cap);
        const Real weight_rounded = rounded(weight);
        for (std::size_t d = 0; d < dv_row.size(); ++d) dv_row[d] += weight_rounded * do_row[d];
        for (std::size_t d = 0; d < dk_row.size(); ++d) dk_row[d] += ds * q_row[d];
        if (!kOracle) continue;
        p_of_key += static_cast<double>(weight);
        ds_of_key += static_cast<double>(weight) * std::abs(p_.scale) *
                     (terms_of(do_row, v_row, p_.dim_v) + terms_of(do_row, o_row, p_.dim_v) +
                      std::abs(static_cast<double>(d_lse)));
      }
    }
    for (std::size_t d = 0; d < dk_row.size(); ++d) {
      out_.dk.at(b, at, head_kv, static_cast<Index>(d)) = rounded(static_cast<Real>(p_.scale) * dk_row[d]);
    }
    for (std::size_t d = 0; d < dv_row.size(); ++d) {
      out_.dv.at(b, at, head_kv, static_cast<Index>(d)) = rounded(dv_row[d]);
    }
    if (!kOracle) return;
    keep_terms(out_.dk, ds_of_key * largest_q_);
    keep_terms(out_.dv, p_of_key * largest_do_);
  }

  const Inputs& in_;
  const AttentionProblem& p_;
  const Sample& sample_;
  const HostTensor& saved_lse_;
  std::vector<Real> q_, k_, v_, d_o_, saved_o_;
  Outputs out_;
  std::mutex mutex_;  // of the terms
  double largest_q_ = 0, largest_k_ = 0, largest_v_ = 0, largest_do_ = 0;
};

std::vector<Index> spread(Index length, Index count, std::uint64_t seed) {
  std::set<Index> chosen = {0, length - 1};
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ULL + 1;
  const Index step = std::max<Index>(1, length / std::max<Index>(1, count - 1));
  for (Index first = step; first < length && static_cast<Index>(chosen.size()) < count; first += step) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    chosen.insert(std::min(length - 1, first + static_cast<Index>((state >> 33) % static_cast<std::uint64_t>(step))));
  }
  return {chosen.begin(), chosen.end()};
}

}  // namespace

Sample make_sample(const AttentionProblem& problem, std::int64_t count, std::uint64_t seed) {
  return {spread(problem.seq_q, count, seed), spread(problem.seq_k, count, seed + 1)};
}

Outputs sampled_attention(const Inputs& inputs, const Sample& sample, const HostTensor& saved_o,
                          const HostTensor& saved_lse, int threads) {
  return Sampled<double>(inputs, sample, saved_o, saved_lse).run(threads);
}

Outputs sampled_plain_attention(const Inputs& inputs, const Sample& sample, const HostTensor& saved_o,
                                const HostTensor& saved_lse, int threads) {
  return Sampled<float>(inputs, sample, saved_o, saved_lse).run(threads);
}

Outputs take_sample(const AttentionProblem& p, const Sample& sample, const Outputs& whole) {
  const auto rows = static_cast<Index>(sample.rows.size());
  const auto take = [&](const HostTensor& from, const std::vector<Index>& which) {
    if (from.empty()) return HostTensor();
    const auto count = static_cast<Index>(which.size());
    HostTensor t(p.batch, count, from.shape[2], from.shape[3]);
    for (Index b = 0; b < p.batch; ++b) {
      for (Index x = 0; x < count; ++x) {
        std::copy_n(from.data.begin() + from.offset(b, which[static_cast<std::size_t>(x)], 0),
                    from.shape[2] * from.shape[3], t.data.begin() + t.offset(b, x, 0));
      }
    }
    return t;
  };
  Outputs out;
  out.o = take(whole.o, sample.rows);
  out.dq = take(whole.dq, sample.rows);
  out.dk = take(whole.dk, sample.keys);
  out.dv = take(whole.dv, sample.keys);
  if (whole.lse.empty()) return out;
  out.lse = HostTensor(p.batch, p.heads_q, rows, 1);
  for (Index b = 0; b < p.batch; ++b) {
    for (Index h = 0; h < p.heads_q; ++h) {
      for (Index x = 0; x < rows; ++x) {
        out.lse.at(b, h, x) = whole.lse.at(b, h, sample.rows[static_cast<std::size_t>(x)]);
      }
    }
  }
  return out;
}

}  // namespace tessera::oracle
