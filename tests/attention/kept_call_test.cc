// A call that a plan lets through without a check must be one that the check accepts, with the same result.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>

#include "attention/check.h"
#include "attention/family.h"
#include "attention/kept_call.h"
#include "tests/api/fixture.h"

namespace tessera::test {
namespace {

using attention::CheckedAttention;
using attention::KeptCall;

// The same call on a GPU, whose memory no check reads.
Call on_gpu(Call call) {
  for (auto& [name, tensor] : call.tensors) {
    tensor.view.device = {TESSERA_CUDA, 0};
    if (tensor.view.dtype.bits == 32 && tensor.view.dtype.code == TESSERA_FLOAT &&
        name.find("lse") == std::string::npos && name.find("scale") == std::string::npos) {
      tensor.view.dtype = kBf16;
    }
  }
  return call;
}

Call gpu_forward() { return on_gpu(forward_call()); }
Call gpu_backward() { return on_gpu(backward_call()); }
Call gpu_varlen() { return on_gpu(varlen_call()); }
Call gpu_decode() { return on_gpu(decode_call()); }
Call gpu_paged() { return on_gpu(paged_call()); }
Call gpu_e4m3_cache() { return on_gpu(e4m3_cache_call()); }
Call gpu_append() { return on_gpu(append_call()); }

const std::pair<const char*, Call (*)()> kCalls[] = {
    {"cpu_forward", +[] { return forward_call(); }},
    {"cpu_backward", backward_call},
    {"gpu_forward", gpu_forward},
    {"gpu_backward", gpu_backward},
    {"gpu_varlen", gpu_varlen},
    {"gpu_decode", gpu_decode},
    {"gpu_paged", gpu_paged},
    {"gpu_e4m3_cache", gpu_e4m3_cache},
    {"gpu_append", gpu_append},
};

Result<CheckedAttention> check(const Call& call) { return attention::check(call.op, &call.args, Look::kEverything); }

// A call, what its plan is for, and what the plan keeps.
struct Planned {
  Call call;
  AttentionProblem problem;
  std::unique_ptr<const KeptCall> kept;

  explicit Planned(Call made, bool needs_vectors = true) : call(std::move(made)) {
    const auto checked = check(call);
    EXPECT_TRUE(checked.ok()) << checked.status().message();
    problem = checked->args.problem;
    if (!needs_vectors) problem.vectors = problem.tensor_maps = false;
    kept = KeptCall::of(call.args, *checked, problem);
  }

  // Whether the call, as it is now, is let through; if so, it must be what the check makes of it.
  bool repeats() {
    std::optional<AttentionArgs> args;
    if (!kept->repeats(call.args, args)) return false;
    const auto checked = check(call);
    EXPECT_TRUE(checked.ok()) << "let through, but: " << checked.status().message();
    if (!checked.ok()) return true;
    EXPECT_TRUE(AttentionFamily::covers(problem, checked->args.problem)) << "let through, but not what was planned";
    EXPECT_EQ(args->problem, problem);
    constexpr std::size_t kViews = offsetof(AttentionArgs, q);
    EXPECT_EQ(std::memcmp(reinterpret_cast<const char*>(&*args) + kViews,
                          reinterpret_cast<const char*>(&checked->args) + kViews, sizeof *args - kViews),
              0);
    return true;
  }
};

class Keeps : public testing::TestWithParam<std::pair<const char*, Call (*)()>> {
 protected:
  Planned planned{GetParam().second()};
};

TEST_P(Keeps, a_call_that_is_repeated_is_let_through) { EXPECT_TRUE(planned.repeats()); }

TEST_P(Keeps, other_addresses_are_let_through_if_they_are_aligned) {
  for (auto& [name, tensor] : planned.call.tensors) {
    SCOPED_TRACE(name);
    const tessera_tensor good = tensor.view;
    tensor.view.data = static_cast<char*>(good.data) + 32;
    EXPECT_TRUE(planned.repeats());
    tensor.view = good;
    for (const int shift : {1, 2, 4, 8}) {
      SCOPED_TRACE(shift);
      tensor.view.data = static_cast<char*>(good.data) + shift;
      planned.repeats();  // must agree with the check
    }
    tensor.view.data = static_cast<char*>(good.data) + 1;
    EXPECT_EQ(planned.repeats(), good.dtype.bits == 8 && !planned.problem.vectors);
    tensor.view.data = nullptr;
    EXPECT_FALSE(planned.repeats());
    tensor.view = good;
  }
  EXPECT_TRUE(planned.repeats());
}

TEST_P(Keeps, a_tensor_described_otherwise_is_not_let_through) {
  for (auto& [name, tensor] : planned.call.tensors) {
    SCOPED_TRACE(name);
    const auto expect_checked = [&](const char* field, const std::function<void(tessera_tensor&)>& change) {
      const tessera_tensor good = tensor.view;
      change(tensor.view);
      EXPECT_FALSE(planned.repeats()) << field;
      tensor.view = good;
    };
    expect_checked("device.type", [](tessera_tensor& t) { t.device.type = 3 - t.device.type; });
    expect_checked("device.index", [](tessera_tensor& t) { t.device.index = 1; });
    expect_checked("ndim", [](tessera_tensor& t) { --t.ndim; });
    expect_checked("dtype.code", [](tessera_tensor& t) { t.dtype.code = TESSERA_UINT; });
    expect_checked("dtype.bits", [](tessera_tensor& t) { t.dtype.bits = 64; });
    expect_checked("dtype.lanes", [](tessera_tensor& t) { t.dtype.lanes = 2; });
    expect_checked("byte_offset", [](tessera_tensor& t) { t.byte_offset = std::uint64_t{1} << 63; });
    expect_checked("shape", [](tessera_tensor& t) { t.shape = nullptr; });
    expect_checked("strides", [](tessera_tensor& t) { t.strides = nullptr; });
    for (int d = 0; d < tensor.view.ndim; ++d) {
      SCOPED_TRACE(d);
      for (const std::int64_t other : {tensor.shape(d) + 1, std::int64_t{0}, std::int64_t{-1}}) {
        const std::int64_t good = std::exchange(tensor.shape(d), other);
        EXPECT_FALSE(planned.repeats()) << "shape " << other;
        tensor.shape(d) = good;
      }
      for (const std::int64_t other : {tensor.stride(d) + 16, std::int64_t{0}, std::int64_t{-1}}) {
        const std::int64_t good = std::exchange(tensor.stride(d), other);
        EXPECT_FALSE(planned.repeats()) << "stride " << other;
        tensor.stride(d) = good;
      }
    }
  }
  EXPECT_TRUE(planned.repeats());
}

TEST_P(Keeps, a_tensor_less_or_more_is_not_let_through) {
  constexpr const tessera_tensor* tessera_attention::*kTensors[] = {
      &tessera_attention::q,
      &tessera_attention::k,
      &tessera_attention::v,
      &tessera_attention::out,
      &tessera_attention::lse,
      &tessera_attention::dout,
      &tessera_attention::dlse,
      &tessera_attention::dq,
      &tessera_attention::dk,
      &tessera_attention::dv,
      &tessera_attention::alibi_slopes,
      &tessera_attention::cu_seqlens_q,
      &tessera_attention::cu_seqlens_k,
      &tessera_attention::cache_seqlens,
      &tessera_attention::page_table,
      &tessera_attention::k_new,
      &tessera_attention::v_new,
      &tessera_attention::rotary_cos,
      &tessera_attention::rotary_sin,
      &tessera_attention::rotary_seqlens,
      &tessera_attention::cache_batch_idx,
      &tessera_attention::leftpad_k,
      &tessera_attention::status,
      &tessera_attention::q_scale,
      &tessera_attention::k_scale,
      &tessera_attention::v_scale,
  };
  for (const auto field : kTensors) {
    const tessera_tensor* good = planned.call.args.*field;
    planned.call.args.*field = good == nullptr ? planned.call.args.q : nullptr;
    EXPECT_FALSE(planned.repeats()) << &field - kTensors;
    planned.call.args.*field = good;
  }
  EXPECT_TRUE(planned.repeats());
}

TEST_P(Keeps, another_option_is_not_let_through) {
  const tessera_attention good = planned.call.args;
  const std::function<void(tessera_attention&)> changes[] = {
      [](tessera_attention& a) { a.struct_size -= 8; },
      [](tessera_attention& a) { a.struct_size += 8; },
      [](tessera_attention& a) { a.scale = 2; },
      [](tessera_attention& a) { a.scale = NAN; },
      [](tessera_attention& a) { a.softcap = 3; },
      [](tessera_attention& a) { a.flags ^= TESSERA_CAUSAL; },
      [](tessera_attention& a) { a.flags ^= 1u << 31; },
      [](tessera_attention& a) { a.alignment = TESSERA_ALIGN_TOP_LEFT; },
      [](tessera_attention& a) { a.window_left = 3; },
      [](tessera_attention& a) { a.window_right = -2; },
      [](tessera_attention& a) { a.max_seqlen_q += 1; },
      [](tessera_attention& a) { a.max_seqlen_k -= 1; },
      [](tessera_attention& a) { a.attention_chunk = 4; },
  };
  for (const auto& change : changes) {
    change(planned.call.args);
    EXPECT_FALSE(planned.repeats()) << &change - changes;
    planned.call.args = good;
  }
  EXPECT_TRUE(planned.repeats());
}

INSTANTIATE_TEST_SUITE_P(Call, Keeps, testing::ValuesIn(kCalls),
                         [](const auto& each) { return std::string(each.param.first); });

TEST(KeptCall, a_kernel_that_needs_no_vectors_takes_addresses_that_do_not_allow_them) {
  Planned planned(gpu_forward(), false);
  EXPECT_TRUE(planned.repeats());
  OwnedTensor& q = planned.call["q"];
  q.view.data = static_cast<char*>(q.view.data) + 2;
  EXPECT_TRUE(planned.repeats());
}

// Without an alignment, a causal mask needs lengths of queries and keys that are known to agree.
TEST(KeptCall, lengths_that_no_longer_share_memory_are_checked_again) {
  Call call = gpu_varlen();
  call.args.flags = TESSERA_CAUSAL;
  call.args.cu_seqlens_k = call.args.cu_seqlens_q;
  Planned planned(std::move(call));
  ASSERT_NE(planned.kept, nullptr);
  EXPECT_TRUE(planned.repeats());
  planned.call.args.cu_seqlens_k = &planned.call["cu_seqlens_k"].view;
  EXPECT_FALSE(planned.repeats());
  EXPECT_FALSE(check(planned.call).ok());
}

TEST(KeptCall, calls_whose_check_reads_memory_are_not_kept) {
  EXPECT_EQ(Planned(varlen_call()).kept, nullptr);
  EXPECT_EQ(Planned(decode_call()).kept, nullptr);
  EXPECT_EQ(Planned(append_call()).kept, nullptr);
}

TEST(KeptCall, calls_with_an_empty_tensor_are_not_kept) { EXPECT_EQ(Planned(forward_call(0, 0)).kept, nullptr); }

}  // namespace
}  // namespace tessera::test
