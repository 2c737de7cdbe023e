// Values for a case, by its seed (verify/random.h).
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "attention/quantize_fp8_config.h"
#include "verify/attention/cases.h"
#include "verify/parallel.h"
#include "verify/random.h"

namespace tessera::cases {
namespace {

using verify::HostTensor;
using verify::mixed;
using verify::RandomStream;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class F>
void fill(HostTensor& t, F value) {  // value(row along S, d, n)
  verify::over_range(t.size(), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t n = begin; n < end; ++n) {
      const std::int64_t d = n % t.shape[3];
      const std::int64_t s = n / (t.shape[3] * t.shape[2]) % t.shape[1];
      t.data[static_cast<std::size_t>(n)] = value(s, d, n);
    }
  });
}

// q and k such that scale * <q, k> is near +-size. Noise of one part in 128 keeps rows apart.
void fill_logits(const Case& c, HostTensor& q, HostTensor& k, double size, bool all_negative) {
  const AttentionProblem& p = c.problem;
  const double each = std::sqrt(size / (static_cast<double>(p.scale) * static_cast<double>(p.dim_qk)));
  const RandomStream noise_q(c.seed, 0), noise_k(c.seed, 1), sign(c.seed, 5);
  fill(q, [&](std::int64_t, std::int64_t, std::int64_t n) { return each * (1 + noise_q.normal(n) / 128); });
  fill(k, [&](std::int64_t s, std::int64_t, std::int64_t n) {
    const bool negative = all_negative || (sign.bits(s) & 1) != 0;
    return (negative ? -each : each) * (1 + noise_k.normal(n) / 128);
  });
}

void fill_q_and_k(const Case& c, HostTensor& q, HostTensor& k) {
  const RandomStream stream_q(c.seed, 0), stream_k(c.seed, 1);
  const std::int64_t dims = c.problem.dim_qk;
  switch (c.distribution) {
    case Distribution::kLogits120:
      return fill_logits(c, q, k, 120, false);
    case Distribution::kLogits1e4:
      return fill_logits(c, q, k, 1e4, false);
    case Distribution::kLogits1e10: {
      const double each = std::sqrt(1e10 / (static_cast<double>(c.problem.scale) * static_cast<double>(dims)));
      fill(q, [&](std::int64_t, std::int64_t, std::int64_t) { return each; });
      fill(k, [&](std::int64_t, std::int64_t, std::int64_t) { return each; });
      return;
    }
    case Distribution::kLogitsMinus120:
      return fill_logits(c, q, k, 120, true);
    case Distribution::kSteps:
    case Distribution::kSink: {
      // Every element of q is near 1, so a key's logit is its elements' common value times scale and dim.
      const double unit = 1 / (static_cast<double>(c.problem.scale) * static_cast<double>(dims));
      const auto logit = [&](std::int64_t s) {
        if (c.distribution == Distribution::kSink) return s == 0 ? 200.0 : 0.0;
        const std::int64_t steps = (c.problem.seq_k - 1 - s) / 64;
        return 30.0 * static_cast<double>(steps);
      };
      fill(q, [&](std::int64_t, std::int64_t, std::int64_t n) { return 1 + stream_q.normal(n) / 16; });
      fill(k, [&](std::int64_t s, std::int64_t, std::int64_t n) { return logit(s) * unit + stream_k.normal(n) / 4; });
      return;
    }
    case Distribution::kOneHot: {
      const double peak = std::sqrt(60 / static_cast<double>(c.problem.scale));
      fill(q, [&](std::int64_t s, std::int64_t d, std::int64_t n) {
        return (d == s * 7 % dims ? peak : 0) + stream_q.normal(n) / 64;
      });
      fill(k, [&](std::int64_t s, std::int64_t d, std::int64_t n) {
        return (d == s % dims ? peak : 0) + stream_k.normal(n) / 64;
      });
      return;
    }
    case Distribution::kConstant:
      fill(q, [&](std::int64_t, std::int64_t, std::int64_t n) { return stream_q.normal(n); });
      fill(k, [&](std::int64_t, std::int64_t d, std::int64_t) { return stream_k.normal(d); });
      return;
    case Distribution::kNormal:
    case Distribution::kHugeValues:
    case Distribution::kMeanValues:
      fill(q, [&](std::int64_t, std::int64_t, std::int64_t n) { return stream_q.normal(n); });
      fill(k, [&](std::int64_t, std::int64_t, std::int64_t n) { return stream_k.normal(n); });
      return;
  }
}

void blank_row(HostTensor& t, std::int64_t batch, std::int64_t row) {
  if (t.empty()) return;
  const auto first = t.data.begin() + t.offset(batch, row, 0);
  std::fill_n(first, t.shape[2] * t.shape[3], kNan);
}

std::vector<std::int32_t> cumulated(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> sums{0};
  for (std::int32_t n : lengths) sums.push_back(sums.back() + n);
  return sums;
}

// Keys that sequence b has, new ones included, as far as the cache holds them.
std::int64_t keys_of(const Case& c, std::int64_t b) {
  const AttentionProblem& p = c.problem;
  if (c.cache_lengths.empty()) return p.seq_k;
  return std::clamp<std::int64_t>(c.cache_lengths[static_cast<std::size_t>(b)] + p.seq_new, 0, p.seq_k);
}

// Pages are handed out in an order that is neither the cache's nor its reverse; entries behind the last page in use
// are left pointing at page 0, which they must not be read through.
void make_page_table(const Case& c, oracle::Inputs& in) {
  const AttentionProblem& p = c.problem;
  std::vector<std::int32_t> order(static_cast<std::size_t>(p.num_pages));
  for (std::size_t n = 0; n < order.size(); ++n) order[n] = static_cast<std::int32_t>(n);
  const RandomStream shuffle(c.seed, 6);
  for (std::size_t n = order.size(); n > 1; --n) {
    std::swap(order[n - 1], order[shuffle.bits(static_cast<std::int64_t>(n)) % n]);
  }
  in.page_table.assign(static_cast<std::size_t>(p.batch * p.max_pages_per_seq), 0);
  std::size_t next = 0;
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const std::int64_t length = keys_of(c, b);
    for (std::int64_t j = 0; j < length; ++j) {
      auto& entry = in.page_table[static_cast<std::size_t>(b * p.max_pages_per_seq + j / p.page_size)];
      if (j % p.page_size == 0) entry = order[next++];
    }
    if (b == c.bad_page) {
      const auto last = static_cast<std::size_t>(b * p.max_pages_per_seq + (length - 1) / p.page_size);
      in.page_table[last] = static_cast<std::int32_t>(p.num_pages);
    }
  }
}

// The cache is full of values here. Those of the new keys become k_new and v_new; only those that a sequence has before
// the append stay.
struct CacheRows {
  std::vector<std::int64_t> owners;  // each row's sequence
  std::vector<std::int64_t> in_use;  // rows that a sequence has, after the append
};
CacheRows take_new_keys(const Case& c, oracle::Inputs& in) {
  const AttentionProblem& p = c.problem;
  const std::int64_t rows = in.k.shape[1];
  CacheRows of_sequences{std::vector<std::int64_t>(static_cast<std::size_t>(in.k.shape[0] * rows), 0), {}};
  std::vector<bool> used(static_cast<std::size_t>(in.k.shape[0] * rows), false);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    if (c.refused && oracle::is_refused(in, b)) continue;
    const auto at = static_cast<std::size_t>(b);
    const std::int64_t length = keys_of(c, b), first_new = length - p.seq_new;
    for (std::int64_t j = c.leftpad.empty() ? 0 : c.leftpad[at]; j < length; ++j) {
      std::int64_t batch = c.cache_batch_idx.empty() ? b : c.cache_batch_idx[at];
      if (p.paged) batch = in.page_table[static_cast<std::size_t>(b * p.max_pages_per_seq + j / p.page_size)];
      const std::int64_t row = p.paged ? j % p.page_size : j;
      used[static_cast<std::size_t>(batch * rows + row)] = j < first_new;
      of_sequences.owners[static_cast<std::size_t>(batch * rows + row)] = b;
      of_sequences.in_use.push_back(batch * rows + row);
      if (j < first_new || in.k.empty()) continue;
      for (const auto& [from, to] : {std::pair{&in.k, &in.k_new}, {&in.v, &in.v_new}}) {
        std::copy_n(from->data.begin() + from->offset(batch, row, 0), from->shape[2] * from->shape[3],
                    to->data.begin() + to->offset(b, j - first_new, 0));
      }
    }
  }
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(used.size()); ++row) {
    if (used[static_cast<std::size_t>(row)]) continue;
    blank_row(in.k, row / rows, row % rows);
    blank_row(in.v, row / rows, row % rows);
  }
  return of_sequences;
}

// Multiples of a 512th of the largest value, which the type has already.
void coarsen(HostTensor& t) {
  double largest = 0;
  for (const double x : t.data) largest = std::max(largest, std::abs(x));
  if (largest == 0) return;
  const double unit = std::ldexp(1.0, std::ilogb(largest) + 1 - 9);
  for (double& x : t.data) x = std::nearbyint(x / unit) * unit;
}

// Angles as usual, to 7 bits.
void make_rotary(const Case& c, oracle::Inputs& in) {
  const AttentionProblem& p = c.problem;
  const std::int64_t half = p.rotary_dim / 2;
  in.rotary_cos = in.rotary_sin = HostTensor(1, 1, p.rotary_rows, half);
  const auto to_7_bits = [](double x) { return std::nearbyint(x * 128) / 128; };
  for (std::int64_t position = 0; position < p.rotary_rows; ++position) {
    for (std::int64_t x = 0; x < half; ++x) {
      const double angle =
          static_cast<double>(position) * std::pow(1e4, -static_cast<double>(x) / static_cast<double>(half));
      in.rotary_cos.at(0, 0, position, x) = to_7_bits(std::cos(angle));
      in.rotary_sin.at(0, 0, position, x) = to_7_bits(std::sin(angle));
    }
  }
  coarsen(in.q);
  coarsen(in.k_new);
}

// Rows become 1, 4 or 16 times as large in turn, `rows` at a time.
void make_uneven(HostTensor& t, int rows) {
  for (std::size_t n = 0; n < t.data.size(); ++n) {
    const auto row = static_cast<std::int64_t>(n) / (t.shape[2] * t.shape[3]) % t.shape[1];
    t.data[n] = std::ldexp(t.data[n], static_cast<int>(2 * (row / rows % 3)));
  }
}

// What e4m3 holds of t, and the scales: the least powers of two that bring a block's largest value into e4m3's range. t
// becomes the product. Sequences have rows from firsts[b] to firsts[b + 1]; empty: a batch of their own each.
void quantise(const Case& c, HostTensor& t, std::int64_t seq, std::int64_t block, int exponent,
              const std::vector<std::int32_t>& firsts, HostTensor& e4m3, HostTensor& scale) {
  constexpr double kLargest = 448, kTimed = 1.0 / 64;
  const std::int64_t batch = c.problem.batch, heads = t.shape[2], dim = t.shape[3];
  const bool shared = !c.scales_per_head;
  e4m3 = t;
  scale = HostTensor(1, shared ? 1 : batch, shared ? 1 : heads, block > 0 ? (seq + block - 1) / block : 1);
  const auto scale_at = [&](std::int64_t b, std::int64_t h, std::int64_t i) -> double& {
    return scale.at(0, shared ? 0 : b, shared ? 0 : h, block > 0 ? i / block : 0);
  };
  const auto each_row = [&](const auto& visit) {
    for (std::int64_t b = 0; b < batch; ++b) {
      const auto at = static_cast<std::size_t>(b);
      const std::int64_t first = firsts.empty() ? 0 : firsts[at];
      const std::int64_t rows = firsts.empty() ? seq : firsts[at + 1] - first;
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t h = 0; h < heads; ++h)
          visit(t.offset(firsts.empty() ? b : 0, first + i, h), scale_at(b, h, i));
      }
    }
  };
  if (t.empty()) {
    std::fill(scale.data.begin(), scale.data.end(), kTimed);
    return;
  }
  each_row([&](std::int64_t from, double& of) {
    for (std::int64_t d = 0; d < dim; ++d) of = std::max(of, std::abs(t.data[static_cast<std::size_t>(from + d)]));
  });
  for (double& x : scale.data) x = x == 0 ? 1 : std::ldexp(1.0, static_cast<int>(std::ceil(std::log2(x / kLargest))));
  each_row([&](std::int64_t from, const double& of) {
    for (auto n = static_cast<std::size_t>(from); n < static_cast<std::size_t>(from + dim); ++n) {
      e4m3.data[n] = verify::round_to_e4m3(t.data[n] / of);
      t.data[n] = e4m3.data[n] * std::ldexp(of, exponent);
    }
  });
  for (double& x : scale.data) x = std::ldexp(x, exponent);
}

// The same for a cache, and for the new keys' scales: those of head h and sequence b are a little larger than the least that
// would do, each by a factor of its own. A row of the cache is of the sequence `owners` has for it.
void quantise_cache(const Case& c, const std::vector<std::int64_t>& owners, HostTensor& t, const HostTensor& added,
                    HostTensor& e4m3, HostTensor& scale) {
  constexpr double kLargest = 448, kTimed = 1.0 / 64;
  const std::int64_t heads = t.shape[2], dim = t.shape[3];
  scale = HostTensor(1, c.scales_per_batch ? c.problem.batch : 1, c.scales_per_head ? heads : 1, 1);
  double largest = 0;
  for (const HostTensor* of : std::initializer_list<const HostTensor*>{&t, &added}) {
    for (const double x : of->data) largest = std::max(largest, std::isnan(x) ? 0 : std::abs(x));
  }
  const double least = t.empty() || largest == 0 ? kTimed : largest / kLargest;
  for (std::size_t n = 0; n < scale.data.size(); ++n) {
    scale.data[n] = verify::round_to(DType::kFloat32, least * (1 + static_cast<double>(n % 7) / 8));
  }
  e4m3 = t;
  const auto row_size = static_cast<std::size_t>(heads * dim);
  for (std::size_t n = 0; n < t.data.size(); ++n) {
    const auto head = static_cast<std::int64_t>(n % row_size / static_cast<std::size_t>(dim));
    const double of = oracle::scale_of(scale, owners[n / row_size], head);
    e4m3.data[n] = verify::round_to_e4m3(t.data[n] / of);
    t.data[n] = e4m3.data[n] * of;
  }
}

// The same with scales beside the keys: each a little larger than the least that would do for its key or, of all keys, its
// page. NaN for those that must not be read: of keys that are not in use or not there yet, and of pages without keys.
void quantise_with_key_scales(const Case& c, const std::vector<std::int64_t>& rows_in_use, HostTensor& t,
                              const HostTensor& added, HostTensor& e4m3, HostTensor& scale) {
  constexpr double kLargest = 448, kTimed = 1.0 / 64;
  const bool per_page = c.problem.cache_scales == CacheScales::kPerPage;
  scale = HostTensor(1, t.shape[0], c.scales_per_head ? t.shape[2] : 1, per_page ? 1 : t.shape[1]);
  std::fill(scale.data.begin(), scale.data.end(), t.empty() ? kTimed : kNan);
  e4m3 = t;
  if (t.empty()) return;
  double most = 0;
  for (const HostTensor* of : std::initializer_list<const HostTensor*>{&t, &added}) {
    for (const double x : of->data) most = std::max(most, std::isnan(x) ? 0 : std::abs(x));
  }
  const std::int64_t dim = t.shape[3];
  for (const std::int64_t row : rows_in_use) {
    for (std::int64_t h = 0; h < t.shape[2]; ++h) {
      const std::int64_t at = t.offset(row / t.shape[1], row % t.shape[1], h);
      double largest = per_page ? most : 0;
      for (std::int64_t d = 0; d < dim && !per_page; ++d) {
        largest = std::max(largest, std::abs(t.data[static_cast<std::size_t>(at + d)]));
      }
      const std::size_t n = oracle::key_scale_index(scale, t, at);
      // A page's is also that of keys that are to be appended to it.
      if (!per_page && std::isnan(t.data[static_cast<std::size_t>(at)])) continue;
      const double least = largest == 0 ? kTimed : largest / kLargest;
      scale.data[n] = verify::round_to(DType::kFloat32, least * (1 + static_cast<double>(n % 7) / 8));
    }
  }
  for (std::size_t n = 0; n < t.data.size(); ++n) {
    const double of = scale.data[oracle::key_scale_index(scale, t, static_cast<std::int64_t>(n))];
    e4m3.data[n] = verify::round_to_e4m3(t.data[n] / of);
    t.data[n] = e4m3.data[n] * of;
  }
}

// Each row times a block-diagonal Hadamard matrix, after some signs were changed; then rounded to the type.
void rotate(const Case& c, HostTensor& t) {
  const std::int64_t dim = t.shape[3];
  const auto block = static_cast<std::size_t>(rotation_block(static_cast<int>(dim)));
  std::vector<double> row(block);
  for (std::size_t at = 0; at < t.data.size(); at += block) {
    for (std::size_t j = 0; j < block; ++j) {
      double sum = 0;
      for (std::size_t i = 0; i < block; ++i) {
        const int column = static_cast<int>((at + i) % static_cast<std::size_t>(dim));
        const bool negative = changes_sign(column) != (std::popcount(i & j) % 2 != 0);
        sum += negative ? -t.data[at + i] : t.data[at + i];
      }
      row[j] = sum / std::sqrt(static_cast<double>(block));
    }
    std::copy(row.begin(), row.end(), t.data.begin() + static_cast<std::ptrdiff_t>(at));
  }
  verify::round_all(c.problem.dtype, t);
}

// Columns for what rounding took from the largest key channels of each head: k has the rest of each and then the
// channel once more, q the channel and then its rest.
void add_residuals(const Case& c, oracle::Inputs& in, const HostTensor& q_scale, const HostTensor& k_scale) {
  const AttentionProblem& p = c.problem;
  const std::int64_t dim = p.dim_qk;
  const oracle::Inputs old = in;
  in.problem.dim_qk = dim + kResidualColumns;
  in.q = HostTensor(old.q.shape[0], old.q.shape[1], p.heads_q, in.problem.dim_qk);
  in.k = HostTensor(old.k.shape[0], old.k.shape[1], p.heads_kv, in.problem.dim_qk);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    const auto at = static_cast<std::size_t>(b);
    const std::int64_t batch = p.varlen ? 0 : b;
    const auto rows_of = [&](const std::vector<std::int32_t>& firsts, std::int64_t seq, const auto& visit) {
      const std::int64_t first = p.varlen ? firsts[at] : 0, end = p.varlen ? firsts[at + 1] : seq;
      for (std::int64_t row = first; row < end; ++row) visit(row);
    };
    for (std::int64_t key_head = 0; key_head < p.heads_kv; ++key_head) {
      std::vector<double> largest(static_cast<std::size_t>(dim), 0);
      rows_of(in.cu_seqlens_k, p.seq_k, [&](std::int64_t row) {
        for (std::int64_t d = 0; d < dim; ++d) {
          double& most = largest[static_cast<std::size_t>(d)];
          most = std::max(most, std::abs(in.k_given.at(batch, row, key_head, d)));
        }
      });
      std::vector<std::int64_t> channels;
      while (channels.size() < kResidualChannels) {
        const auto most = std::max_element(largest.begin(), largest.end());
        channels.push_back(most - largest.begin());
        *most = -1;
      }
      const auto fill_row = [&](const HostTensor& given, const HostTensor& rounded, HostTensor& to, std::int64_t row,
                                std::int64_t h, double scale, bool rest_first) {
        for (std::int64_t d = 0; d < dim; ++d) to.at(batch, row, h, d) = rounded.at(batch, row, h, d);
        for (std::int64_t n = 0; n < kResidualColumns; ++n) {
          const std::int64_t channel = channels[static_cast<std::size_t>(n % kResidualChannels)];
          const double whole = rounded.at(batch, row, h, channel);
          const double rest = verify::round_to_e4m3((given.at(batch, row, h, channel) - whole) / scale) * scale;
          to.at(batch, row, h, dim + n) = (n < kResidualChannels) == rest_first ? rest : whole;
        }
      };
      rows_of(in.cu_seqlens_k, p.seq_k, [&](std::int64_t row) {
        fill_row(in.k_given, old.k, in.k, row, key_head, k_scale.at(0, b, key_head, 0), true);
      });
      const std::int64_t group = p.heads_q / p.heads_kv;
      for (std::int64_t h = key_head * group; h < (key_head + 1) * group; ++h) {
        rows_of(in.cu_seqlens_q, p.seq_q,
                [&](std::int64_t row) { fill_row(in.q_given, old.q, in.q, row, h, q_scale.at(0, b, h, 0), false); });
      }
    }
  }
}

HostTensor tensor_of(bool with_values, std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
  HostTensor t;
  if (with_values) return {a, b, c, d};
  t.shape = {a, b, c, d};
  return t;
}

oracle::Inputs inputs_of(const Case& c, bool with_values) {
  const AttentionProblem& p = c.problem;
  oracle::Inputs in;
  in.problem = p;
  const std::int64_t batch_q = p.varlen ? 1 : p.batch;
  const std::int64_t rows_q = p.varlen ? p.total_q : p.seq_q;
  const bool packed_k = p.varlen && p.op != AttentionOp::kDecode;
  const std::int64_t batch_k = packed_k ? 1 : p.paged ? p.num_pages : p.cache_rows > 0 ? p.cache_rows : p.batch;
  const std::int64_t rows_k = packed_k ? p.total_k : p.paged ? p.page_size : p.seq_k;
  in.q = tensor_of(with_values, batch_q, rows_q, p.heads_q, p.dim_qk);
  in.k = tensor_of(with_values, batch_k, rows_k, p.heads_kv, p.dim_qk);
  in.v = tensor_of(with_values, batch_k, rows_k, p.heads_kv, p.dim_v);
  fill_q_and_k(c, in.q, in.k);

  double size_v = 1;
  if (c.distribution == Distribution::kHugeValues) size_v = p.dtype == DType::kFloat16 ? 1.5e4 : 1e15;
  const double mean_v = c.distribution == Distribution::kMeanValues ? 2 : 0;
  const RandomStream stream_v(c.seed, 2);
  fill(in.v, [&](std::int64_t, std::int64_t, std::int64_t n) { return mean_v + size_v * stream_v.normal(n); });
  if (c.value_exponent != 0) {
    const bool one_hot = c.distribution == Distribution::kOneHot;
    for (std::size_t n = 0; n < in.v.data.size(); ++n) {
      const auto row = static_cast<std::int64_t>(n) / (in.v.shape[2] * in.v.shape[3]) % in.v.shape[1];
      if (one_hot ? row % 128 != 0 : row >= 256) in.v.data[n] = std::ldexp(in.v.data[n], c.value_exponent);
    }
  }
  for (double& x : in.q.data) x *= c.query_size;
  for (HostTensor* t : {&in.q, &in.k, &in.v}) verify::round_all(p.dtype, *t);

  if (p.op == AttentionOp::kBackward) {
    const RandomStream stream_do(c.seed, 3), stream_dlse(c.seed, 4);
    in.d_o = tensor_of(with_values, batch_q, rows_q, p.heads_q, p.dim_v);
    fill(in.d_o, [&](std::int64_t, std::int64_t, std::int64_t n) { return stream_do.normal(n); });
    verify::round_all(p.dtype, in.d_o);
    if (p.with_dlse) {
      in.d_lse = HostTensor(batch_q, p.heads_q, rows_q, 1);
      fill(in.d_lse, [&](std::int64_t, std::int64_t, std::int64_t n) { return stream_dlse.normal(n); });
      verify::round_all(DType::kFloat32, in.d_lse);
    }
  }
  if (p.alibi) {
    const std::int64_t rows = c.slopes_per_batch ? p.batch : 1;
    for (std::int64_t n = 0; n < rows * p.heads_q; ++n) {
      const std::int64_t h = n % p.heads_q;  // powers of two, as usual for ALiBi; a little steeper for later batches
      const std::int64_t batch = n / p.heads_q;
      in.alibi_slopes.push_back(std::ldexp(1.0 + static_cast<double>(batch) / 4, -1 - static_cast<int>(h % 8)));
    }
  }
  if (p.varlen) {
    in.cu_seqlens_q = cumulated(c.lengths_q);
    if (packed_k) in.cu_seqlens_k = cumulated(c.lengths_k);
    for (std::int64_t row = in.cu_seqlens_q.back(); row < p.total_q; ++row) {
      blank_row(in.q, 0, row);
      if (!in.d_o.empty()) blank_row(in.d_o, 0, row);
      for (std::int64_t h = 0; h < p.heads_q && !in.d_lse.empty(); ++h) in.d_lse.at(0, h, row) = kNan;
    }
    for (std::int64_t row = packed_k ? in.cu_seqlens_k.back() : p.total_k; row < p.total_k; ++row) {
      blank_row(in.k, 0, row);
      blank_row(in.v, 0, row);
    }
  }
  if (c.uneven > 0) {
    make_uneven(in.k, 64);
    make_uneven(in.v, c.uneven);
  }
  if (p.fp8) {
    quantise(c, in.q, p.seq_q, p.q_scale_block, c.scale_exponent, in.cu_seqlens_q, in.q_e4m3, in.q_scale);
    quantise(c, in.k, p.seq_k, p.k_scale_block, -c.scale_exponent, in.cu_seqlens_k, in.k_e4m3, in.k_scale);
    quantise(c, in.v, p.seq_k, p.v_scale_block, 0, in.cu_seqlens_k, in.v_e4m3, in.v_scale);
  }
  if (p.rounds_to_fp8) {
    in.q_given = in.q;
    in.k_given = in.k;
    in.v_given = in.v;
    if (p.rotates) rotate(c, in.q), rotate(c, in.k);
    HostTensor e4m3, q_scale, k_scale, v_scale;
    quantise(c, in.q, p.seq_q, 0, 0, in.cu_seqlens_q, e4m3, q_scale);
    quantise(c, in.k, p.seq_k, 0, 0, in.cu_seqlens_k, e4m3, k_scale);
    quantise(c, in.v, p.seq_k, 0, 0, in.cu_seqlens_k, e4m3, v_scale);
    if (p.residuals && with_values) add_residuals(c, in, q_scale, k_scale);
  }
  if (p.op != AttentionOp::kDecode) return in;
  in.cache_seqlens = c.cache_lengths;
  in.cache_batch_idx = c.cache_batch_idx;
  in.leftpad_k = c.leftpad;
  in.rotary_seqlens = c.rotary_lengths;
  if (p.paged) make_page_table(c, in);
  if (p.seq_new > 0) {
    in.k_new = tensor_of(with_values, p.batch, p.seq_new, p.heads_kv, p.dim_qk);
    in.v_new = tensor_of(with_values, p.batch, p.seq_new, p.heads_kv, p.dim_v);
  }
  const CacheRows of_sequences = take_new_keys(c, in);
  if (p.rotary_dim > 0) make_rotary(c, in);
  if (has_key_scales(p)) {
    quantise_with_key_scales(c, of_sequences.in_use, in.k, in.k_new, in.k_e4m3, in.k_scale);
    quantise_with_key_scales(c, of_sequences.in_use, in.v, in.v_new, in.v_e4m3, in.v_scale);
  } else if (p.fp8_cache) {
    quantise_cache(c, of_sequences.owners, in.k, in.k_new, in.k_e4m3, in.k_scale);
    quantise_cache(c, of_sequences.owners, in.v, in.v_new, in.v_e4m3, in.v_scale);
  }
  return in;
}

}  // namespace

oracle::Inputs make_inputs(const Case& c) { return inputs_of(c, true); }
oracle::Inputs make_shapes(const Case& c) { return inputs_of(c, false); }

}  // namespace tessera::cases
