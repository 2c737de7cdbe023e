// Decode in a loop over tokens, as generation runs it: one captured graph, lengths that only the device knows.
#include <map>

#include "tests/cuda/helpers.h"
#include "verify/attention/buffers.h"
#include "verify/attention/cases.h"
#include "verify/judge.h"

namespace tessera::cuda {
namespace {

using oracle::Inputs;
using oracle::Outputs;

constexpr std::int64_t kTokens = 4096;

// The whole text, appended in one call.
cases::Case text_case(std::int64_t page_size) {
  cases::Case c;
  AttentionProblem& p = c.problem;
  p.op = AttentionOp::kDecode;
  p.dtype = DType::kBFloat16;
  p.batch = p.cache_rows = 2;
  p.seq_q = p.seq_k = p.seq_new = kTokens;
  p.heads_q = 4;
  p.heads_kv = 1;
  p.dim_qk = p.dim_v = 64;
  p.scale = 0.125f;
  p.causal = true;
  p.alignment = Alignment::kBottomRight;
  p.with_lse = true;
  p.rotary_dim = 64;
  p.rotary_rows = kTokens;
  if (page_size > 0) {
    p.paged = true;
    p.cache_rows = 0;
    p.page_size = page_size;
    p.max_pages_per_seq = kTokens / page_size;
    p.num_pages = 2 * p.max_pages_per_seq + 3;
  }
  c.cache_lengths = {0, 0};
  c.with_status = true;
  return c;
}

oracle::HostTensor token_of(const oracle::HostTensor& text, std::int64_t token) {
  oracle::HostTensor one(text.shape[0], 1, text.shape[2], text.shape[3]);
  const std::int64_t size = one.size() / one.shape[0];
  for (std::int64_t b = 0; b < one.shape[0]; ++b) {
    std::copy_n(text.data.begin() + text.offset(b, token, 0), size, one.data.begin() + b * size);
  }
  return one;
}

// A call whose tensors are on the device, by name.
struct DeviceCall {
  cases::Buffers& call;
  std::map<std::string, DeviceBuffer> memory;

  Status upload() {
    for (verify::Buffer* b : call.buffers()) {
      Result<DeviceBuffer> made = DeviceBuffer::make(kDevice, b->storage.size());
      if (!made.ok()) return made.status();
      if (Status s = made->upload(b->storage.data(), b->storage.size()); !s.ok()) return s;
      b->tensor.data = made->data();
      b->tensor.device = {TESSERA_CUDA, kDevice};
      memory.emplace(b->name, std::move(*made));
    }
    return {};
  }
  Status set(const char* name, const oracle::HostTensor& values) {
    std::vector<std::uint16_t> bits;
    for (const double x : values.data) bits.push_back(verify::to_bits16(DType::kBFloat16, x));
    return memory.at(name).upload(bits.data(), bits.size() * 2);
  }
  Status set(const char* name, const std::vector<std::int32_t>& values) {
    return memory.at(name).upload(values.data(), values.size() * 4);
  }
  Status fetch() {
    for (verify::Buffer* b : call.buffers()) {
      if (!b->written) continue;
      if (Status s = memory.at(b->name).download(b->storage.data(), b->storage.size()); !s.ok()) return s;
    }
    return {};
  }
};

class DecodeLoop : public testing::TestWithParam<std::int64_t> {};

TEST_P(DecodeLoop, a_graph_captured_at_length_1_is_right_up_to_a_full_cache_and_refuses_beyond) {
  REQUIRE_DEVICE();
  const cases::Case text = text_case(GetParam());
  const Inputs inputs = cases::make_inputs(text), rotated = oracle::appended(inputs);

  cases::Case step = text;
  step.problem.seq_q = step.problem.seq_new = 1;
  Inputs first = inputs;
  first.problem = step.problem;
  first.q = token_of(inputs.q, 0);
  first.k_new = token_of(inputs.k_new, 0);
  first.v_new = token_of(inputs.v_new, 0);
  cases::Buffers buffers(step, first, nullptr);
  DeviceCall call{buffers, {}};
  ASSERT_OK(call.upload());

  tessera_plan* made = nullptr;
  ASSERT_EQ(buffers.plan(&made), TESSERA_OK) << tessera_last_error();
  const std::unique_ptr<tessera_plan, decltype(&tessera_plan_destroy)> plan(made, &tessera_plan_destroy);
  const std::size_t bytes = tessera_plan_workspace(plan.get());
  const auto workspace = DeviceBuffer::make(kDevice, std::max<std::size_t>(bytes, 1));
  ASSERT_TRUE(workspace.ok());
  const auto stream = Stream::make(kDevice);
  ASSERT_TRUE(stream.ok());
  const auto graph = Graph::capture(*stream, [&](CUstream on) {
    return Status(buffers.run(plan.get(), workspace->data(), bytes, on), tessera_last_error());
  });
  ASSERT_TRUE(graph.ok()) << graph.status().message();

  Outputs expected;
  expected.k = rotated.k;
  expected.v = rotated.v;
  expected.status = {0, 0};
  for (std::int64_t token = 0; token < kTokens; ++token) {
    ASSERT_OK(call.set("q", token_of(inputs.q, token)));
    ASSERT_OK(call.set("k_new", token_of(inputs.k_new, token)));
    ASSERT_OK(call.set("v_new", token_of(inputs.v_new, token)));
    ASSERT_OK(call.set("cache_seqlens", std::vector<std::int32_t>(2, static_cast<std::int32_t>(token))));
    ASSERT_OK(graph->launch(stream->get()));
    ASSERT_OK(stream->synchronize());
    const bool around_a_power = ((token - 1) & token) == 0 || ((token + 2) & (token + 1)) == 0;
    if (!around_a_power && token % 1000 != 999) continue;
    ASSERT_OK(call.fetch());
    Inputs so_far = rotated;
    so_far.problem.seq_q = 1;
    so_far.problem.seq_new = so_far.problem.rotary_dim = 0;
    so_far.q = token_of(rotated.q, token);
    so_far.cache_seqlens.assign(2, static_cast<std::int32_t>(token + 1));
    const Outputs exact = oracle::attention(so_far), plain = oracle::plain_attention(so_far);
    const Outputs got = buffers.results(exact);
    ASSERT_EQ(verify::judge(got.o, exact.o, plain.o, DType::kBFloat16, 1).message, "") << "token " << token;
    ASSERT_EQ(verify::judge(got.lse, exact.lse, plain.lse, DType::kFloat32, 1).message, "") << "token " << token;
  }
  ASSERT_OK(call.fetch());
  EXPECT_EQ(buffers.cache_damage(expected), "");

  ASSERT_OK(call.set("cache_seqlens", std::vector<std::int32_t>{kTokens, kTokens + 7}));
  ASSERT_OK(graph->launch(stream->get()));
  ASSERT_OK(stream->synchronize());
  ASSERT_OK(call.fetch());
  expected.status = {1, 1};
  EXPECT_EQ(buffers.cache_damage(expected), "");
  Outputs last;
  last.o = oracle::HostTensor(2, 1, text.problem.heads_q, text.problem.dim_v);
  last.lse = oracle::HostTensor(2, text.problem.heads_q, 1, 1);
  last = buffers.results(last);
  for (const double x : last.o.data) EXPECT_EQ(x, 0);
  for (const double x : last.lse.data) EXPECT_EQ(x, -HUGE_VAL);
}

INSTANTIATE_TEST_SUITE_P(Pages, DecodeLoop, testing::Values(0, 16, 256),
                         [](const auto& info) { return "of_" + std::to_string(info.param); });

}  // namespace
}  // namespace tessera::cuda
