#include "verify/attention/oracle.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <thread>
#include <type_traits>

namespace tessera::oracle {
namespace {

// One sequence of the batch: the position of its rows.
struct Sequence {
  std::int64_t len_q = 0;
  std::int64_t len_k = 0;
  std::int64_t q_batch = 0;  // first index of q, o
  std::int64_t q_row = 0;    // row of query 0
  std::int64_t k_batch = 0;
  std::int64_t k_row = 0;
  std::int64_t first_key = 0;           // that is not left padding
  const std::int32_t* pages = nullptr;  // paged: this sequence's row of the page table
};

Sequence sequence_of(const Inputs& in, std::int64_t b) {
  const AttentionProblem& p = in.problem;
  const auto at = static_cast<std::size_t>(b);
  Sequence s;
  if (p.varlen) {
    s.q_row = in.cu_seqlens_q[at];
    s.len_q = in.cu_seqlens_q[at + 1] - s.q_row;
  } else {
    s.q_batch = b;
    s.len_q = p.seq_q;
  }
  if (!in.cu_seqlens_k.empty()) {
    s.k_row = in.cu_seqlens_k[at];
    s.len_k = in.cu_seqlens_k[at + 1] - s.k_row;
    return s;
  }
  s.k_batch = in.cache_batch_idx.empty() ? b : in.cache_batch_idx[at];
  if (is_refused(in, b)) return s;  // without keys
  s.len_k = in.cache_seqlens.empty() ? p.seq_k : in.cache_seqlens[at] + p.seq_new;
  if (!in.leftpad_k.empty()) s.first_key = in.leftpad_k[at];
  if (p.paged) s.pages = in.page_table.data() + b * p.max_pages_per_seq;
  return s;
}

// Offset of key j's vector in k or v.
std::int64_t key_offset(const Inputs& in, const HostTensor& t, const Sequence& s, std::int64_t j, std::int64_t head) {
  if (s.pages != nullptr) return t.offset(s.pages[j / in.problem.page_size], j % in.problem.page_size, head);
  return t.offset(s.k_batch, s.k_row + j, head);
}

// The sum of term(0) to term(n - 1). In double, where their order hardly matters, eight sums side by side; in float one
// after the other, as the plain computation has it.
template <class Real, class Term>
Real sum_of(std::int64_t n, const Term& term) {
  constexpr std::int64_t kSums = std::is_same_v<Real, double> ? 8 : 1;
  Real sums[kSums] = {};
  std::int64_t d = 0;
  for (; d + kSums <= n; d += kSums) {
    for (std::int64_t i = 0; i < kSums; ++i) sums[i] += term(d + i);
  }
  for (; d < n; ++d) sums[0] += term(d);
  for (std::int64_t i = 1; i < kSums; ++i) sums[0] += sums[i];
  return sums[0];
}

template <class Real>
Real dot(const Real* a, const Real* b, std::int64_t n) {
  return sum_of<Real>(n, [&](std::int64_t d) { return a[d] * b[d]; });
}

// A dot product as the tensor cores sum e4m3: 32 products at a time are added to the sum so far, each truncated to 13
// bits below the largest.
template <class Real>
Real dot_of_e4m3(const Real* a, const Real* b, std::int64_t n) {
  constexpr std::int64_t kStep = 32;
  constexpr int kBits = 13;
  Real sum = 0;
  for (std::int64_t d = 0; d < n; d += kStep) {
    const std::int64_t end = std::min(n, d + kStep);
    Real largest = std::abs(sum);
    for (std::int64_t i = d; i < end; ++i) largest = std::max(largest, std::abs(a[i] * b[i]));
    if (!(largest > 0) || !std::isfinite(largest)) {
      sum += dot(a + d, b + d, end - d);
      continue;
    }
    const int shift = kBits - std::ilogb(largest);
    const Real up = std::ldexp(Real{1}, shift), down = std::ldexp(Real{1}, -shift);
    Real units = std::trunc(sum * up);
    for (std::int64_t i = d; i < end; ++i) units += std::trunc(a[i] * b[i] * up);
    sum = units * down;
  }
  return sum;
}

// None of what is squared is near the square root of the largest double: inputs have at most fp32's range.
double square(double x) { return x * x; }

// The size of the terms of a dot product: rounding errors are relative to it, however small the sum is.
template <class Real>
double terms_of(const Real* a, const Real* b, std::int64_t n) {
  return sum_of<double>(
      n, [&](std::int64_t d) { return std::abs(static_cast<double>(a[d]) * static_cast<double>(b[d])); });
}

template <class Real>
double largest(const std::vector<Real>& values) {
  double most = 0;
  for (Real x : values) {
    if (std::isfinite(x)) most = std::max(most, static_cast<double>(std::abs(x)));
  }
  return most;
}

// P in e4m3 is multiplied by it, so that small weights are not subnormal. The largest weight, 1, is then off by 2 %, the mean
// error of e4m3: with a power of two it would be exact, which an online softmax cannot promise, since it does not know
// the largest score when it rounds P.
constexpr float kE4m3Range = 196;

// The same loops serve both: Real = double and no rounding is the oracle, Real = float and rounding to the input type
// the plain computation. That of e4m3 rounds P to e4m3 and sums scores as the tensor cores do.
template <class Real>
struct Attention {
  const Inputs& in;
  bool round;  // P, dS and the outputs go through the input type
  std::vector<Real> q, k, v, d_o;
  Outputs out;
  std::vector<Real> dk, dv;  // sums over the heads of a group
  double largest_q = 0, largest_k = 0, largest_v = 0, largest_do = 0;

  // For the oracle only. Per key head of the batch, so that threads share nothing; the largest is kept at the end.
  struct Terms {
    double lse = 0, dq = 0, dk = 0, dv = 0;
    double weight = 0;  // lse of rows whose weights may be off by it
  };
  // Of one key head, by key.
  struct Keys {
    std::vector<double> ds, p;  // sums of their sizes
    std::vector<double> norm;   // backward: of the key
  };
  std::vector<Terms> terms;

  explicit Attention(const Inputs& inputs, bool round_to_input_type)
      : in(inputs),
        round(round_to_input_type),
        q(in.q.data.begin(), in.q.data.end()),
        k(in.k.data.begin(), in.k.data.end()),
        v(in.v.data.begin(), in.v.data.end()),
        d_o(in.d_o.data.begin(), in.d_o.data.end()) {
    const AttentionProblem& p = in.problem;
    out.o = HostTensor(in.q.shape[0], in.q.shape[1], p.heads_q, p.dim_v);
    out.lse = HostTensor(in.q.shape[0], p.heads_q, in.q.shape[1], 1);
    if (p.op == AttentionOp::kBackward) {
      out.dq = HostTensor(in.q.shape[0], in.q.shape[1], p.heads_q, p.dim_qk);
      out.dk = HostTensor(in.k.shape[0], in.k.shape[1], p.heads_kv, p.dim_qk);
      out.dv = HostTensor(in.v.shape[0], in.v.shape[1], p.heads_kv, p.dim_v);
      out.dq.row_noise.assign(out.dq.data.size() / static_cast<std::size_t>(p.dim_qk), 0);
      out.dk.row_noise.assign(out.dk.data.size() / static_cast<std::size_t>(p.dim_qk), 0);
      out.dq.row_rounding = out.dq.row_noise;
      out.dk.row_rounding = out.dk.row_noise;
      dk.assign(k.size(), 0);
      dv.assign(v.size(), 0);
    }
    largest_q = largest(q);
    largest_k = largest(k);
    largest_v = largest(v);
    largest_do = largest(d_o);
    terms.resize(static_cast<std::size_t>(p.batch * p.heads_kv));
  }

  Real rounded(Real x) const { return round ? static_cast<Real>(verify::round_to(in.problem.dtype, x)) : x; }

  Real slope(std::int64_t b, std::int64_t h) const {
    if (!in.problem.alibi) return 0;
    const bool per_batch = static_cast<std::int64_t>(in.alibi_slopes.size()) > in.problem.heads_q;
    return static_cast<Real>(in.alibi_slopes[static_cast<std::size_t>(per_batch ? b * in.problem.heads_q + h : h)]);
  }

  void one_key_head(std::int64_t b, std::int64_t head_kv) {
    const AttentionProblem& p = in.problem;
    const std::int64_t group = p.heads_q / p.heads_kv;
    const Sequence s = sequence_of(in, b);
    Terms& most = terms[static_cast<std::size_t>(b * p.heads_kv + head_kv)];
    Keys keys;
    for (auto* values : {&keys.ds, &keys.p, &keys.norm}) values->assign(static_cast<std::size_t>(s.len_k), 0);
    if (p.op == AttentionOp::kBackward && !round) {
      for (std::int64_t j = s.first_key; j < s.len_k; ++j) {
        const Real* k_row = k.data() + key_offset(in, in.k, s, j, head_kv);
        keys.norm[static_cast<std::size_t>(j)] = std::sqrt(static_cast<double>(dot(k_row, k_row, p.dim_qk)));
      }
    }
    for (std::int64_t h = head_kv * group; h < (head_kv + 1) * group; ++h) {
      for (std::int64_t i = 0; i < s.len_q; ++i) one_row(b, h, head_kv, i, s, most, keys);
    }
    for (double x : keys.ds) most.dk = std::max(most.dk, x * largest_q);
    for (double x : keys.p) most.dv = std::max(most.dv, x * largest_do);
  }

  void one_row(std::int64_t b, std::int64_t h, std::int64_t head_kv, std::int64_t i, const Sequence& s, Terms& most,
               Keys& of_keys) {
    const AttentionProblem& p = in.problem;
    const auto scale = static_cast<Real>(p.scale);
    const auto cap = static_cast<Real>(p.softcap);
    const std::int64_t position = i + (p.alignment == Alignment::kBottomRight ? s.len_k - s.len_q : 0);
    const Real* q_row = q.data() + in.q.offset(s.q_batch, s.q_row + i, h);

    std::vector<std::int64_t> keys;  // the visible ones
    for (std::int64_t j = s.first_key; j < s.len_k; ++j) {
      if (is_visible(p, i, j, s.len_q, s.len_k)) keys.push_back(j);
    }
    double& lse_out = out.lse.at(s.q_batch, h, s.q_row + i);
    if (keys.empty()) {  // o and the gradients stay 0
      lse_out = -std::numeric_limits<double>::infinity();
      return;
    }

    // Scores, and what softcap does to their gradient.
    const std::size_t n = keys.size();
    std::vector<Real> score(n), d_cap(n, 1), weight(n);
    double of_row = 0;
    for (std::size_t x = 0; x < n; ++x) {
      const Real* k_row = k.data() + key_offset(in, in.k, s, keys[x], head_kv);
      score[x] = scale * (round && (p.fp8 || p.rounds_to_fp8) ? dot_of_e4m3(q_row, k_row, p.dim_qk)
                                                              : dot(q_row, k_row, p.dim_qk));
      if (!round) of_row = std::max(of_row, std::abs(p.scale) * terms_of(q_row, k_row, p.dim_qk));
      if (cap > 0) {
        const Real t = std::tanh(score[x] / cap);
        score[x] = cap * t;
        d_cap[x] = 1 - t * t;
      }
      if (p.alibi) score[x] -= slope(b, h) * static_cast<Real>(std::abs(position - keys[x]));
    }

    const auto [least, largest_score] = std::minmax_element(score.begin(), score.end());
    most.lse = std::max(most.lse, of_row);
    if (*least < *largest_score || p.op == AttentionOp::kDecode) most.weight = std::max(most.weight, of_row);

    // Softmax.
    const Real row_max = *largest_score;
    Real sum = 0;
    for (std::size_t x = 0; x < n; ++x) {
      weight[x] = std::exp(score[x] - row_max);
      sum += weight[x];
    }
    const Real lse = row_max + std::log(sum);
    lse_out = lse;

    // Output.
    std::vector<Real> o_row(static_cast<std::size_t>(p.dim_v), 0);
    for (std::size_t x = 0; x < n; ++x) {
      const Real w = round && (p.fp8 || p.rounds_to_fp8)
                         ? static_cast<Real>(verify::round_to_e4m3(weight[x] * kE4m3Range)) / kE4m3Range / sum
                         : rounded(weight[x] / sum);
      const Real* v_row = v.data() + key_offset(in, in.v, s, keys[x], head_kv);
      for (std::int64_t d = 0; d < p.dim_v; ++d) o_row[static_cast<std::size_t>(d)] += w * v_row[d];
    }
    for (Real& x : o_row) x = rounded(x);
    std::copy(o_row.begin(), o_row.end(), out.o.data.begin() + out.o.offset(s.q_batch, s.q_row + i, h));
    if (p.op != AttentionOp::kBackward) return;

    // Backward: dV = P^T dO;  dS = P o (dO V^T - rowsum(dO o O) + dLSE);  dQ = scale dS K;  dK = scale dS^T Q.
    const Real* do_row = d_o.data() + in.d_o.offset(s.q_batch, s.q_row + i, h);
    const Real d_lse = p.with_dlse ? static_cast<Real>(in.d_lse.at(s.q_batch, h, s.q_row + i)) : 0;
    const Real delta = dot(do_row, o_row.data(), p.dim_v);
    std::vector<Real> dq_row(static_cast<std::size_t>(p.dim_qk), 0);
    const double delta_terms = round ? 0 : terms_of(do_row, o_row.data(), p.dim_v);
    double delta_noise = 0;
    for (std::int64_t d = 0; d < p.dim_v; ++d) {
      const double term = static_cast<double>(do_row[d]) * static_cast<double>(o_row[static_cast<std::size_t>(d)]);
      delta_noise += term * term;
    }
    delta_noise = verify::epsilon_of(p.dtype) * std::sqrt(delta_noise) * std::abs(p.scale);
    const double q_norm = std::sqrt(static_cast<double>(dot(q_row, q_row, p.dim_qk)));
    const double rounding = verify::rounding_error_of(p.dtype) * std::abs(static_cast<double>(p.scale));
    double dq_rounding = 0;                                               // the square
    std::vector<double> mean_key(static_cast<std::size_t>(p.dim_qk), 0);  // by weight
    double ds_of_row = 0;
    for (std::size_t x = 0; x < n; ++x) {
      const std::int64_t k_at = key_offset(in, in.k, s, keys[x], head_kv);
      const std::int64_t v_at = key_offset(in, in.v, s, keys[x], head_kv);
      const Real w = std::exp(score[x] - lse);
      const Real dp = dot(do_row, v.data() + v_at, p.dim_v);
      const Real ds = rounded(w * (dp - delta + d_lse) * d_cap[x]);
      const Real w_rounded = rounded(w);
      for (std::int64_t d = 0; d < p.dim_v; ++d) dv[static_cast<std::size_t>(v_at + d)] += w_rounded * do_row[d];
      for (std::int64_t d = 0; d < p.dim_qk; ++d) {
        dq_row[static_cast<std::size_t>(d)] += ds * k[static_cast<std::size_t>(k_at + d)];
        dk[static_cast<std::size_t>(k_at + d)] += ds * q_row[d];
      }
      if (round) continue;
      const double size = static_cast<double>(w) * std::abs(p.scale) *
                          (terms_of(do_row, v.data() + v_at, p.dim_v) + delta_terms + std::abs(d_lse));
      const double share = static_cast<double>(w) * static_cast<double>(d_cap[x]);
      for (std::int64_t d = 0; d < p.dim_qk; ++d) {
        mean_key[static_cast<std::size_t>(d)] += share * static_cast<double>(k[static_cast<std::size_t>(k_at + d)]);
      }
      double& dk_noise = out.dk.row_noise[static_cast<std::size_t>(k_at / p.dim_qk)];
      dk_noise += square(share * delta_noise * q_norm);
      double& dk_rounding = out.dk.row_rounding[static_cast<std::size_t>(k_at / p.dim_qk)];
      dk_rounding += square(rounding * static_cast<double>(ds) * q_norm);
      dq_rounding += square(rounding * static_cast<double>(ds) * of_keys.norm[static_cast<std::size_t>(keys[x])]);
      ds_of_row += size;
      of_keys.ds[static_cast<std::size_t>(keys[x])] += size;
      of_keys.p[static_cast<std::size_t>(keys[x])] += w;
    }
    most.dq = std::max(most.dq, ds_of_row * largest_k);
    const auto row = static_cast<std::size_t>(out.dq.offset(s.q_batch, s.q_row + i, h) / p.dim_qk);
    out.dq.row_rounding[row] = std::sqrt(dq_rounding);
    out.dq.row_noise[row] = delta_noise * std::sqrt(dot(mean_key.data(), mean_key.data(), p.dim_qk));
    for (std::int64_t d = 0; d < p.dim_qk; ++d) {
      out.dq.at(s.q_batch, s.q_row + i, h, d) = rounded(scale * dq_row[static_cast<std::size_t>(d)]);
    }
  }

  Outputs run(int threads) {
    const AttentionProblem& p = in.problem;
    const std::int64_t tasks = p.batch * p.heads_kv;
    if (threads <= 0) threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
    threads = static_cast<int>(std::min<std::int64_t>(threads, tasks));
    std::atomic<std::int64_t> next{0};
    const auto work = [&] {
      for (std::int64_t t = next++; t < tasks; t = next++) one_key_head(t / p.heads_kv, t % p.heads_kv);
    };
    std::vector<std::thread> pool;
    for (int t = 1; t < threads; ++t) pool.emplace_back(work);
    work();
    for (std::thread& t : pool) t.join();

    for (std::size_t x = 0; x < dk.size(); ++x) out.dk.data[x] = rounded(static_cast<Real>(p.scale) * dk[x]);
    for (std::size_t x = 0; x < dv.size(); ++x) out.dv.data[x] = rounded(dv[x]);
    for (auto* squares : {&out.dk.row_noise, &out.dk.row_rounding}) {
      for (double& x : *squares) x = std::sqrt(x);
    }
    double of_weights = 0;
    for (const Terms& t : terms) {
      of_weights = std::max(of_weights, t.weight);
      out.lse.terms = std::max(out.lse.terms, t.lse);
      out.dq.terms = std::max(out.dq.terms, t.dq);
      out.dk.terms = std::max(out.dk.terms, t.dk);
      out.dv.terms = std::max(out.dv.terms, t.dv);
    }
    // An error in a score, which grows with the score, is a relative error of its weight. Scores of a row that are all the
    // same have the same error, and their weights none; but what goes through LSE has LSE's: partial results of decode, and
    // the backward.
    out.o.terms = largest_v * (1 + of_weights);
    for (HostTensor* t : {&out.dq, &out.dk, &out.dv}) t->terms *= 1 + out.lse.terms;
    return std::move(out);
  }
};

}  // namespace

bool is_visible(const AttentionProblem& p, std::int64_t i, std::int64_t j, std::int64_t len_q, std::int64_t len_k) {
  const std::int64_t position = p.alignment == Alignment::kBottomRight ? i + len_k - len_q : i;
  const std::int64_t ahead = j - position;  // how far key j lies to the right of the query
  if (j >= len_k) return false;
  if (p.causal && ahead > 0) return false;
  if (p.window_left >= 0 && -ahead > p.window_left) return false;
  if (p.window_right >= 0 && ahead > p.window_right) return false;
  if (p.chunk > 0) {
    std::int64_t first = 0;  // of the query's chunk
    while (first > position) first -= p.chunk;
    while (first + p.chunk <= position) first += p.chunk;
    if (j < first || j >= first + p.chunk) return false;
  }
  return true;
}

std::int64_t count_visible_pairs(const Inputs& in) {
  std::int64_t pairs = 0;
  for (std::int64_t b = 0; b < in.problem.batch; ++b) {
    const Sequence s = sequence_of(in, b);
    for (std::int64_t i = 0; i < s.len_q; ++i) {
      for (std::int64_t j = s.first_key; j < s.len_k; ++j) {
        pairs += is_visible(in.problem, i, j, s.len_q, s.len_k) ? 1 : 0;
      }
    }
  }
  return pairs;
}

bool is_refused(const Inputs& in, std::int64_t b) {
  const AttentionProblem& p = in.problem;
  if (p.op != AttentionOp::kDecode) return false;
  const auto at = static_cast<std::size_t>(b);
  const std::int64_t length = in.cache_seqlens.empty() ? p.seq_k : in.cache_seqlens[at];
  if (length < 0 || length + p.seq_new > p.seq_k) return true;
  if (p.rotary_dim > 0) {
    const std::int64_t position = in.rotary_seqlens.empty() ? length : in.rotary_seqlens[at];
    if (position < 0 || position + std::max(p.seq_new, p.seq_q) > p.rotary_rows) return true;
  }
  if (!in.cache_batch_idx.empty() && (in.cache_batch_idx[at] < 0 || in.cache_batch_idx[at] >= p.cache_rows)) {
    return true;
  }
  if (!in.leftpad_k.empty() && in.leftpad_k[at] < 0) return true;
  for (std::int64_t key = length; p.paged && key < length + p.seq_new; ++key) {
    const std::int32_t page = in.page_table[static_cast<std::size_t>(b * p.max_pages_per_seq + key / p.page_size)];
    if (page < 0 || page >= p.num_pages) return true;
  }
  return false;
}

double scale_of(const HostTensor& scale, std::int64_t b, std::int64_t head) {
  return scale.at(0, scale.shape[1] == 1 ? 0 : b, scale.shape[2] == 1 ? 0 : head, 0);
}

std::size_t key_scale_index(const HostTensor& scale, const HostTensor& cache, std::int64_t at) {
  const std::int64_t vector = at / cache.shape[3], heads = cache.shape[2], keys = cache.shape[1];
  const std::int64_t head = scale.shape[2] == 1 ? 0 : vector % heads;
  const std::int64_t key = scale.shape[3] == 1 ? 0 : vector / heads % keys;
  return static_cast<std::size_t>(scale.offset(0, vector / heads / keys, head) + key);
}

Inputs appended(const Inputs& in) {
  const AttentionProblem& p = in.problem;
  Inputs out = in;
  const std::int64_t half = p.rotary_dim / 2;
  const auto rotate = [&](double* row, std::int64_t position) {
    for (std::int64_t x = 0; x < half; ++x) {
      double& first = row[p.rotary_interleaved ? 2 * x : x];
      double& second = row[p.rotary_interleaved ? 2 * x + 1 : x + half];
      const double cos = in.rotary_cos.at(0, 0, position, x), sin = in.rotary_sin.at(0, 0, position, x);
      const double turned = verify::round_to(p.dtype, first * cos - second * sin);
      second = verify::round_to(p.dtype, first * sin + second * cos);
      first = turned;
    }
  };
  // Of a cache of e4m3.
  const auto quantise = [&](HostTensor& cache, HostTensor& e4m3, HostTensor& scales, const double* row,
                            std::int64_t dim, std::int64_t b, std::int64_t h) {
    constexpr double kLargest = 448, kBound = 60;
    const auto at = static_cast<std::size_t>(row - cache.data.data());
    double scale = has_key_scales(p) ? 0 : scale_of(scales, b, h);
    if (has_key_scales(p)) {
      double& kept = scales.data[key_scale_index(scales, cache, static_cast<std::int64_t>(at))];
      if (p.cache_scales == CacheScales::kPerToken) {
        double largest = 0;
        for (std::int64_t d = 0; d < dim; ++d) largest = std::max(largest, std::abs(row[d]));
        const double exponent = largest == 0 ? -kBound : std::ceil(std::log2(largest / kLargest));
        kept = std::exp2(std::clamp(exponent, -kBound, kBound));
      }
      scale = kept;
    }
    for (std::size_t n = at; n < at + static_cast<std::size_t>(dim); ++n) {
      e4m3.data[n] = verify::round_to_e4m3(verify::round_to(DType::kFloat32, cache.data[n] / scale));
      cache.data[n] = e4m3.data[n] * scale;
    }
  };
  const bool by_position = p.causal || p.window_left >= 0 || p.window_right >= 0 || p.chunk > 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    if (is_refused(in, b)) continue;
    const auto at = static_cast<std::size_t>(b);
    const Sequence s = sequence_of(in, b);
    const std::int64_t length = s.len_k - p.seq_new;
    const std::int64_t position = in.rotary_seqlens.empty() ? length : in.rotary_seqlens[at];
    for (std::int64_t i = 0; i < p.seq_q; ++i) {
      for (std::int64_t h = 0; h < p.heads_q; ++h) {
        rotate(out.q.data.data() + out.q.offset(b, i, h), position + (by_position ? i : 0));
      }
    }
    for (std::int64_t i = 0; i < p.seq_new; ++i) {
      for (std::int64_t h = 0; h < p.heads_kv; ++h) {
        double* k_row = out.k.data.data() + key_offset(in, in.k, s, length + i, h);
        double* v_row = out.v.data.data() + key_offset(in, in.v, s, length + i, h);
        std::copy_n(in.k_new.data.begin() + in.k_new.offset(b, i, h), p.dim_qk, k_row);
        std::copy_n(in.v_new.data.begin() + in.v_new.offset(b, i, h), p.dim_v, v_row);
        rotate(k_row, position + i);
        if (!p.fp8_cache) continue;
        quantise(out.k, out.k_e4m3, out.k_scale, k_row, p.dim_qk, b, h);
        quantise(out.v, out.v_e4m3, out.v_scale, v_row, p.dim_v, b, h);
      }
    }
  }
  return out;
}

namespace {

template <class Real>
Outputs computed(const Inputs& inputs, bool round, int threads) {
  const AttentionProblem& p = inputs.problem;
  Outputs out;
  if (p.seq_new > 0) {
    Inputs whole = appended(inputs);
    out = Attention<Real>(whole, round).run(threads);
    out.k = std::move(p.fp8_cache ? whole.k_e4m3 : whole.k);
    out.v = std::move(p.fp8_cache ? whole.v_e4m3 : whole.v);
    if (p.cache_scales == CacheScales::kPerToken) {
      out.k_scale = std::move(whole.k_scale);
      out.v_scale = std::move(whole.v_scale);
    }
  } else {
    out = Attention<Real>(inputs, round).run(threads);
  }
  for (std::int64_t b = 0; p.op == AttentionOp::kDecode && b < p.batch; ++b) {
    out.status.push_back(is_refused(inputs, b) ? 1 : 0);
  }
  return out;
}

}  // namespace

Outputs attention(const Inputs& inputs, int threads) { return computed<double>(inputs, false, threads); }

Outputs plain_attention(const Inputs& inputs, int threads) { return computed<float>(inputs, true, threads); }

}  // namespace tessera::oracle
