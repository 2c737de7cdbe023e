#include "verify/attention/cases.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include "verify/attention/buffers.h"
#include "verify/attention/family.h"

namespace tessera::cases {
namespace {

TEST(Suites, every_name_is_unique_and_every_suite_has_cases) {
  for (const std::string& name : suite_names()) {
    std::set<std::string> seen;
    for (const Case& c : suite(name)) EXPECT_TRUE(seen.insert(c.name).second) << c.name;
    EXPECT_FALSE(seen.empty()) << name;
  }
  EXPECT_TRUE(suite("no such suite").empty());
}

TEST(Suites, every_case_is_within_the_contract) {
  for (const std::string& name : suite_names()) {
    for (const Case& c : suite(name)) {
      const AttentionProblem& p = c.problem;
      EXPECT_EQ(p.heads_q % p.heads_kv, 0) << c.name;
      EXPECT_LE(std::max(p.dim_qk, p.dim_v), 256) << c.name;
      EXPECT_TRUE(std::isfinite(p.scale) && p.scale != 0) << c.name;
      EXPECT_EQ(c.lengths_k.size(), p.op == AttentionOp::kDecode ? 0 : c.lengths_q.size()) << c.name;
      if (p.op != AttentionOp::kDecode) continue;
      const oracle::Inputs shapes = make_shapes(c);
      bool refused = false;
      for (std::int64_t b = 0; b < p.batch; ++b) refused = refused || oracle::is_refused(shapes, b);
      EXPECT_EQ(refused, c.refused) << c.name;
    }
  }
}

TEST(Suites, pairs_counted_by_rows_are_those_the_oracle_sees) {
  for (const char* name : {"quick", "hostile"}) {
    for (const Case& c : suite(name)) {
      if (c.problem.dtype != DType::kFloat32) continue;
      EXPECT_EQ(c.visible_pairs(), oracle::count_visible_pairs(make_inputs(c))) << c.name;
    }
  }
}

TEST(Suites, flops_and_bytes_of_a_case_done_by_hand) {
  Case c;
  c.problem.op = AttentionOp::kForward;
  c.problem.dtype = DType::kBFloat16;
  c.problem.batch = 2;
  c.problem.seq_q = c.problem.seq_k = 4;
  c.problem.heads_q = 4;
  c.problem.heads_kv = 2;
  c.problem.dim_qk = 16;
  c.problem.dim_v = 8;
  c.problem.causal = true;
  c.problem.with_lse = true;
  EXPECT_EQ(c.visible_pairs(), 2 * 10);
  EXPECT_EQ(c.flops(), 2.0 * 20 * 4 * (16 + 8));
  // q 2*4*4*16, o 2*4*4*8, k 2*4*2*16, v 2*4*2*8, all of 2 bytes; lse 2*4*4 of 4
  EXPECT_EQ(c.bytes(), 2.0 * (512 + 256 + 256 + 128) + 4.0 * 32);
  c.problem.op = AttentionOp::kBackward;
  EXPECT_EQ(c.flops(), 2.0 * 20 * 4 * (3 * 16 + 2 * 8));
}

// The backward's suite has what its contract has, in both modes, for the types that GPUs take.
TEST(Suites, full_covers_the_backward_contract_in_both_modes) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const bool deterministic : {false, true}) {
      std::set<std::int64_t> dims;
      std::set<std::string> met;
      for (const Case& c : suite("full")) {
        const AttentionProblem& p = c.problem;
        if (p.op != AttentionOp::kBackward || p.dtype != dtype || p.deterministic != deterministic) continue;
        if (p.dim_qk == p.dim_v && p.causal) dims.insert(p.dim_qk);
        const auto meet = [&](bool here, const char* what) {
          if (here) met.insert(what);
        };
        meet(p.dim_qk > p.dim_v, "Dqk > Dv");
        meet(p.dim_qk < p.dim_v, "Dqk < Dv");
        meet(p.heads_q > p.heads_kv && p.heads_kv > 1, "GQA");
        meet(p.heads_q > 1 && p.heads_kv == 1, "MQA");
        meet(p.with_dlse, "dlse");
        meet(p.causal && p.seq_q < p.seq_k && p.alignment == Alignment::kTopLeft, "causal top-left");
        meet(p.causal && p.seq_q < p.seq_k && p.alignment == Alignment::kBottomRight, "causal bottom-right");
        meet(p.causal && p.seq_q > p.seq_k && p.alignment == Alignment::kBottomRight, "masked rows");
        meet(p.window_left >= 0 && p.window_right >= 0, "window");
        meet(p.softcap > 0, "softcap");
        meet(p.alibi, "alibi");
        meet(p.scale < 0, "negative scale");
        meet(p.varlen && std::count(c.lengths_q.begin(), c.lengths_q.end(), 0) > 0, "empty queries");
        meet(p.varlen && std::count(c.lengths_k.begin(), c.lengths_k.end(), 0) > 0, "empty keys");
        meet(c.layout == Layout::kHeadsMajor, "heads major");
        meet(c.layout == Layout::kPadded, "padded");
        meet(c.layout == Layout::kUnaligned, "unaligned");
        for (const std::int64_t edge : {1, 63, 64, 65, 127, 128, 129, 257}) {
          meet(p.seq_q == edge, ("Sq " + std::to_string(edge)).c_str());
          meet(p.seq_k == edge, ("Sk " + std::to_string(edge)).c_str());
        }
      }
      for (const std::int64_t d : {8, 16, 24, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256}) {
        EXPECT_TRUE(dims.count(d)) << name_of(dtype) << " D " << d << " deterministic " << deterministic;
      }
      EXPECT_EQ(met.size(), 17U + 16U) << name_of(dtype) << " deterministic " << deterministic;
    }
  }
}

TEST(Suites, full_covers_the_decode_contract) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::set<std::string> met;
    std::set<std::int64_t> queries, groups, pages, lengths;
    for (const Case& c : suite("full")) {
      const AttentionProblem& p = c.problem;
      if (p.op != AttentionOp::kDecode || p.dtype != dtype) continue;
      queries.insert(p.seq_q);
      groups.insert(p.heads_q / p.heads_kv);
      pages.insert(p.page_size);
      lengths.insert(c.cache_lengths.begin(), c.cache_lengths.end());
      const auto meet = [&](bool here, const char* what) {
        if (here) met.insert(what);
      };
      const bool appends = p.seq_new > 0;
      bool crosses = false;
      for (const std::int32_t n : c.cache_lengths) {
        crosses = crosses || (p.paged && appends && n % p.page_size != 0 && n % p.page_size + p.seq_new > p.page_size);
      }
      meet(appends && p.seq_new < p.seq_q, "Sn < Sq");
      meet(appends && p.seq_new > p.seq_q, "Sn > Sq");
      meet(crosses, "an append across a page's edge");
      meet(appends && p.softcap > 0 && p.alibi, "append, softcap and ALiBi");
      meet(appends && p.window_left >= 0, "append and a window");
      meet(p.rotary_dim > 0 && p.rotary_interleaved, "interleaved");
      meet(p.rotary_dim > 0 && !p.rotary_interleaved, "halves");
      meet(p.rotary_dim > 0 && p.rotary_dim < p.dim_qk, "partial rotary");
      meet(p.rotary_dim > 0 && p.seq_q > 1 && !p.causal && p.window_left < 0, "queries at one position");
      meet(!c.rotary_lengths.empty(), "rotary_seqlens");
      meet(!c.cache_batch_idx.empty() && appends, "rows and append");
      meet(!c.cache_batch_idx.empty() && !appends, "rows");
      meet(!c.leftpad.empty() && p.paged, "left padding and pages");
      meet(!c.leftpad.empty() && p.alibi, "left padding and ALiBi");
      meet(!c.leftpad.empty() && p.window_left >= 0, "left padding and a window");
      meet(p.batch_invariant && p.paged, "batch invariant, paged");
      meet(p.batch_invariant && !p.paged, "batch invariant");
      meet(c.with_status, "status");
      meet(c.refused, "refused");
      meet(appends && p.dim_qk != p.dim_v, "Dqk != Dv");
      meet(appends && c.layout == Layout::kUnaligned, "unaligned");
      meet(appends && c.layout == Layout::kHeadsMajor, "heads major");
      meet(appends && c.layout == Layout::kPadded, "padded");
    }
    EXPECT_EQ(met.size(), 23U) << name_of(dtype);
    for (const std::int64_t n : {1, 2, 3, 4, 5, 7, 16}) EXPECT_TRUE(queries.count(n)) << n;
    for (const std::int64_t n : {1, 4, 7, 8, 16}) EXPECT_TRUE(groups.count(n)) << n;
    for (const std::int64_t n : {1, 12, 16, 64, 256}) EXPECT_TRUE(pages.count(n)) << n;
    for (const std::int64_t n : {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129}) EXPECT_TRUE(lengths.count(n)) << n;
  }
}

// So that the cache after an append is known to the bit, whatever order the products are added in.
TEST(Random, caches_of_e4m3_lie_as_gpus_read_them) {
  int caches = 0;
  for (std::uint64_t n = 0; n < 600; ++n) {
    const std::string name = verify::random_attention(n, n)->name;
    if (name.find("e4m3_cache") == std::string::npos) continue;
    EXPECT_EQ(name.find("unaligned"), std::string::npos) << name;
    ++caches;
  }
  EXPECT_GT(caches, 20);
}

TEST(Inputs, rotations_are_exact_in_fp32) {
  int rows = 0;
  for (const char* name : {"quick", "hostile"}) {
    for (const Case& c : suite(name)) {
      const AttentionProblem& p = c.problem;
      if (p.rotary_dim == 0) continue;
      const oracle::Inputs in = make_inputs(c);
      for (const oracle::HostTensor* t : {&in.q, &in.k_new}) {
        for (std::int64_t row = 0; row < t->size() / t->shape[3]; ++row) {
          const double* x = t->data.data() + row * t->shape[3];
          const std::int64_t position = row % p.rotary_rows;
          for (std::int64_t i = 0; i < p.rotary_dim / 2; ++i) {
            const double cos = in.rotary_cos.at(0, 0, position, i), sin = in.rotary_sin.at(0, 0, position, i);
            ASSERT_EQ(x[i], verify::round_to(p.dtype, x[i])) << c.name;
            ASSERT_EQ(cos, verify::round_to(DType::kBFloat16, cos)) << c.name;
            for (const double term : {x[2 * i] * cos, x[2 * i + 1] * sin, x[2 * i] * cos - x[2 * i + 1] * sin}) {
              ASSERT_EQ(term, static_cast<float>(term)) << c.name;
            }
          }
          ++rows;
        }
      }
    }
  }
  EXPECT_GT(rows, 100);
}

TEST(Buffers, a_cache_that_an_append_left_wrong_is_seen) {
  for (const Case& c : suite("quick")) {
    if (c.problem.seq_new == 0 || c.refused) continue;
    const oracle::Inputs in = make_inputs(c);
    const oracle::Outputs expected = oracle::attention(in);
    Buffers buffers(c, in, nullptr);
    EXPECT_NE(buffers.cache_damage(expected), "") << c.name << ": nothing was appended";
    for (Buffer* b : buffers.buffers()) {
      const std::string name = b->name;
      const bool scale = name == "k_scale" || name == "v_scale";
      if (name != "k" && name != "v" && !scale) continue;
      if (scale && expected.k_scale.empty()) continue;
      Buffer right(b->name);
      right.shape = b->shape;
      right.strides = b->strides;
      const oracle::HostTensor& values = scale         ? name[0] == 'k' ? expected.k_scale : expected.v_scale
                                         : name == "k" ? expected.k
                                                       : expected.v;
      if (scale) {
        EXPECT_NE(buffers.cache_damage(expected), "") << c.name << ": the scales are not written yet";
        right.fill(DType::kFloat32, 3, values, false);
      } else if (c.problem.fp8_cache) {
        right.fill_e4m3(4, values);
      } else {
        right.fill(c.problem.dtype, 4, values, false);
      }
      b->storage = right.storage;
    }
    for (Buffer* b : buffers.buffers()) {
      if (std::strcmp(b->name, "status") == 0) {
        EXPECT_NE(buffers.cache_damage(expected), "") << "status is not written yet";
        std::fill(b->storage.begin(), b->storage.end(), std::byte{0});
      }
    }
    EXPECT_EQ(buffers.cache_damage(expected), "") << c.name;
    for (Buffer* b : buffers.buffers()) {
      if (std::strcmp(b->name, "v") != 0) continue;
      b->storage.front() ^= std::byte{1};
      EXPECT_NE(buffers.cache_damage(expected), "") << c.name;
      b->poison();
      EXPECT_NE(buffers.cache_damage(expected), "") << c.name << ": before the append";
    }
  }
}

TEST(Inputs, are_the_same_on_every_platform) {
  const Case c = suite("quick").front();
  const oracle::Inputs in = make_inputs(c);
  EXPECT_EQ(in.q.data, make_inputs(c).q.data);
  // Exact values: the generator uses no library function whose last bit may differ.
  EXPECT_EQ(in.q.data[0], -0x1.ce7524p-3);
  EXPECT_EQ(in.v.data[7], 0x1.d179a2p-1);
  double sum = 0, squares = 0;
  for (double x : in.q.data) {
    sum += x;
    squares += x * x;
  }
  const auto n = static_cast<double>(in.q.data.size());
  EXPECT_NEAR(sum / n, 0, 0.05);
  EXPECT_NEAR(squares / n, 1, 0.05);
}

TEST(Inputs, hostile_logits_are_as_large_as_their_names_say) {
  std::set<Distribution> met;
  for (const Case& c : suite("hostile")) {
    const double size = c.distribution == Distribution::kLogits1e4 ? 1e4 : 120;
    if (c.distribution != Distribution::kLogits120 && c.distribution != Distribution::kLogits1e4 &&
        c.distribution != Distribution::kLogitsMinus120) {
      continue;
    }
    if (c.problem.op != AttentionOp::kForward || c.problem.varlen) continue;
    const oracle::Inputs in = make_inputs(c);
    for (std::int64_t j = 0; j < c.problem.seq_k; ++j) {
      double logit = 0;
      for (std::int64_t d = 0; d < c.problem.dim_qk; ++d) logit += in.q.at(0, 0, 0, d) * in.k.at(0, j, 0, d);
      logit *= c.problem.scale;
      EXPECT_NEAR(std::abs(logit), size, c.problem.fp8 ? size / 5 : size / 20) << c.name;  // e4m3 has 3 bits
      EXPECT_TRUE(c.distribution != Distribution::kLogitsMinus120 || logit < 0);
    }
    met.insert(c.distribution);
  }
  EXPECT_EQ(met.size(), 3U);
}

TEST(Inputs, values_no_sequence_uses_are_nan_and_never_reach_the_oracle) {
  for (const Case& c : suite("quick")) {
    if (c.problem.dtype != DType::kFloat32) continue;
    const oracle::Outputs out = oracle::attention(make_inputs(c));
    for (const oracle::HostTensor* t : {&out.o, &out.lse, &out.dq, &out.dk, &out.dv}) {
      for (double x : t->data) ASSERT_FALSE(std::isnan(x)) << c.name;
    }
  }
}

// The rule must be tight enough to see the smallest mistake a kernel makes: one key of 65 left out at the end, which
// under a causal mask only the last query misses.
TEST(Judge, one_key_left_out_fails_in_every_type) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const AttentionOp op : {AttentionOp::kForward, AttentionOp::kBackward}) {
      for (const Case& c : suite("quick")) {
        const AttentionProblem& p = c.problem;
        if (p.dtype != dtype || p.op != op || p.seq_q != 65 || !p.causal) continue;
        const oracle::Inputs in = make_inputs(c);
        const oracle::Outputs exact = oracle::attention(in), plain = oracle::plain_attention(in);
        oracle::Inputs less = in;
        less.problem.seq_k = 64;
        for (oracle::HostTensor* t : {&less.k, &less.v}) {
          t->shape[1] = 64;
          t->data.resize(static_cast<std::size_t>(t->offset(1, 0, 0)));
        }
        oracle::Outputs wrong = oracle::plain_attention(less);
        EXPECT_TRUE(verify::judge(plain.o, exact.o, plain.o, dtype, c.floor).pass);
        EXPECT_FALSE(verify::judge(wrong.o, exact.o, plain.o, dtype, c.floor).pass) << c.name;
        EXPECT_FALSE(verify::judge(wrong.lse, exact.lse, plain.lse, DType::kFloat32, c.floor).pass) << c.name;
        if (op != AttentionOp::kBackward) continue;
        EXPECT_FALSE(verify::judge(wrong.dq, exact.dq, plain.dq, dtype, c.floor).pass) << c.name;
        for (auto member : {&oracle::Outputs::dk, &oracle::Outputs::dv}) {
          oracle::HostTensor& t = wrong.*member;
          t.shape[1] = 65;
          t.data.resize((exact.*member).data.size(), 0.0);
          EXPECT_FALSE(verify::judge(t, exact.*member, plain.*member, dtype, c.floor).pass) << c.name;
        }
      }
    }
  }
}

// Of the tensors that the op writes.
std::string damage_of(Buffers& buffers) {
  for (const Buffer* buffer : buffers.buffers()) {
    if (std::string damage = buffer->written ? buffer->damage() : ""; !damage.empty()) return damage;
  }
  return {};
}

TEST(Buffers, strides_lead_to_the_values_and_gaps_are_nan) {
  for (Layout layout : {Layout::kCompact, Layout::kHeadsMajor, Layout::kPadded}) {
    Case c = suite("quick").front();
    c.layout = layout;
    const oracle::Inputs in = make_inputs(c);
    Buffers buffers(c, in, nullptr);
    const tessera_attention args = buffers.args();
    const auto* data = static_cast<const float*>(args.q->data);
    for (std::int64_t b = 0; b < args.q->shape[0]; ++b) {
      for (std::int64_t s = 0; s < args.q->shape[1]; ++s) {
        for (std::int64_t h = 0; h < args.q->shape[2]; ++h) {
          const float* row = data + b * args.q->strides[0] + s * args.q->strides[1] + h * args.q->strides[2];
          ASSERT_EQ(row[0], in.q.at(b, s, h, 0));
          ASSERT_EQ(row[args.q->shape[3] - 1], in.q.at(b, s, h, args.q->shape[3] - 1));
          ASSERT_TRUE(layout != Layout::kPadded || std::isnan(row[args.q->shape[3]]));
        }
      }
    }
    EXPECT_TRUE(std::isnan(static_cast<const float*>(args.out->data)[0]));
    EXPECT_EQ(damage_of(buffers), "");
  }
}

TEST(Buffers, shapes_without_values_are_filled_with_finite_ones) {
  for (const Case& c : suite("quick")) {
    const oracle::Inputs shapes = make_shapes(c);
    Buffers buffers(c, shapes, nullptr);
    ASSERT_EQ(buffers.buffers().size(), Buffers(c, make_inputs(c), nullptr).buffers().size()) << c.name;
    if (c.problem.dtype != DType::kFloat32) continue;
    const tessera_attention args = buffers.args();
    const auto* q = static_cast<const float*>(args.q->data);
    EXPECT_TRUE(std::isfinite(q[0]) && q[0] != 0) << c.name;
    EXPECT_TRUE(c.problem.op == AttentionOp::kBackward || std::isnan(static_cast<const float*>(args.out->data)[0]));
  }
}

TEST(Buffers, results_come_back_and_a_write_into_a_gap_is_seen) {
  Case c = suite("quick").front();
  c.layout = Layout::kPadded;
  c.problem.dtype = DType::kBFloat16;
  const oracle::Inputs in = make_inputs(c);
  const oracle::Outputs expected = oracle::attention(in);
  Buffers buffers(c, in, nullptr);
  EXPECT_TRUE(std::isnan(buffers.results(expected).o.data[0]));
  const tessera_attention args = buffers.args();
  auto* out = static_cast<std::uint16_t*>(args.out->data);
  out[args.out->strides[1]] = verify::to_bits16(DType::kBFloat16, 2.5);
  EXPECT_EQ(buffers.results(expected).o.at(0, 1, 0, 0), 2.5);
  EXPECT_EQ(damage_of(buffers), "");
  out[args.out->shape[3]] = 0;
  EXPECT_NE(damage_of(buffers), "");
  for (Buffer* buffer : buffers.buffers()) {
    if (buffer->written) buffer->poison();
  }
  EXPECT_EQ(damage_of(buffers), "");
  EXPECT_TRUE(std::isnan(buffers.results(expected).o.at(0, 1, 0, 0)));
}

// dK with all queries alike, P and dS rounded as kernels may: P before it goes into dS, too.
oracle::HostTensor dk_by_hand(const oracle::Inputs& in, const oracle::Outputs& exact, double wrong_delta) {
  const AttentionProblem& p = in.problem;
  const auto rounded = [&](double x) { return verify::round_to(p.dtype, x); };
  oracle::HostTensor dk(1, p.seq_k, p.heads_kv, p.dim_qk);
  for (std::int64_t h = 0; h < p.heads_q; ++h) {
    for (std::int64_t i = 0; i < p.seq_q; ++i) {
      double delta = wrong_delta;
      for (std::int64_t d = 0; d < p.dim_v; ++d) delta += rounded(exact.o.at(0, i, h, d)) * in.d_o.at(0, i, h, d);
      for (std::int64_t j = 0; j < p.seq_k; ++j) {
        if (!oracle::is_visible(p, i, j, p.seq_q, p.seq_k)) continue;
        double score = 0, dp = 0;
        for (std::int64_t d = 0; d < p.dim_qk; ++d) score += in.q.at(0, i, h, d) * in.k.at(0, j, 0, d);
        for (std::int64_t d = 0; d < p.dim_v; ++d) dp += in.d_o.at(0, i, h, d) * in.v.at(0, j, 0, d);
        const double weight = rounded(std::exp(score * static_cast<double>(p.scale) - exact.lse.at(0, h, i)));
        const double ds = rounded(weight * (dp - delta));
        for (std::int64_t d = 0; d < p.dim_qk; ++d) dk.at(0, j, 0, d) += ds * in.q.at(0, i, h, d);
      }
    }
  }
  for (double& x : dk.data) x = rounded(x * static_cast<double>(p.scale));
  return dk;
}

TEST(Judge, a_row_does_not_fail_by_the_luck_of_the_plain_computation) {
  int judged = 0;
  for (const Case& c : suite("hostile")) {
    if (c.problem.op != AttentionOp::kBackward || c.problem.dtype == DType::kFloat32) continue;
    if (c.distribution != Distribution::kSink || c.problem.window_left < 0 || c.problem.seq_q != 90) continue;
    const oracle::Inputs in = make_inputs(c);
    const oracle::Outputs exact = oracle::attention(in), plain = oracle::plain_attention(in);
    const auto ratio = [&](double wrong_delta) {
      return verify::judge(dk_by_hand(in, exact, wrong_delta), exact.dk, plain.dk, c.problem.dtype, c.floor).ratio;
    };
    EXPECT_LT(ratio(0), 1) << c.name;
    EXPECT_GT(ratio(0.5), 1) << c.name;  // of about 9
    ++judged;
  }
  EXPECT_EQ(judged, 8);  // four throws in each 16-bit type
}

}  // namespace
}  // namespace tessera::cases
