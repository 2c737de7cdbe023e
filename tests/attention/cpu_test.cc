// The CPU backend against the oracle: every case of the common list, on several thread counts and on every instruction
// set this machine has. Workspaces are exactly as large as asked for, filled with NaN, and fenced.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "attention/check.h"
#include "attention/cpu/run.h"
#include "attention/cpu/tile_ops.h"
#include "tests/isa_limit.h"
#include "tests/sanitizers.h"
#include "verify/attention/buffers.h"
#include "verify/attention/cases.h"
#include "verify/attention/family.h"
#include "verify/attention/oracle.h"
#include "verify/check.h"

namespace tessera {
namespace {

// 64-byte aligned memory that starts as NaN and has a fence behind it.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes) : bytes_(bytes), memory_(bytes + kFence + 64, std::byte{0xFF}) {
    auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    start_ = memory_.data() + (64 - address % 64) % 64;
    std::memset(start_ + bytes_, 0x5A, kFence);
  }
  void* data() { return start_; }
  bool intact() const {
    for (std::size_t i = 0; i < kFence; ++i) {
      if (start_[bytes_ + i] != std::byte{0x5A}) return false;
    }
    return true;
  }

 private:
  static constexpr std::size_t kFence = 256;
  std::size_t bytes_;
  std::vector<std::byte> memory_;
  std::byte* start_;
};

// A case with its inputs, the oracle's results and memory to run in.
struct Trial {
  cases::Case c;
  oracle::Inputs inputs;
  oracle::Outputs exact, plain;
  std::unique_ptr<cases::Buffers> buffers;

  explicit Trial(cases::Case from) : c(std::move(from)) {
    inputs = cases::make_inputs(c);
    exact = oracle::attention(inputs);
    plain = oracle::plain_attention(inputs);
    buffers = std::make_unique<cases::Buffers>(c, inputs, is_backward() ? &exact : nullptr);
  }

  bool is_backward() const { return c.problem.op == AttentionOp::kBackward; }

  // Empty where it ran.
  std::string run(int threads) {
    for (verify::Buffer* buffer : buffers->buffers()) {
      if (buffer->written) buffer->poison();
    }
    auto checked = attention::check(buffers->op(), &buffers->args(), Look::kEverything);
    if (!checked.ok()) return checked.status().message();
    Workspace workspace(cpu::workspace_bytes(checked->args.problem, threads));
    const Status status = cpu::run(checked->args, threads, workspace.data());
    if (!status.ok()) return status.message();
    if (!workspace.intact()) return "wrote behind the workspace";
    for (const verify::Buffer* buffer : buffers->buffers()) {
      if (std::string damage = buffer->written ? buffer->damage() : ""; !damage.empty()) return damage;
    }
    return {};
  }

  std::string judge() const {
    const oracle::Outputs got = buffers->results(exact);
    const DType type = c.problem.dtype;
    std::string complaints;
    const auto check = [&](const char* name, const oracle::HostTensor& result, const oracle::HostTensor& want,
                           const oracle::HostTensor& base, DType dtype) {
      const verify::Verdict verdict = verify::judge(result, want, base, dtype, c.floor);
      if (!verdict.pass) complaints += std::string(name) + ": " + verdict.message + "; ";
    };
    if (is_backward()) {
      check("dq", got.dq, exact.dq, plain.dq, type);
      check("dk", got.dk, exact.dk, plain.dk, type);
      check("dv", got.dv, exact.dv, plain.dv, type);
    } else {
      check("out", got.o, exact.o, plain.o, type);
      if (c.problem.with_lse) check("lse", got.lse, exact.lse, plain.lse, DType::kFloat32);
      if (c.problem.op == AttentionOp::kDecode) complaints += buffers->cache_damage(exact);
    }
    return complaints;
  }

  // The bytes of every output, to compare runs.
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all;
    for (const verify::Buffer* buffer : buffers->buffers()) {
      if (buffer->written) all.insert(all.end(), buffer->storage.begin(), buffer->storage.end());
    }
    return all;
  }
};

// Sanitizers make the library much slower and need every path once, not every shape.
const int kEvery = tests::sanitizers().empty() ? 1 : 9;

void expect_suite(const char* name, std::initializer_list<int> thread_counts, double most_flops = HUGE_VAL) {
  int index = 0;
  for (const cases::Case& c : cases::suite(name)) {
    if (index++ % kEvery != 0) continue;
    if (c.flops() > most_flops) continue;
    Trial trial(c);
    if (c.refused) {  // on the CPU, an error before anything is written
      const std::vector<std::byte> before = trial.bytes();
      EXPECT_NE(trial.run(1), "") << c.name;
      EXPECT_EQ(trial.bytes(), before) << c.name;
      continue;
    }
    for (int threads : thread_counts) {
      const std::string failure = trial.run(threads);
      EXPECT_EQ(failure, "") << c.name << " on " << threads << " threads";
      if (!failure.empty()) break;
      EXPECT_EQ(trial.judge(), "") << c.name << " on " << threads << " threads, " << cpu::isa_name();
    }
  }
}

using cpu::IsaLimit;

cases::Case make_case(AttentionOp op, DType dtype, std::int64_t seq_q, std::int64_t seq_k, std::int64_t heads_q,
                      std::int64_t heads_kv, std::int64_t dim_qk, std::int64_t dim_v) {
  cases::Case c;
  AttentionProblem& p = c.problem;
  p.op = op;
  p.dtype = dtype;
  p.batch = 1;
  p.seq_q = seq_q;
  p.seq_k = seq_k;
  p.heads_q = heads_q;
  p.heads_kv = heads_kv;
  p.dim_qk = dim_qk;
  p.dim_v = dim_v;
  p.scale = 1 / std::sqrt(static_cast<float>(dim_qk));
  p.alignment = Alignment::kBottomRight;
  p.with_lse = op != AttentionOp::kBackward;
  c.floor = dtype == DType::kFloat32 ? 4 : 1;
  c.name =
      std::string(name_of(op)) + " " + name_of(dtype) + " d" + std::to_string(dim_qk) + ":" + std::to_string(dim_v);
  return c;
}

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr AttentionOp kOps[] = {AttentionOp::kForward, AttentionOp::kBackward, AttentionOp::kDecode};

TEST(CpuAttention, quick_suite_is_as_accurate_as_plain_arithmetic_on_1_2_and_5_threads) {
  expect_suite("quick", {1, 2, 5});
}

// The oracle takes minutes for the larger cases; `tessera verify --suite full` runs them all.
TEST(CpuAttention, small_cases_of_the_full_suite_are_as_accurate_as_plain_arithmetic) {
  expect_suite("full", {2, 3}, 2e7);
}

TEST(CpuAttention, hostile_values_stay_finite_and_accurate) { expect_suite("hostile", {1, 5}); }

TEST(CpuAttention, the_largest_score_keeps_its_weight_however_large_it_is) {
  // One key outweighs all others by far, so the output is its value.
  constexpr std::int64_t kKeys = 100, kDim = 8;
  std::vector<float> q(kDim), k(kKeys * kDim), v(kKeys * kDim), out(kDim), lse(1);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i);
  for (double size = 1e2; size < 1e37; size *= 10) {
    for (std::int64_t d = 0; d < kDim; ++d) q[d] = static_cast<float>(std::sqrt(size) * (1 + 0.1 * double(d)));
    for (std::int64_t i = 0; i < kKeys * kDim; ++i) k[i] = q[i % kDim] * (i / kDim == 61 ? 1.0f : 0.3f);
    AttentionArgs args;
    AttentionProblem& p = args.problem;
    p.batch = p.seq_q = p.heads_q = p.heads_kv = 1;
    p.seq_k = kKeys;
    p.dim_qk = p.dim_v = kDim;
    p.scale = 0.7f;
    p.with_lse = true;
    args.q = {q.data(), 0, kDim, kDim};
    args.k = {k.data(), 0, kDim, kDim};
    args.v = {v.data(), 0, kDim, kDim};
    args.o = {out.data(), 0, kDim, kDim};
    args.lse = {lse.data(), 1, 1};
    Workspace workspace(cpu::workspace_bytes(p, 1));
    ASSERT_TRUE(cpu::run(args, 1, workspace.data()).ok());
    double score = 0;
    for (std::int64_t d = 0; d < kDim; ++d) score += double(q[d]) * q[d] * p.scale;
    EXPECT_NEAR(lse[0] / score, 1, 1e-6) << "scores of " << size;
    for (std::int64_t d = 0; d < kDim; ++d) EXPECT_NEAR(out[d], v[61 * kDim + d], 1e-3) << "scores of " << size;
  }
}

TEST(CpuAttention, quick_suite_passes_with_avx2) {
  if (cpu::detect_isa() < cpu::Isa::kAvx2) GTEST_SKIP();
  const IsaLimit limit(cpu::Isa::kAvx2, cpu::Bf16Isa::kNone);
  expect_suite("quick", {2});
}

TEST(CpuAttention, quick_suite_passes_with_sse4) {
  const IsaLimit limit(cpu::Isa::kSse4, cpu::Bf16Isa::kNone);
  expect_suite("quick", {2});
}

TEST(CpuAttention, quick_suite_passes_with_avx512_alone) {
  if (cpu::detect_isa() < cpu::Isa::kAvx512) GTEST_SKIP();
  const IsaLimit limit(cpu::Isa::kAvx512, cpu::Bf16Isa::kNone);
  expect_suite("quick", {2});
}

TEST(CpuAttention, quick_suite_passes_with_avx512_bf16_without_amx) {
  if (cpu::detect_bf16_isa() < cpu::Bf16Isa::kAvx512Bf16) GTEST_SKIP();
  const IsaLimit limit(cpu::Isa::kAvx512, cpu::Bf16Isa::kAvx512Bf16);
  expect_suite("quick", {2});
}

// Dims around the panels' widths, odd ones included, over block edges of both axes, with every option that maps scores.
TEST(CpuAttention, any_head_dim_is_served_with_every_option) {
  for (DType dtype : kTypes) {
    for (AttentionOp op : kOps) {
      int turn = 0;
      for (const auto& [dim_qk, dim_v] : {std::pair<int, int>{1, 1}, {7, 7}, {80, 80}, {100, 36}, {33, 129}, {16, 1}}) {
        cases::Case c = make_case(op, dtype, op == AttentionOp::kDecode ? 3 : 131, 197, 4, 2, dim_qk, dim_v);
        c.problem.causal = turn % 2 == 0;
        c.problem.softcap = turn % 3 == 0 ? 2.0f : 0;
        c.problem.alibi = turn % 3 == 1;
        c.problem.window_left = turn % 4 == 3 ? 50 : -1;
        c.problem.with_dlse = op == AttentionOp::kBackward && turn % 2 == 1;
        if (turn == 4) c.problem.scale = -c.problem.scale;
        c.layout = turn % 2 == 0 ? cases::Layout::kPadded : cases::Layout::kHeadsMajor;
        ++turn;
        Trial trial(c);
        ASSERT_EQ(trial.run(2), "") << c.name;
        EXPECT_EQ(trial.judge(), "") << c.name;
      }
    }
  }
}

// Up to 8 rows of a group are streamed, more are tiled; more than 64 are several blocks.
TEST(CpuAttention, decode_serves_any_number_of_rows_from_contiguous_and_paged_caches) {
  for (DType dtype : kTypes) {
    for (const auto& [queries, group] : {std::pair<int, int>{1, 1}, {1, 8}, {3, 3}, {5, 4}, {9, 8}}) {
      for (int page : {0, 7, 16}) {
        cases::Case c = make_case(AttentionOp::kDecode, dtype, queries, 1120, 2 * group, 2, 72, 40);
        AttentionProblem& p = c.problem;
        p.batch = 3;
        p.causal = queries > 1;
        p.alibi = page == 7;
        p.softcap = page == 16 ? 3.0f : 0;
        p.window_left = queries == 5 ? 300 : -1;
        c.cache_lengths = {1111, 0, 65};
        if (page > 0) {
          p.paged = true;
          p.page_size = page;
          p.max_pages_per_seq = 1120 / page;
          p.num_pages = 3 * p.max_pages_per_seq + 2;
        }
        Trial trial(c);
        ASSERT_EQ(trial.run(3), "") << c.name << " page " << page;
        EXPECT_EQ(trial.judge(), "") << c.name << " queries " << queries << " group " << group << " page " << page;
      }
    }
  }
}

// A text's queries, new keys and values, and the cache after what was appended so far.
struct Text {
  cases::Case c;           // the whole text appended in one call
  oracle::Inputs inputs;   // of that call
  oracle::Outputs so_far;  // o, lse and the cache

  Text(DType dtype, std::int64_t tokens, bool interleaved, std::int64_t page)
      : c(make_case(AttentionOp::kDecode, dtype, tokens, tokens, 4, 2, 48, 40)) {
    AttentionProblem& p = c.problem;
    p.batch = p.cache_rows = 2;
    p.causal = true;
    p.seq_new = tokens;
    p.rotary_dim = 32;
    p.rotary_interleaved = interleaved;
    if (page > 0) {
      p.paged = true;
      p.page_size = page;
      p.cache_rows = 0;
      p.max_pages_per_seq = (tokens + page - 1) / page;
      p.seq_k = p.max_pages_per_seq * page;
      p.num_pages = 2 * p.max_pages_per_seq + 1;
    }
    p.rotary_rows = p.seq_k;
    c.cache_lengths = {0, 0};
    inputs = cases::make_inputs(c);
    so_far.o = oracle::HostTensor(2, tokens, p.heads_q, p.dim_v);
    so_far.lse = oracle::HostTensor(2, p.heads_q, tokens, 1);
    so_far.k = inputs.k;
    so_far.v = inputs.v;
  }

  // Tokens [first, first + count).
  std::string append(std::int64_t first, std::int64_t count) {
    cases::Case step = c;
    step.problem.seq_q = step.problem.seq_new = count;
    step.cache_lengths.assign(2, static_cast<std::int32_t>(first));
    oracle::Inputs in = inputs;
    in.problem = step.problem;
    in.cache_seqlens = step.cache_lengths;
    in.k = so_far.k;
    in.v = so_far.v;
    for (const auto& [from, to] :
         {std::pair{&inputs.q, &in.q}, {&inputs.k_new, &in.k_new}, {&inputs.v_new, &in.v_new}}) {
      *to = oracle::HostTensor(2, count, from->shape[2], from->shape[3]);
      const std::int64_t size = to->size() / 2;
      for (std::int64_t b = 0; b < 2; ++b) {
        std::copy_n(from->data.begin() + from->offset(b, first, 0), size, to->data.begin() + b * size);
      }
    }
    cases::Buffers buffers(step, in, nullptr);
    const auto checked = attention::check(buffers.op(), &buffers.args(), Look::kEverything);
    if (!checked.ok()) return checked.status().message();
    Workspace workspace(cpu::workspace_bytes(checked->args.problem, 2));
    if (const Status s = cpu::run(checked->args, 2, workspace.data()); !s.ok()) return s.message();
    oracle::Outputs shapes;
    shapes.o = oracle::HostTensor(2, count, c.problem.heads_q, c.problem.dim_v);
    shapes.lse = oracle::HostTensor(2, c.problem.heads_q, count, 1);
    shapes.k = in.k;
    shapes.v = in.v;
    const oracle::Outputs got = buffers.results(shapes);
    so_far.k = got.k;
    so_far.v = got.v;
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int64_t h = 0; h < c.problem.heads_q; ++h) {
        for (std::int64_t i = 0; i < count; ++i) {
          so_far.lse.at(b, h, first + i) = got.lse.at(b, h, i);
          for (std::int64_t d = 0; d < c.problem.dim_v; ++d) so_far.o.at(b, first + i, h, d) = got.o.at(b, i, h, d);
        }
      }
    }
    return {};
  }
};

bool same_bits(const oracle::HostTensor& a, const oracle::HostTensor& b) {  // unused rows are NaN
  return std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(double)) == 0;
}

// Token by token, in pieces and as a whole, by decode and by a forward of the rotated text.
TEST(CpuAttention, a_text_appended_token_by_token_equals_its_prefill) {
  constexpr std::int64_t kTokens = 90;
  for (DType dtype : kTypes) {
    for (const auto& [interleaved, page] : {std::pair<bool, int>{false, 0}, {true, 0}, {false, 16}, {true, 7}}) {
      Text tokens(dtype, kTokens, interleaved, page), pieces(dtype, kTokens, interleaved, page),
          whole(dtype, kTokens, interleaved, page);
      for (std::int64_t i = 0; i < kTokens; ++i) ASSERT_EQ(tokens.append(i, 1), "");
      for (std::int64_t i = 0; i < kTokens; i += 15) ASSERT_EQ(pieces.append(i, 15), "");
      ASSERT_EQ(whole.append(0, kTokens), "");
      const oracle::Outputs exact = oracle::attention(whole.inputs), plain = oracle::plain_attention(whole.inputs);
      for (const Text* text : {&tokens, &pieces, &whole}) {
        EXPECT_TRUE(same_bits(text->so_far.k, exact.k)) << name_of(dtype) << " page " << page;
        EXPECT_TRUE(same_bits(text->so_far.v, exact.v)) << name_of(dtype) << " page " << page;
        EXPECT_EQ(verify::judge(text->so_far.o, exact.o, plain.o, dtype, text->c.floor).message, "");
        EXPECT_EQ(verify::judge(text->so_far.lse, exact.lse, plain.lse, DType::kFloat32, text->c.floor).message, "");
      }
      if (page > 0) continue;
      cases::Case forward = whole.c;
      forward.problem.op = AttentionOp::kForward;
      forward.problem.seq_new = forward.problem.rotary_dim = forward.problem.rotary_rows = 0;
      forward.problem.cache_rows = 0;
      forward.problem.rotary_interleaved = false;
      oracle::Inputs rotated = oracle::appended(whole.inputs);
      rotated.problem = forward.problem;
      rotated.cache_seqlens.clear();
      cases::Buffers buffers(forward, rotated, nullptr);
      const auto checked = attention::check(buffers.op(), &buffers.args(), Look::kEverything);
      ASSERT_TRUE(checked.ok()) << checked.status().message();
      Workspace workspace(cpu::workspace_bytes(checked->args.problem, 2));
      ASSERT_TRUE(cpu::run(checked->args, 2, workspace.data()).ok());
      EXPECT_EQ(verify::judge(buffers.results(exact).o, exact.o, plain.o, dtype, forward.floor).message, "");
    }
  }
}

// Rotation by angles of every bit, as callers have them: as accurate as the type is.
TEST(CpuAttention, rotary_embedding_turns_each_pair_by_its_angle) {
  for (DType dtype : kTypes) {
    for (const bool interleaved : {false, true}) {
      Text text(dtype, 40, interleaved, 0);
      const AttentionProblem& p = text.c.problem;
      const std::int64_t half = p.rotary_dim / 2;
      for (std::int64_t i = 0; i < text.inputs.rotary_cos.size(); ++i) {
        const double angle = static_cast<double>(i / half) * std::pow(1e4, -static_cast<double>(i % half) / 16.0);
        text.inputs.rotary_cos.data[static_cast<std::size_t>(i)] = verify::round_to(dtype, std::cos(angle));
        text.inputs.rotary_sin.data[static_cast<std::size_t>(i)] = verify::round_to(dtype, std::sin(angle));
      }
      ASSERT_EQ(text.append(0, 40), "");
      for (std::int64_t row = 0; row < 40; ++row) {
        for (std::int64_t x = 0; x < p.dim_qk; ++x) {
          const auto fresh = [&](std::int64_t column) { return text.inputs.k_new.at(1, row, 1, column); };
          double want = fresh(x), size = std::abs(want);
          if (x < p.rotary_dim) {
            const std::int64_t pair = interleaved ? x / 2 : x % half;
            const bool is_first = interleaved ? x % 2 == 0 : x < half;
            const double cos = text.inputs.rotary_cos.at(0, 0, row, pair),
                         sin = text.inputs.rotary_sin.at(0, 0, row, pair);
            const double other = fresh(interleaved ? x ^ 1 : (x + half) % p.rotary_dim);
            want = fresh(x) * cos + (is_first ? -other : other) * sin;
            size += std::abs(other);
          }
          EXPECT_NEAR(text.so_far.k.at(1, row, 1, x), want, (verify::epsilon_of(dtype) / 2 + 1e-7) * size)
              << name_of(dtype) << " row " << row << " column " << x;
        }
      }
    }
  }
}

TEST(CpuAttention, results_are_rounded_to_nearest_on_every_instruction_set) {
  std::vector<float> values = {0.0f,      -0.0f,        1.0f + 0x1p-11f, 1.0f + 0x3p-11f, 65519.0f,    -65520.0f,
                               1e30f,     0x1p-24f,     0x1p-25f,        0x1.8p-25f,      0x1p-14f,    0x1.ffcp-15f,
                               -0x1p-20f, 0x1.fffp-15f, HUGE_VALF,       1.0f + 0x1p-8f,  0x1.0001p0f, 3.1415927f};
  for (int i = 0; i < 1000; ++i)
    values.push_back(std::ldexp(1.0f + static_cast<float>(i * 7919 % 8192) / 8192, i % 34 - 26));
  const auto count = static_cast<std::int64_t>(values.size());
  values.resize(values.size() + cpu::kPad, 0.0f);
  for (const cpu::Isa isa : {cpu::Isa::kSse4, cpu::Isa::kAvx2, cpu::Isa::kAvx512}) {
    const cpu::TileOps* ops = isa <= cpu::detect_isa() ? cpu::fp32_ops(isa) : nullptr;
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      std::vector<std::uint16_t> got(values.size());
      if (ops != nullptr) ops->store(values.data(), 1, 1, count, 1.0f, {got.data(), count, dtype});
      for (std::int64_t i = 0; ops != nullptr && i < count; ++i) {
        const auto at = static_cast<std::size_t>(i);
        EXPECT_EQ(got[at], verify::to_bits16(dtype, values[at]))
            << values[at] << " in " << name_of(dtype) << " with " << cpu::name_of(isa);
      }
    }
  }
}

TEST(CpuAttention, a_sequence_does_not_depend_on_the_rest_of_its_batch) {
  const auto device = verify::open_device("cpu");
  ASSERT_TRUE(device.ok());
  int checked = 0;
  for (const cases::Case& c : cases::suite("full")) {
    if (!c.compare_alone) continue;
    const verify::Report report = verify::check(*verify::attention_case(c), **device, 1, 0);
    EXPECT_EQ(report.outcome, verify::Outcome::kPassed) << c.name << ": " << report.detail;
    ++checked;
  }
  EXPECT_GT(checked, 10);
}

TEST(CpuAttention, results_are_bitwise_equal_from_run_to_run) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (AttentionOp op : kOps) {
      cases::Case c = make_case(op, dtype, op == AttentionOp::kDecode ? 2 : 300, 1200, 6, 3, 64, 64);
      c.problem.causal = true;
      Trial trial(c);
      for (int threads : {2, 5}) {
        ASSERT_EQ(trial.run(threads), "");
        const std::vector<std::byte> first = trial.bytes();
        for (int again = 0; again < 5; ++again) {
          ASSERT_EQ(trial.run(threads), "");
          EXPECT_EQ(trial.bytes(), first) << c.name << " on " << threads << " threads";
        }
      }
    }
  }
}

TEST(CpuAttention, forward_and_decode_do_not_depend_on_the_thread_count) {
  for (DType dtype : kTypes) {
    for (AttentionOp op : {AttentionOp::kForward, AttentionOp::kDecode}) {
      Trial trial(make_case(op, dtype, op == AttentionOp::kDecode ? 2 : 200, 1200, 6, 3, 40, 40));
      ASSERT_EQ(trial.run(1), "");
      const std::vector<std::byte> first = trial.bytes();
      for (int threads : {2, 3, 7}) {
        ASSERT_EQ(trial.run(threads), "");
        EXPECT_EQ(trial.bytes(), first) << trial.c.name << " on " << threads << " threads";
      }
    }
  }
}

// MQA on more threads than KV heads cuts the keys into stretches, whose dQ are added up afterwards.
TEST(CpuAttention, backward_split_over_keys_is_accurate) {
  for (DType dtype : kTypes) {
    cases::Case c = make_case(AttentionOp::kBackward, dtype, 150, 1100, 3, 1, 24, 40);
    c.problem.causal = true;
    Trial trial(c);
    for (int threads : {1, 2, 5, 8}) {
      ASSERT_EQ(trial.run(threads), "");
      EXPECT_EQ(trial.judge(), "") << threads << " threads";
    }
  }
}

TEST(CpuAttention, callers_may_be_concurrent) {
  Trial reference(make_case(AttentionOp::kForward, DType::kFloat32, 130, 260, 4, 2, 32, 32));
  ASSERT_EQ(reference.run(3), "");
  const std::vector<std::byte> want = reference.bytes();
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      Trial mine(make_case(AttentionOp::kForward, DType::kFloat32, 130, 260, 4, 2, 32, 32));
      for (int again = 0; again < 10; ++again) {
        EXPECT_EQ(mine.run(3), "");
        EXPECT_EQ(mine.bytes(), want);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(CpuAttention, workspace_is_linear_in_the_sequence) {
  for (AttentionOp op : {AttentionOp::kForward, AttentionOp::kBackward}) {
    const auto bytes = [&](std::int64_t seq) {
      return cpu::workspace_bytes(make_case(op, DType::kFloat32, seq, seq, 8, 8, 64, 64).problem, 2);
    };
    EXPECT_LT(bytes(16384), std::size_t{300} << 20);
    EXPECT_LT(bytes(32768), bytes(16384) * 2 + (std::size_t{1} << 20));
  }
}

TEST(CpuAttention, isa_is_named) { EXPECT_NE(cpu::isa_name(), "none"); }

}  // namespace
}  // namespace tessera
