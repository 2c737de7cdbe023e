#include "verify/attention/oracle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "verify/attention/sampled.h"
#include "verify/judge.h"

namespace tessera::oracle {
namespace {

using verify::from_bits16;
using verify::judge;
using verify::round_all;
using verify::round_to;
using verify::to_bits16;
using verify::Verdict;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Values in [-1, 1), different for every tensor and the same on every machine.
void fill(HostTensor& t, std::uint64_t seed) {
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ULL + 1;
  for (double& x : t.data) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    x = static_cast<double>(state >> 40) / static_cast<double>(1 << 23) - 1.0;
  }
}

Inputs make(AttentionProblem p, std::uint64_t seed = 1) {
  if (p.scale == 0) p.scale = 1.0F / std::sqrt(static_cast<float>(p.dim_qk));
  Inputs in;
  in.problem = p;
  const std::int64_t b = p.varlen ? 1 : p.batch;
  in.q = HostTensor(b, p.varlen ? p.total_q : p.seq_q, p.heads_q, p.dim_qk);
  in.k = HostTensor(b, p.varlen ? p.total_k : p.seq_k, p.heads_kv, p.dim_qk);
  in.v = HostTensor(b, p.varlen ? p.total_k : p.seq_k, p.heads_kv, p.dim_v);
  in.d_o = HostTensor(b, in.q.shape[1], p.heads_q, p.dim_v);
  fill(in.q, seed);
  fill(in.k, seed + 1);
  fill(in.v, seed + 2);
  fill(in.d_o, seed + 3);
  if (p.with_dlse) {
    in.d_lse = HostTensor(b, p.heads_q, in.q.shape[1], 1);
    fill(in.d_lse, seed + 4);
  }
  if (p.alibi) {
    for (std::int64_t h = 0; h < p.heads_q; ++h) in.alibi_slopes.push_back(0.25 / static_cast<double>(h + 1));
  }
  return in;
}

AttentionProblem shape(std::int64_t b, std::int64_t sq, std::int64_t sk, std::int64_t hq, std::int64_t hkv,
                       std::int64_t dqk, std::int64_t dv) {
  AttentionProblem p;
  p.batch = b;
  p.seq_q = sq;
  p.seq_k = sk;
  p.heads_q = hq;
  p.heads_kv = hkv;
  p.dim_qk = dqk;
  p.dim_v = dv;
  return p;
}

// One line per query, one character per key.
std::string drawn(const AttentionProblem& p) {
  std::string text;
  for (std::int64_t i = 0; i < p.seq_q; ++i) {
    for (std::int64_t j = 0; j < p.seq_k; ++j) text += is_visible(p, i, j, p.seq_q, p.seq_k) ? 'x' : '.';
    text += '|';
  }
  return text;
}

TEST(Mask, causal_top_left_starts_at_the_first_key) {
  AttentionProblem p = shape(1, 3, 5, 1, 1, 1, 1);
  p.causal = true;
  EXPECT_EQ(drawn(p), "x....|xx...|xxx..|");
}

TEST(Mask, causal_bottom_right_ends_at_the_last_key) {
  AttentionProblem p = shape(1, 3, 5, 1, 1, 1, 1);
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  EXPECT_EQ(drawn(p), "xxx..|xxxx.|xxxxx|");
  p = shape(1, 5, 3, 1, 1, 1, 1);
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  EXPECT_EQ(drawn(p), "...|...|x..|xx.|xxx|");
}

TEST(Mask, window_is_inclusive_and_does_not_count_the_query_itself) {
  AttentionProblem p = shape(1, 4, 5, 1, 1, 1, 1);
  p.window_left = 1;
  p.window_right = 0;
  EXPECT_EQ(drawn(p), "x....|xx...|.xx..|..xx.|");
  p.window_right = 2;
  EXPECT_EQ(drawn(p), "xxx..|xxxx.|.xxxx|..xxx|");
  p.window_left = -1;
  p.window_right = 1;
  EXPECT_EQ(drawn(p), "xx...|xxx..|xxxx.|xxxxx|");
}

TEST(Mask, window_follows_the_alignment_and_causal_cuts_it) {
  AttentionProblem p = shape(1, 3, 5, 1, 1, 1, 1);
  p.alignment = Alignment::kBottomRight;
  p.window_left = 1;
  p.window_right = 1;
  EXPECT_EQ(drawn(p), ".xxx.|..xxx|...xx|");
  p.causal = true;
  EXPECT_EQ(drawn(p), ".xx..|..xx.|...xx|");
}

TEST(Mask, window_of_zero_sees_only_its_own_key) {
  AttentionProblem p = shape(1, 3, 3, 1, 1, 1, 1);
  p.window_left = 0;
  p.window_right = 0;
  EXPECT_EQ(drawn(p), "x..|.x.|..x|");
}

TEST(Forward, two_keys_give_the_sigmoid_of_their_difference) {
  AttentionProblem p = shape(1, 1, 2, 1, 1, 1, 1);
  p.scale = 2;
  Inputs in = make(p);
  in.q.data = {1};
  in.k.data = {0, 0.5};  // scores 0 and 1
  in.v.data = {10, 20};
  const Outputs out = attention(in);
  const double e = std::exp(1.0);
  EXPECT_NEAR(out.o.data[0], (10 + 20 * e) / (1 + e), 1e-13);
  EXPECT_NEAR(out.lse.data[0], std::log(1 + e), 1e-15);
}

TEST(Forward, softcap_comes_before_alibi) {
  AttentionProblem p = shape(1, 1, 2, 1, 1, 1, 1);
  p.scale = 1;
  p.softcap = 2;
  p.alibi = true;
  p.alignment = Alignment::kBottomRight;  // the query stands at key 1
  Inputs in = make(p);
  in.alibi_slopes = {0.5};
  in.q.data = {1};
  in.k.data = {3, -1};
  in.v.data = {1, 0};
  const double s0 = 2 * std::tanh(1.5) - 0.5;
  const double s1 = 2 * std::tanh(-0.5);
  const Outputs out = attention(in);
  EXPECT_NEAR(out.o.data[0], 1 / (1 + std::exp(s1 - s0)), 1e-14);
  EXPECT_NEAR(out.lse.data[0], std::log(std::exp(s0) + std::exp(s1)), 1e-14);
}

TEST(Forward, heads_of_a_group_share_their_key_head) {
  Inputs in = make(shape(2, 3, 4, 4, 2, 3, 2));
  const Outputs grouped = attention(in);
  // The same with every key head written out twice.
  AttentionProblem p = in.problem;
  p.heads_kv = 4;
  Inputs wide = make(p);
  wide.q = in.q;
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t j = 0; j < 4; ++j) {
      for (std::int64_t h = 0; h < 4; ++h) {
        for (std::int64_t d = 0; d < 3; ++d) wide.k.at(b, j, h, d) = in.k.at(b, j, h / 2, d);
        for (std::int64_t d = 0; d < 2; ++d) wide.v.at(b, j, h, d) = in.v.at(b, j, h / 2, d);
      }
    }
  }
  EXPECT_EQ(attention(wide).o.data, grouped.o.data);
}

TEST(Forward, masked_rows_give_zero_and_minus_inf) {
  AttentionProblem p = shape(1, 4, 2, 1, 1, 2, 2);
  p.op = AttentionOp::kBackward;
  p.causal = true;
  p.alignment = Alignment::kBottomRight;  // queries 0 and 1 see nothing
  const Outputs out = attention(make(p));
  for (std::int64_t i = 0; i < 2; ++i) {
    EXPECT_EQ(out.lse.at(0, 0, i), -kInf);
    for (std::int64_t d = 0; d < 2; ++d) {
      EXPECT_EQ(out.o.at(0, i, 0, d), 0);
      EXPECT_EQ(out.dq.at(0, i, 0, d), 0);
    }
  }
  EXPECT_TRUE(std::isfinite(out.lse.at(0, 0, 2)));
}

TEST(Forward, packed_sequences_equal_separate_ones_and_empty_ones_leave_no_trace) {
  AttentionProblem p = shape(4, 5, 4, 2, 1, 3, 2);
  p.op = AttentionOp::kBackward;
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  p.varlen = true;
  p.total_q = 10;
  p.total_k = 7;
  Inputs in = make(p);
  in.cu_seqlens_q = {0, 5, 5, 7, 10};
  in.cu_seqlens_k = {0, 3, 6, 6, 7};  // lengths (5, 3), (0, 3), (2, 0), (3, 1)
  const Outputs packed = attention(in);
  for (std::size_t b = 0; b < 4; ++b) {
    AttentionProblem one = p;
    one.varlen = false;
    one.batch = 1;
    one.seq_q = in.cu_seqlens_q[b + 1] - in.cu_seqlens_q[b];
    one.seq_k = in.cu_seqlens_k[b + 1] - in.cu_seqlens_k[b];
    Inputs alone = make(one);
    const auto slice = [](const HostTensor& from, std::int64_t row, HostTensor& to) {
      std::copy_n(from.data.begin() + from.offset(0, row, 0), to.size(), to.data.begin());
    };
    slice(in.q, in.cu_seqlens_q[b], alone.q);
    slice(in.d_o, in.cu_seqlens_q[b], alone.d_o);
    slice(in.k, in.cu_seqlens_k[b], alone.k);
    slice(in.v, in.cu_seqlens_k[b], alone.v);
    const Outputs expected = attention(alone);
    HostTensor o = expected.o, dk = expected.dk;
    slice(packed.o, in.cu_seqlens_q[b], o);
    slice(packed.dk, in.cu_seqlens_k[b], dk);
    EXPECT_EQ(o.data, expected.o.data) << "sequence " << b;
    EXPECT_EQ(dk.data, expected.dk.data) << "sequence " << b;
  }
  EXPECT_EQ(packed.lse.at(0, 0, 5), -kInf);  // sequence 2 has queries and no keys
}

TEST(Decode, paged_cache_equals_the_contiguous_one_and_unused_pages_are_not_read) {
  AttentionProblem p = shape(2, 1, 8, 2, 1, 3, 3);
  p.op = AttentionOp::kDecode;
  p.alignment = Alignment::kBottomRight;
  p.causal = true;
  Inputs flat = make(p);
  flat.cache_seqlens = {5, 8};
  Inputs paged = flat;
  paged.problem.paged = true;
  paged.problem.page_size = 4;
  paged.problem.num_pages = 5;
  paged.problem.max_pages_per_seq = 2;
  paged.page_table = {3, 0, 4, 1};
  paged.k = HostTensor(5, 4, 1, 3);
  paged.v = HostTensor(5, 4, 1, 3);
  for (double& x : paged.k.data) x = kNan;
  for (double& x : paged.v.data) x = kNan;
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t j = 0; j < flat.cache_seqlens[static_cast<std::size_t>(b)]; ++j) {
      for (std::int64_t d = 0; d < 3; ++d) {
        const std::int64_t page = paged.page_table[static_cast<std::size_t>(b * 2 + j / 4)];
        paged.k.at(page, j % 4, 0, d) = flat.k.at(b, j, 0, d);
        paged.v.at(page, j % 4, 0, d) = flat.v.at(b, j, 0, d);
      }
    }
  }
  EXPECT_EQ(attention(paged).o.data, attention(flat).o.data);
  EXPECT_EQ(attention(paged).lse.data, attention(flat).lse.data);
}

// One query of one head against keys in a cache of 4, whose scores are small integers.
Inputs cache_of_4() {
  AttentionProblem p = shape(1, 1, 4, 1, 1, 2, 1);
  p.op = AttentionOp::kDecode;
  p.alignment = Alignment::kBottomRight;
  p.scale = 1;
  p.cache_rows = 1;
  Inputs in = make(p);
  in.q.data = {1, 0};
  in.k.data = {1, 5, 2, 5, 3, 5, kNan, kNan};
  in.v.data = {10, 20, 30, kNan};
  in.cache_seqlens = {3};
  return in;
}

double softmax_mean(const std::vector<std::pair<double, double>>& scores_and_values) {
  double sum = 0, weights = 0;
  for (const auto& [score, value] : scores_and_values) {
    sum += std::exp(score) * value;
    weights += std::exp(score);
  }
  return sum / weights;
}

TEST(Decode, new_keys_are_rotated_appended_and_seen) {
  Inputs in = cache_of_4();
  in.problem.seq_new = 1;
  in.problem.rotary_dim = 2;
  in.problem.rotary_rows = 4;
  in.k_new = HostTensor(1, 1, 1, 2);
  in.k_new.data = {2, 1};
  in.v_new = HostTensor(1, 1, 1, 1);
  in.v_new.data = {40};
  in.rotary_cos = in.rotary_sin = HostTensor(1, 1, 4, 1);
  in.rotary_cos.data = {kNan, kNan, kNan, 0.5};  // the position is 3
  in.rotary_sin.data = {kNan, kNan, kNan, 2};
  const Outputs out = attention(in);
  // q becomes (0.5, 2), k_new (2 * 0.5 - 1 * 2, 2 * 2 + 1 * 0.5) = (-1, 4.5).
  EXPECT_EQ(out.k.data, (std::vector<double>{1, 5, 2, 5, 3, 5, -1, 4.5}));
  EXPECT_EQ(out.v.data, (std::vector<double>{10, 20, 30, 40}));
  EXPECT_EQ(out.status, std::vector<std::int32_t>{0});
  EXPECT_NEAR(out.o.data[0], softmax_mean({{10.5, 10}, {11, 20}, {11.5, 30}, {8.5, 40}}), 1e-13);
}

TEST(Decode, rotary_pairs_are_halves_or_neighbours_and_the_rest_stays) {
  AttentionProblem p = shape(1, 2, 2, 1, 1, 5, 1);
  p.op = AttentionOp::kDecode;
  p.alignment = Alignment::kBottomRight;
  p.cache_rows = 1;
  p.seq_new = 2;
  p.rotary_dim = 4;
  p.rotary_rows = 6;
  Inputs in = make(p);
  in.cache_seqlens = {0};
  in.rotary_seqlens = {3};
  in.k_new = HostTensor(1, 2, 1, 5);
  in.k_new.data = {1, 2, 3, 4, 5, 1, 2, 3, 4, 5};
  in.v_new = HostTensor(1, 2, 1, 1);
  in.q = in.k_new;
  in.rotary_cos = in.rotary_sin = HostTensor(1, 1, 6, 2);
  in.rotary_sin.data = {9, 9, 9, 9, 9, 9, 1, 1, 0, 0, 9, 9};  // a quarter turn at 3, none at 4
  in.rotary_cos.data = {9, 9, 9, 9, 9, 9, 0, 0, 1, 1, 9, 9};
  EXPECT_EQ(appended(in).k.data, (std::vector<double>{-3, -4, 1, 2, 5, 1, 2, 3, 4, 5}));
  EXPECT_EQ(appended(in).q.data, (std::vector<double>{-3, -4, 1, 2, 5, -3, -4, 1, 2, 5})) << "all queries at 3";
  in.problem.rotary_interleaved = true;
  EXPECT_EQ(appended(in).k.data, (std::vector<double>{-2, 1, -4, 3, 5, 1, 2, 3, 4, 5}));
  in.problem.causal = true;
  EXPECT_EQ(appended(in).q.data, (std::vector<double>{-2, 1, -4, 3, 5, 1, 2, 3, 4, 5})) << "one at 3, one at 4";
}

TEST(Decode, left_padding_is_not_seen_and_rows_are_found_by_index) {
  Inputs in = cache_of_4();
  in.leftpad_k = {1};
  in.k.data[0] = in.v.data[0] = kNan;
  EXPECT_NEAR(attention(in).o.data[0], softmax_mean({{2, 20}, {3, 30}}), 1e-13);
  in.leftpad_k = {3};
  EXPECT_EQ(attention(in).lse.data[0], -kInf);

  Inputs moved = cache_of_4();
  const Outputs expected = attention(moved);
  moved.problem.cache_rows = 3;
  moved.cache_batch_idx = {2};
  for (HostTensor* t : {&moved.k, &moved.v}) {
    t->shape[0] = 3;
    t->data.insert(t->data.begin(), 2 * t->data.size(), kNan);
  }
  EXPECT_EQ(attention(moved).o.data, expected.o.data);
}

TEST(Decode, what_does_not_fit_the_cache_is_refused_and_leaves_it_alone) {
  Inputs in = cache_of_4();
  in.problem.seq_new = 2;
  in.k_new = HostTensor(1, 2, 1, 2);
  in.v_new = HostTensor(1, 2, 1, 1);
  const Outputs out = attention(in);
  EXPECT_EQ(out.status, std::vector<std::int32_t>{1});
  EXPECT_EQ(out.o.data[0], 0);
  EXPECT_EQ(out.lse.data[0], -kInf);
  EXPECT_TRUE(std::isnan(out.v.data[3]));
  in.cache_seqlens = {2};
  EXPECT_FALSE(is_refused(in, 0));
  in.cache_seqlens = {-1};
  EXPECT_TRUE(is_refused(in, 0));
  in.cache_seqlens = {0};
  in.cache_batch_idx = {1};
  EXPECT_TRUE(is_refused(in, 0));
  in.cache_batch_idx = {};
  in.leftpad_k = {-1};
  EXPECT_TRUE(is_refused(in, 0));
  in.leftpad_k = {};
  in.problem.rotary_dim = 2;
  in.problem.rotary_rows = 5;
  in.rotary_seqlens = {3};
  EXPECT_FALSE(is_refused(in, 0));
  in.rotary_seqlens = {4};
  EXPECT_TRUE(is_refused(in, 0));
}

// Every gradient against central differences of  sum(O * dO) + sum(LSE * dLSE).
void check_gradients(const Inputs& in) {
  const Outputs out = attention(in);
  const auto loss = [](const Inputs& at) {
    Inputs forward = at;
    forward.problem.op = AttentionOp::kForward;
    const Outputs y = attention(forward, 1);
    double sum = 0;
    for (std::size_t x = 0; x < y.o.data.size(); ++x) sum += y.o.data[x] * at.d_o.data[x];
    for (std::size_t x = 0; x < at.d_lse.data.size(); ++x) {
      if (std::isfinite(y.lse.data[x])) sum += y.lse.data[x] * at.d_lse.data[x];
    }
    return sum;
  };
  const auto check = [&](const char* name, HostTensor Inputs::*input, const HostTensor& gradient) {
    const double step = 1e-5;
    for (std::size_t x = 0; x < gradient.data.size(); ++x) {
      Inputs moved = in;
      (moved.*input).data[x] += step;
      const double up = loss(moved);
      (moved.*input).data[x] -= 2 * step;
      const double down = loss(moved);
      EXPECT_NEAR(gradient.data[x], (up - down) / (2 * step), 1e-8) << name << "[" << x << "]";
    }
  };
  check("dq", &Inputs::q, out.dq);
  check("dk", &Inputs::k, out.dk);
  check("dv", &Inputs::v, out.dv);
}

TEST(Backward, gradients_match_finite_differences) {
  AttentionProblem p = shape(2, 3, 4, 2, 2, 3, 2);
  p.op = AttentionOp::kBackward;
  check_gradients(make(p));
}

TEST(Backward, gradients_match_finite_differences_with_gqa_softcap_alibi_and_dlse) {
  AttentionProblem p = shape(2, 3, 4, 4, 2, 3, 2);
  p.op = AttentionOp::kBackward;
  p.softcap = 0.7F;
  p.alibi = true;
  p.with_dlse = true;
  p.scale = 1.5F;
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  check_gradients(make(p));
}

TEST(Backward, gradients_match_finite_differences_with_windows_and_masked_rows) {
  AttentionProblem p = shape(1, 5, 3, 2, 1, 2, 3);
  p.op = AttentionOp::kBackward;
  p.with_dlse = true;
  p.window_left = 1;
  p.window_right = 0;
  check_gradients(make(p));
}

TEST(Rounding, goes_to_nearest_even_with_subnormals_and_overflow) {
  const DType h = DType::kFloat16, b = DType::kBFloat16;
  EXPECT_EQ(round_to(h, 1 + 0x1p-11), 1);           // tie, to even
  EXPECT_EQ(round_to(h, 1 + 0x3p-11), 1 + 0x1p-9);  // tie, to even, upwards
  EXPECT_EQ(round_to(h, 1 + 0x1.01p-11), 1 + 0x1p-10);
  EXPECT_EQ(round_to(h, 0x1p-25), 0);
  EXPECT_EQ(round_to(h, 0x1.8p-25), 0x1p-24);
  EXPECT_EQ(round_to(h, 65519), 65504);
  EXPECT_EQ(round_to(h, -65520), -kInf);
  EXPECT_EQ(round_to(b, 1 + 0x1p-8), 1);
  EXPECT_EQ(round_to(b, 1 + 0x3p-8), 1 + 0x1p-6);
  EXPECT_EQ(round_to(b, 1e39), kInf);
  EXPECT_TRUE(std::isnan(round_to(h, kNan)));
  EXPECT_EQ(to_bits16(h, 1.0), 0x3c00);
  EXPECT_EQ(to_bits16(h, -2.0), 0xc000);
  EXPECT_EQ(to_bits16(b, 1.0), 0x3f80);
  EXPECT_EQ(to_bits16(b, kInf), 0x7f80);
}

TEST(Rounding, every_16_bit_pattern_survives_the_way_there_and_back) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      const double x = from_bits16(dtype, static_cast<std::uint16_t>(bits));
      if (std::isnan(x)) continue;
      ASSERT_EQ(to_bits16(dtype, x), bits) << name_of(dtype) << " " << x;
    }
  }
}

TEST(Plain, is_close_to_the_oracle_but_not_equal) {
  AttentionProblem p = shape(1, 16, 16, 2, 2, 8, 8);
  p.op = AttentionOp::kBackward;
  p.dtype = DType::kBFloat16;
  Inputs in = make(p);
  for (HostTensor* t : {&in.q, &in.k, &in.v, &in.d_o}) round_all(p.dtype, *t);
  const Outputs exact = attention(in), plain = plain_attention(in);
  for (auto member : {&Outputs::o, &Outputs::dq, &Outputs::dk, &Outputs::dv}) {
    double err = 0;
    for (std::size_t x = 0; x < (exact.*member).data.size(); ++x) {
      err = std::max(err, std::abs((exact.*member).data[x] - (plain.*member).data[x]));
      EXPECT_EQ((plain.*member).data[x], round_to(p.dtype, (plain.*member).data[x]));
    }
    EXPECT_GT(err, 0);
    EXPECT_LT(err, 0.02);
  }
}

TEST(Judge, nan_never_passes) {
  HostTensor t(1, 1, 1, 2);
  t.data = {1, kNan};
  EXPECT_FALSE(judge(t, t, t, DType::kFloat32, 1e9).pass);
  HostTensor oracle(1, 1, 1, 2);
  oracle.data = {1, 1};
  const Verdict v = judge(t, oracle, oracle, DType::kFloat32, 1e9);
  EXPECT_FALSE(v.pass);
  EXPECT_EQ(v.first_bad_index, 1);
}

TEST(Judge, minus_inf_must_match_exactly) {
  HostTensor oracle(1, 1, 1, 2), result = oracle;
  oracle.data = {-kInf, 3};
  result.data = {-kInf, 3};
  EXPECT_TRUE(judge(result, oracle, oracle, DType::kFloat32, 0).pass);
  result.data = {-1e30, 3};
  EXPECT_FALSE(judge(result, oracle, oracle, DType::kFloat32, 1e9).pass);
  result.data = {-kInf, -kInf};
  EXPECT_FALSE(judge(result, oracle, oracle, DType::kFloat32, 1e9).pass);
}

TEST(Judge, allows_twice_the_baseline_error_and_no_more) {
  HostTensor oracle(1, 1, 1, 3), plain = oracle, result = oracle;
  oracle.data = {1, 2, 3};
  plain.data = {1, 2.01, 3};
  result.data = {1, 2, 3.0199};
  EXPECT_TRUE(judge(result, oracle, plain, DType::kFloat32, 0).pass);
  result.data = {1, 2, 3.0201};
  const Verdict v = judge(result, oracle, plain, DType::kFloat32, 0);
  EXPECT_FALSE(v.pass);
  EXPECT_EQ(v.first_bad_index, 2);
  EXPECT_NEAR(v.baseline_err, 0.01, 1e-12);
}

TEST(Judge, sees_a_small_error_that_is_everywhere) {
  HostTensor oracle(1, 1, 100, 100), plain = oracle, result = oracle;
  for (double& x : oracle.data) x = 1;
  plain.data = oracle.data;
  plain.data[7] += 0.01;
  result.data = oracle.data;
  for (double& x : result.data) x += 0.005;
  const Verdict v = judge(result, oracle, plain, DType::kFloat32, 1);
  EXPECT_LT(v.max_abs_err, v.allowed);
  EXPECT_FALSE(v.pass);
}

// Sampled rows and keys are those of the full computation, for every option that moves a score or a mask.
TEST(Sampled, rows_and_keys_are_those_of_the_whole_oracle) {
  AttentionProblem p;
  p.op = AttentionOp::kBackward;
  p.dtype = DType::kFloat16;
  p.batch = 2;
  p.seq_q = 37;
  p.seq_k = 53;
  p.heads_q = 4;
  p.heads_kv = 2;
  p.dim_qk = 16;
  p.dim_v = 24;
  std::vector<AttentionProblem> problems(5, p);
  problems[1].causal = true;
  problems[2].causal = true;
  problems[2].alignment = Alignment::kBottomRight;
  problems[2].with_dlse = true;
  problems[3].window_left = 5;
  problems[3].window_right = 2;
  problems[3].softcap = 1.5F;
  problems[4].alibi = true;
  problems[4].alignment = Alignment::kBottomRight;
  for (const AttentionProblem& problem : problems) {
    Inputs in = make(problem);
    for (HostTensor* t : {&in.q, &in.k, &in.v, &in.d_o}) round_all(problem.dtype, *t);
    const Outputs whole = attention(in);
    const Sample sample = make_sample(problem, 9, 3);
    EXPECT_GE(sample.rows.size(), 8U);
    EXPECT_EQ(sample.rows.front(), 0);
    EXPECT_EQ(sample.rows.back(), problem.seq_q - 1);
    EXPECT_EQ(sample.keys.back(), problem.seq_k - 1);
    const Outputs want = take_sample(problem, sample, whole);
    const Outputs got = sampled_attention(in, sample, whole.o, whole.lse);
    for (auto member : {&Outputs::o, &Outputs::lse, &Outputs::dq, &Outputs::dk, &Outputs::dv}) {
      ASSERT_EQ((got.*member).shape, (want.*member).shape);
      for (std::size_t n = 0; n < (want.*member).data.size(); ++n) {
        ASSERT_NEAR((got.*member).data[n], (want.*member).data[n], 1e-12);
      }
      EXPECT_GT((got.*member).terms, 0);
      EXPECT_LE((got.*member).terms, (whole.*member).terms * (1 + 1e-9)) << "no more room than the whole gives";
    }
    const Outputs plain = take_sample(problem, sample, plain_attention(in));
    const Outputs sampled_plain = sampled_plain_attention(in, sample, whole.o, whole.lse);
    EXPECT_EQ(sampled_plain.o.data, plain.o.data);
    EXPECT_EQ(sampled_plain.dq.data, plain.dq.data);
    EXPECT_TRUE(judge(sampled_plain.dk, got.dk, sampled_plain.dk, problem.dtype, 1).pass);
  }
}

}  // namespace
}  // namespace tessera::oracle
