#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <string>
#include <thread>

#include <nlohmann/json.hpp>

#include "tessera/tessera.hpp"
#include "tests/api/fixture.h"

namespace tessera::test {
namespace {

TEST(Workspace, one_byte_too_small_is_refused_and_nothing_is_written) {
  Call call = forward_call();
  std::size_t bytes = 0;
  ASSERT_EQ(tessera_attention_workspace(call.op, &call.args, &bytes), TESSERA_OK);
  ASSERT_GT(bytes, 0u);
  std::vector<std::uint8_t> scratch(bytes);
  EXPECT_EQ(tessera_attention_run(call.op, &call.args, scratch.data(), bytes - 1, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tessera_last_error()).find("workspace_bytes"), std::string::npos);
  EXPECT_EQ(tessera_attention_run(call.op, &call.args, nullptr, bytes, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_TRUE(call.outputs_untouched());
  EXPECT_EQ(tessera_attention_run(call.op, &call.args, scratch.data(), bytes, nullptr), TESSERA_OK);
}

TEST(Workspace, is_allocated_by_a_one_shot_call_that_gives_none) {
  Call given = forward_call(), none = forward_call();
  ASSERT_EQ(given.run(), TESSERA_OK);
  ASSERT_EQ(tessera_attention_run(none.op, &none.args, nullptr, 0, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(std::memcmp(given["out"].as<float>(), none["out"].as<float>(), given["out"].elements() * 4), 0);
}

TEST(Workspace, any_alignment_is_accepted) {
  Call call = forward_call();
  std::size_t bytes = 0;
  ASSERT_EQ(tessera_attention_workspace(call.op, &call.args, &bytes), TESSERA_OK);
  for (std::size_t shift = 0; shift < 3; ++shift) {
    std::vector<std::uint8_t> scratch(bytes + shift);
    EXPECT_EQ(tessera_attention_run(call.op, &call.args, scratch.data() + shift, bytes, nullptr), TESSERA_OK);
  }
}

TEST(Plan, runs_the_problem_it_was_made_for_and_refuses_another) {
  Call call = forward_call();
  tessera_plan* plan = nullptr;
  ASSERT_EQ(tessera_attention_plan_create(call.op, &call.args, &plan), TESSERA_OK);
  std::vector<std::uint8_t> scratch(tessera_plan_workspace(plan));
  EXPECT_EQ(tessera_attention_plan_run(plan, &call.args, scratch.data(), scratch.size(), nullptr), TESSERA_OK);
  EXPECT_FALSE(call.outputs_untouched());
  EXPECT_NE(std::string(tessera_plan_explain(plan, TESSERA_EXPLAIN_TEXT)).find("cpu_attention"), std::string::npos);

  Call other = forward_call(3, 5);
  EXPECT_EQ(tessera_attention_plan_run(plan, &other.args, scratch.data(), scratch.size(), nullptr),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_TRUE(other.outputs_untouched());
  EXPECT_EQ(tessera_attention_plan_run(nullptr, &call.args, scratch.data(), scratch.size(), nullptr),
            TESSERA_INVALID_ARGUMENT);
  tessera_plan_destroy(plan);
  tessera_plan_destroy(nullptr);
}

TEST(Plan, threads_may_run_it_at_the_same_time_and_are_refused_each_for_itself) {
  Call planned = forward_call();
  tessera_plan* plan = nullptr;
  ASSERT_EQ(tessera_attention_plan_create(planned.op, &planned.args, &plan), TESSERA_OK);
  const auto run = [plan](const Call& call) {
    std::vector<std::uint8_t> scratch(tessera_plan_workspace(plan));
    return tessera_attention_plan_run(plan, &call.args, scratch.data(), scratch.size(), nullptr);
  };
  const auto use = [&run](int thread) {
    const auto values = [&](Call call) {
      call.fill("v", 0.01f * static_cast<float>(thread + 1));
      return call;
    };
    Call call = values(forward_call()), same = values(forward_call()), other = values(forward_call(3, 5));
    EXPECT_EQ(run(same), TESSERA_OK) << tessera_last_error();
    for (int repeat = 0; repeat < 50; ++repeat) {
      call["out"].as<float>()[0] = NAN;
      EXPECT_EQ(run(call), TESSERA_OK) << tessera_last_error();
      EXPECT_EQ(call["out"].bytes(), same["out"].bytes());
      EXPECT_EQ(run(other), TESSERA_INVALID_ARGUMENT);
    }
    EXPECT_TRUE(other.outputs_untouched());
    return call["out"].as<float>()[0];
  };
  std::vector<float> firsts(4);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) threads.emplace_back([&, i] { firsts[i] = use(i); });
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(firsts[i], use(i)) << "alone, thread " << i;
  EXPECT_NE(firsts[0], firsts[1]);
  tessera_plan_destroy(plan);
}

TEST(Plan, packed_sequences_may_be_shorter_than_planned_but_not_longer) {
  Call call = varlen_call();
  call.args.max_seqlen_q = call.args.max_seqlen_k = 4;
  tessera_plan* plan = nullptr;
  ASSERT_EQ(tessera_attention_plan_create(call.op, &call.args, &plan), TESSERA_OK) << tessera_last_error();
  std::vector<std::uint8_t> scratch(tessera_plan_workspace(plan));
  call.args.max_seqlen_q = 0;
  call.set("cu_seqlens_q", {0, 2, 4, 6});
  EXPECT_EQ(tessera_attention_plan_run(plan, &call.args, scratch.data(), scratch.size(), nullptr), TESSERA_OK)
      << tessera_last_error();
  call.set("cu_seqlens_q", {0, 6, 6, 6});
  EXPECT_EQ(tessera_attention_plan_run(plan, &call.args, scratch.data(), scratch.size(), nullptr),
            TESSERA_INVALID_ARGUMENT);
  tessera_plan_destroy(plan);
}

TEST(Plan, for_packed_queries_of_a_cache_is_refused_a_smaller_cache) {
  std::vector<float> q(2 * 2 * 16, 1), keys(2 * 64 * 2 * 16, 1), out(q.size());
  std::vector<std::int32_t> rows{0, 1, 2};
  const auto call = [&](std::int64_t capacity) {
    const Tensor cache(keys.data(), kFloat32, {2, capacity, 2, 16});
    return Attention{.q = {q.data(), kFloat32, {2, 2, 16}},
                     .k = cache,
                     .v = cache,
                     .out = {out.data(), kFloat32, {2, 2, 16}},
                     .cu_seqlens_q = {rows.data(), kInt32, {3}}};
  };
  const Plan plan(TESSERA_ATTENTION_DECODE, call(64));
  std::vector<std::byte> workspace(plan.workspace());
  plan.run(call(64), workspace.data(), workspace.size());
  try {
    plan.run(call(32), workspace.data(), workspace.size());
    ADD_FAILURE() << "keys behind the cache are read";
  } catch (const Error& e) {
    EXPECT_EQ(e.status(), TESSERA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(e.what()).find("Sk is 32, not 64"), std::string::npos) << e.what();
  }
}

TEST(Explain, a_query_that_a_batch_shares_has_the_batch_invariant_config_of_one) {
  alignas(16) std::uint16_t values[16] = {};
  const tessera_device gpu{TESSERA_CUDA, 0};
  const auto config = [&](std::int64_t batch) {
    const Tensor cache(values, kBFloat16, {8, 16, 2, 64}, {}, gpu);
    const std::string text = explain(TESSERA_ATTENTION_DECODE,
                                     {.q = {values, kBFloat16, {batch, 1, 2, 64}, {0, 128, 64, 1}, gpu},
                                      .k = cache,
                                      .v = cache,
                                      .out = {values, kBFloat16, {batch, 1, 2, 64}, {}, gpu},
                                      .page_table = {values, kInt32, {batch, 4}, {}, gpu},
                                      .batch_invariant = true},
                                     "sm_90a");
    return text.substr(text.find('{'), text.find('}') - text.find('{'));
  };
  EXPECT_EQ(config(1), config(3));
  EXPECT_NE(config(1).find("box_rows"), std::string::npos) << config(1);
}

TEST(Plan, shorter_packed_sequences_stay_within_the_planned_workspace) {
  // One KV head on two threads: the backward cuts the keys into stretches, and how many depends on the length.
  constexpr std::int64_t kRows = 2304, kDim = 8;
  ASSERT_EQ(tessera_set_num_threads(2), TESSERA_OK);
  Call call;
  call.op = TESSERA_ATTENTION_BACKWARD;
  for (const auto& [name, field] : {std::pair{"q", &tessera_attention::q},
                                    {"k", &tessera_attention::k},
                                    {"v", &tessera_attention::v},
                                    {"out", &tessera_attention::out},
                                    {"dout", &tessera_attention::dout},
                                    {"dq", &tessera_attention::dq},
                                    {"dk", &tessera_attention::dk},
                                    {"dv", &tessera_attention::dv}}) {
    call.add(name, kFp32, {kRows, 1, kDim}, field);
    call.fill(name, 0.001f);
  }
  call.add("lse", kFp32, {1, kRows}, &tessera_attention::lse);
  call.fill("lse");
  call.add("cu_seqlens_q", kI32, {2}, &tessera_attention::cu_seqlens_q);
  call.add("cu_seqlens_k", kI32, {2}, &tessera_attention::cu_seqlens_k);
  for (std::int32_t planned = 128; planned <= kRows; planned += 64) {
    call.set("cu_seqlens_q", {0, 64});
    call.set("cu_seqlens_k", {0, planned});
    tessera_plan* plan = nullptr;
    ASSERT_EQ(tessera_attention_plan_create(call.op, &call.args, &plan), TESSERA_OK) << tessera_last_error();
    const std::size_t bytes = tessera_plan_workspace(plan);
    std::vector<std::uint8_t> scratch(bytes + (2u << 20), kPoison);
    call.set("cu_seqlens_k", {0, planned - 64});
    ASSERT_EQ(tessera_attention_plan_run(plan, &call.args, scratch.data(), bytes, nullptr), TESSERA_OK)
        << tessera_last_error();
    for (std::size_t i = bytes; i < scratch.size(); ++i) {
      ASSERT_EQ(scratch[i], kPoison) << "planned for " << planned << ", wrote " << i - bytes << " past the workspace";
    }
    tessera_plan_destroy(plan);
  }
  ASSERT_EQ(tessera_set_num_threads(0), TESSERA_OK);
}

TEST(Plan, a_window_wider_than_todays_packed_sequences_is_still_the_planned_one) {
  Call call = varlen_call();
  call.args.alignment = TESSERA_ALIGN_BOTTOM_RIGHT;
  call.args.window_left = 5;
  tessera_plan* plan = nullptr;
  ASSERT_EQ(tessera_attention_plan_create(call.op, &call.args, &plan), TESSERA_OK) << tessera_last_error();
  std::vector<std::uint8_t> scratch(tessera_plan_workspace(plan));
  call.set("cu_seqlens_q", {0, 1, 2, 3});
  call.set("cu_seqlens_k", {0, 1, 2, 3});
  EXPECT_EQ(tessera_attention_plan_run(plan, &call.args, scratch.data(), scratch.size(), nullptr), TESSERA_OK)
      << tessera_last_error();
  tessera_plan_destroy(plan);
}

TEST(Plan, another_problem_is_refused_with_the_name_of_what_differs) {
  Call call = forward_call();
  tessera_plan* plan = nullptr;
  ASSERT_EQ(tessera_attention_plan_create(call.op, &call.args, &plan), TESSERA_OK);
  std::vector<std::uint8_t> scratch(tessera_plan_workspace(plan));
  const auto refusal = [&] {
    EXPECT_EQ(tessera_attention_plan_run(plan, &call.args, scratch.data(), scratch.size(), nullptr),
              TESSERA_INVALID_ARGUMENT);
    return std::string(tessera_last_error());
  };
  call.args.scale = 2;
  EXPECT_NE(refusal().find("scale"), std::string::npos) << tessera_last_error();
  call.args.scale = 0;
  call.args.lse = nullptr;
  EXPECT_NE(refusal().find("lse"), std::string::npos) << tessera_last_error();
  tessera_plan_destroy(plan);
}

TEST(Workspace, a_max_seqlen_beyond_every_row_asks_for_no_more_than_the_rows_do) {
  Call call = varlen_call();
  call.op = TESSERA_ATTENTION_BACKWARD;
  call.add("dout", kFp32, {7, kHq, kDv}, &tessera_attention::dout);
  call.add("dq", kFp32, {7, kHq, kD}, &tessera_attention::dq);
  call.add("dk", kFp32, {9, kHkv, kD}, &tessera_attention::dk);
  call.add("dv", kFp32, {9, kHkv, kDv}, &tessera_attention::dv);
  std::size_t rows = 0;
  call.args.max_seqlen_q = 7;
  call.args.max_seqlen_k = 9;
  ASSERT_EQ(tessera_attention_workspace(call.op, &call.args, &rows), TESSERA_OK) << tessera_last_error();
  for (const std::int64_t huge : {std::int64_t{1} << 40, std::int64_t{1} << 60, INT64_MAX}) {
    call.args.max_seqlen_q = call.args.max_seqlen_k = huge;
    std::size_t bytes = 0;
    ASSERT_EQ(tessera_attention_workspace(call.op, &call.args, &bytes), TESSERA_OK) << tessera_last_error();
    EXPECT_EQ(bytes, rows) << huge;
  }
}

TEST(Decode, an_append_writes_its_rows_and_nothing_else) {
  Call call = append_call();
  ASSERT_EQ(call.run(), TESSERA_OK) << tessera_last_error();
  const auto expect_rows = [&](const char* name, std::int64_t dim, std::int64_t rotated) {
    const auto* before = reinterpret_cast<const float*>(call.kept[name].data());
    const float* after = call[name].as<float>();
    const float* fresh = call[std::string(name) + "_new"].as<float>();
    for (std::int64_t row = 0; row < 3 * 12; ++row) {
      const std::int64_t b = row / 12 == 2 ? 0 : 1;  // rows 2 and 0 of the cache are sequences 0 and 1
      const std::int64_t i = row / 12 == 1 ? -1 : row % 12 - (b == 0 ? 10 : 0);
      for (std::int64_t x = 0; x < kHkv * dim; ++x) {
        const float got = after[row * kHkv * dim + x];
        if (i < 0 || i > 1) {
          EXPECT_EQ(got, before[row * kHkv * dim + x]) << name << " row " << row;
        } else if (x % dim >= rotated) {
          EXPECT_EQ(got, fresh[(b * 2 + i) * kHkv * dim + x]) << name << " row " << row;
        }
      }
    }
  };
  expect_rows("k", kD, 6);
  expect_rows("v", kDv, 0);
  const float* k_new = call["k_new"].as<float>();
  const std::int64_t position = 18;  // of sequence 0
  const float cos = call["rotary_cos"].as<float>()[position * 3 + 1],
              sin = call["rotary_sin"].as<float>()[position * 3 + 1];
  const float* appended = call["k"].as<float>() + (2 * 12 + 10) * kHkv * kD;
  EXPECT_NEAR(appended[1], k_new[1] * cos - k_new[4] * sin, 1e-6) << "columns 1 and 1 + 6 / 2 are a pair";
  EXPECT_NEAR(appended[4], k_new[1] * sin + k_new[4] * cos, 1e-6);
  for (std::int64_t b = 0; b < kB; ++b) EXPECT_EQ(call["status"].as<std::int32_t>()[b], 0);
}

TEST(Decode, a_plan_appends_token_by_token_until_the_cache_is_full) {
  Call call = append_call();
  tessera_plan* plan = nullptr;
  call.set("cache_seqlens", {0, 0});
  call.set("rotary_seqlens", {0, 0});
  ASSERT_EQ(tessera_attention_plan_create(call.op, &call.args, &plan), TESSERA_OK) << tessera_last_error();
  std::vector<std::uint8_t> scratch(tessera_plan_workspace(plan));
  const auto run = [&] {
    return tessera_attention_plan_run(plan, &call.args, scratch.data(), scratch.size(), nullptr);
  };
  for (std::int32_t length = 0; length <= 10; length += 2) {
    call.set("cache_seqlens", {length, length / 2});
    EXPECT_EQ(run(), TESSERA_OK) << tessera_last_error();
  }
  call.keep("k");
  call.keep("v");
  std::memset(call["out"].as<float>(), kPoison, call["out"].elements() * sizeof(float));
  call.set("cache_seqlens", {12, 6});
  EXPECT_EQ(run(), TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tessera_last_error()).find("cache_seqlens[0] is 12"), std::string::npos);
  EXPECT_EQ(call["k"].bytes(), call.kept["k"]);
  EXPECT_EQ(call["v"].bytes(), call.kept["v"]);
  EXPECT_TRUE(call["out"].untouched());
  call.args.k_new = call.args.v_new = nullptr;
  call.args.rotary_cos = call.args.rotary_sin = call.args.rotary_seqlens = nullptr;
  EXPECT_EQ(run(), TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tessera_last_error()).find("new keys"), std::string::npos) << tessera_last_error();
  tessera_plan_destroy(plan);
}

TEST(Errors, belong_to_the_thread_and_go_with_the_next_success) {
  Call call = forward_call();
  Call bad = forward_call();
  bad.args.q = nullptr;
  ASSERT_EQ(bad.run(), TESSERA_INVALID_ARGUMENT);
  std::thread([] { EXPECT_STREQ(tessera_last_error(), ""); }).join();
  EXPECT_STRNE(tessera_last_error(), "");
  ASSERT_EQ(call.run(), TESSERA_OK);
  EXPECT_STREQ(tessera_last_error(), "");
}

TEST(Errors, null_out_parameters_are_refused) {
  Call call = forward_call();
  EXPECT_EQ(tessera_attention_plan_create(call.op, &call.args, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_attention_workspace(call.op, &call.args, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_attention_workspace(call.op, nullptr, nullptr), TESSERA_INVALID_ARGUMENT);
  std::size_t bytes = 0;
  EXPECT_EQ(tessera_attention_workspace(call.op, nullptr, &bytes), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_attention_workspace(static_cast<tessera_attention_op>(9), &call.args, &bytes),
            TESSERA_INVALID_ARGUMENT);
}

// What a caller has whose header ends before the fields for decode.
struct OlderAttention {
  std::size_t struct_size;
  unsigned char fields[offsetof(tessera_attention, cache_seqlens) - sizeof(std::size_t)];
};

TEST(Abi, a_caller_with_a_shorter_struct_gets_the_defaults_of_what_it_does_not_know) {
  Call call = forward_call(), reference = forward_call();
  ASSERT_EQ(reference.run(), TESSERA_OK);
  OlderAttention older;
  std::memcpy(&older, &call.args, sizeof older);
  older.struct_size = sizeof older;
  // Nothing behind the struct is the library's to read: it is garbage here.
  std::vector<unsigned char> memory(sizeof(tessera_attention) + 64, 0xa5);
  std::memcpy(memory.data(), &older, sizeof older);
  const auto* args = reinterpret_cast<const tessera_attention*>(memory.data());
  ASSERT_EQ(tessera_attention_run(call.op, args, nullptr, 0, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(std::memcmp(reference["out"].as<float>(), call["out"].as<float>(), call["out"].elements() * 4), 0);

  // Shorter still: no windows, whose default is not zero.
  Call bare = forward_call();
  tessera_attention shorter = bare.args;
  shorter.struct_size = offsetof(tessera_attention, window_left);
  shorter.window_left = shorter.window_right = 0;  // beyond what it claims: not read
  ASSERT_EQ(tessera_attention_run(bare.op, &shorter, nullptr, 0, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(std::memcmp(reference["out"].as<float>(), bare["out"].as<float>(), bare["out"].elements() * 4), 0);
}

TEST(Abi, a_decode_by_a_caller_that_does_not_know_appends_is_served) {
  Call call = decode_call(), reference = decode_call();
  ASSERT_EQ(reference.run(), TESSERA_OK);
  std::vector<unsigned char> memory(sizeof(tessera_attention), 0xa5);
  call.args.struct_size = offsetof(tessera_attention, k_new);
  std::memcpy(memory.data(), &call.args, call.args.struct_size);
  const auto* args = reinterpret_cast<const tessera_attention*>(memory.data());
  ASSERT_EQ(tessera_attention_run(call.op, args, nullptr, 0, nullptr), TESSERA_OK) << tessera_last_error();
  EXPECT_EQ(std::memcmp(reference["out"].as<float>(), call["out"].as<float>(), call["out"].elements() * 4), 0);
}

TEST(Abi, a_caller_with_a_longer_struct_is_served_if_what_is_new_is_zero) {
  Call call = forward_call();
  std::vector<unsigned char> memory(sizeof(tessera_attention) + 24, 0);
  std::memcpy(memory.data(), &call.args, sizeof(tessera_attention));
  auto* args = reinterpret_cast<tessera_attention*>(memory.data());
  args->struct_size = memory.size();
  EXPECT_EQ(tessera_attention_run(call.op, args, nullptr, 0, nullptr), TESSERA_OK) << tessera_last_error();
  memory.back() = 1;
  Call other = forward_call();
  EXPECT_EQ(tessera_attention_run(call.op, args, nullptr, 0, nullptr), TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tessera_last_error()).find("newer version"), std::string::npos) << tessera_last_error();
}

TEST(Abi, public_structs_have_no_padding) {
  EXPECT_EQ(sizeof(tessera_tensor), 8 + sizeof(tessera_device) + 4 + sizeof(tessera_dtype) + 8 + 8 + 8);
  EXPECT_EQ(sizeof(tessera_attention), sizeof(std::size_t) + 10 * sizeof(void*) + 2 * sizeof(float) + sizeof(void*) +
                                           sizeof(std::uint32_t) + sizeof(tessera_alignment) +
                                           2 * sizeof(std::int64_t) + 2 * sizeof(void*) + 2 * sizeof(std::int64_t) +
                                           10 * sizeof(void*) + sizeof(std::int64_t) + 3 * sizeof(void*));
  EXPECT_EQ(sizeof(tessera_quantize_fp8),
            sizeof(std::size_t) + 4 * sizeof(void*) + sizeof(std::int64_t) + 2 * sizeof(std::uint32_t));
  EXPECT_EQ(sizeof(tessera_gemm), sizeof(std::size_t) + 10 * sizeof(void*) + 2 * sizeof(std::uint32_t));
  EXPECT_EQ(sizeof(tessera_norm), sizeof(std::size_t) + 16 * sizeof(void*) + 2 * sizeof(std::uint32_t));
  EXPECT_EQ(sizeof(tessera_loss), sizeof(std::size_t) + 12 * sizeof(void*) + 4 * sizeof(std::uint32_t));
  EXPECT_EQ(sizeof(tessera_mlp), sizeof(std::size_t) + 19 * sizeof(void*) + 2 * sizeof(std::uint32_t));
  EXPECT_EQ(sizeof(tessera_moe), sizeof(std::size_t) + 22 * sizeof(void*) + 4 * sizeof(std::uint32_t));
}

TEST(Explain, an_unknown_format_is_refused) {
  const Call call = forward_call();
  const auto format = static_cast<tessera_explain_format>(7);
  EXPECT_EQ(tessera_attention_explain(call.op, &call.args, nullptr, format, nullptr, 0, nullptr),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_STREQ(tessera_last_error(), "format is 7; TESSERA_EXPLAIN_TEXT and _JSON are known");
}

TEST(Explain, json_holds_what_the_text_says) {
  Call call = forward_call();
  std::size_t needed = 0;
  ASSERT_EQ(tessera_attention_explain(call.op, &call.args, "sm_80", TESSERA_EXPLAIN_JSON, nullptr, 0, &needed),
            TESSERA_OK);
  std::string text(needed, '\0');
  ASSERT_EQ(tessera_attention_explain(call.op, &call.args, "sm_80", TESSERA_EXPLAIN_JSON, text.data(), needed, nullptr),
            TESSERA_OK);
  text.pop_back();
  const auto json = nlohmann::json::parse(text);
  EXPECT_EQ(json["family"], "attention");
  EXPECT_EQ(json["op"], "attention_forward");
  EXPECT_EQ(json["fields"]["dtype"], "fp32");
  EXPECT_TRUE(json["chosen"].is_null()) << "fp32 is the CPU's";
  std::map<std::string, std::string> refused;
  for (const auto& r : json["refused"]) refused[r["kernel"]] = r["reason"];
  EXPECT_TRUE(refused.count("attention_forward"));
  EXPECT_FALSE(refused.count("attention_backward")) << "a kernel of another op";
  EXPECT_NE(refused["attention_forward"].find("fp32"), std::string::npos);

  tessera_plan* plan = nullptr;
  ASSERT_EQ(tessera_attention_plan_create(call.op, &call.args, &plan), TESSERA_OK);
  const auto planned = nlohmann::json::parse(tessera_plan_explain(plan, TESSERA_EXPLAIN_JSON));
  EXPECT_EQ(planned["chosen"]["kernel"], "cpu_attention");
  EXPECT_GE(planned["chosen"]["config"]["main"]["threads"], 1);
  EXPECT_GT(planned["chosen"]["predicted_us"], 0);
  tessera_plan_destroy(plan);
  EXPECT_STREQ(tessera_plan_explain(nullptr, TESSERA_EXPLAIN_JSON), "");
}

TEST(Threads, count_is_settable_and_bounded) {
  EXPECT_EQ(tessera_set_num_threads(3), TESSERA_OK);
  EXPECT_EQ(tessera_num_threads(), 3);
  EXPECT_EQ(tessera_set_num_threads(-1), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_set_num_threads(1 << 20), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(tessera_num_threads(), 3);
  EXPECT_EQ(tessera_set_num_threads(0), TESSERA_OK);
  EXPECT_GE(tessera_num_threads(), 1);
}

TEST(Threads, another_pools_loop_runs_the_work) {
  static int ranges = 0;
  const auto loop = [](std::int64_t begin, std::int64_t end, std::int64_t,
                       void (*body)(std::int64_t, std::int64_t, void*), void* context) -> std::int32_t {
    ++ranges;
    body(begin, end, context);
    return 0;
  };
  ASSERT_EQ(tessera_set_num_threads(2), TESSERA_OK);
  ASSERT_EQ(tessera_set_parallel_loop(loop), TESSERA_OK);
  Call call = forward_call();
  EXPECT_EQ(tessera_attention_run(TESSERA_ATTENTION_FORWARD, &call.args, nullptr, 0, nullptr), TESSERA_OK);
  EXPECT_GT(ranges, 0);
  ASSERT_EQ(tessera_set_parallel_loop(nullptr), TESSERA_OK);
  ASSERT_EQ(tessera_set_num_threads(0), TESSERA_OK);
}

TEST(Explain, answers_for_devices_that_are_not_present_and_looks_at_no_data) {
  Call call = forward_call();
  for (auto& [name, tensor] : call.tensors) tensor.view.data = nullptr;
  for (const char* arch : {"cpu", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a"}) {
    std::size_t needed = 0;
    ASSERT_EQ(tessera_attention_explain(call.op, &call.args, arch, TESSERA_EXPLAIN_TEXT, nullptr, 0, &needed),
              TESSERA_OK)
        << arch;
    std::string text(needed, '?');
    ASSERT_EQ(tessera_attention_explain(call.op, &call.args, arch, TESSERA_EXPLAIN_TEXT, text.data(), needed, nullptr),
              TESSERA_OK);
    EXPECT_EQ(text.back(), '\0');
    EXPECT_NE(text.find("attention_forward fp32"), std::string::npos) << text;
    EXPECT_NE(text.find("cpu_attention"), std::string::npos) << text;
  }
  for (const char* unknown : {"sm_13", "sm_75a", "sm_", "sm_90b", "90", "", "sm_080"}) {
    EXPECT_EQ(tessera_attention_explain(call.op, &call.args, unknown, TESSERA_EXPLAIN_TEXT, nullptr, 0, nullptr),
              TESSERA_INVALID_ARGUMENT);
  }
}

TEST(Cuda, tensors_on_a_device_that_is_not_there_are_refused_with_the_reason) {
  Call call = forward_call();
  for (auto& [name, tensor] : call.tensors) tensor.view.device = {TESSERA_CUDA, 77};
  EXPECT_EQ(call.run(), TESSERA_NO_DEVICE);
  EXPECT_STRNE(tessera_last_error(), "");
  EXPECT_TRUE(call.outputs_untouched());
}

TEST(Explain, never_writes_past_the_buffer_and_always_terminates) {
  Call call = forward_call();
  char text[8];
  std::memset(text, '#', sizeof text);
  ASSERT_EQ(tessera_attention_explain(call.op, &call.args, "cpu", TESSERA_EXPLAIN_TEXT, text, 5, nullptr), TESSERA_OK);
  EXPECT_EQ(text[4], '\0');
  EXPECT_EQ(text[5], '#');
}

TEST(Empty, no_sequences_queries_or_keys_are_fine) {
  EXPECT_EQ(forward_call(0, 5).run(), TESSERA_OK) << tessera_last_error();
  Call no_keys = forward_call(3, 0);
  ASSERT_EQ(no_keys.run(), TESSERA_OK) << tessera_last_error();
  for (std::size_t i = 0; i < no_keys["out"].elements(); ++i) EXPECT_EQ(no_keys["out"].as<float>()[i], 0.0f);
  for (std::size_t i = 0; i < no_keys["lse"].elements(); ++i) EXPECT_EQ(no_keys["lse"].as<float>()[i], -INFINITY);
}

TEST(Strides, null_means_compact_and_zero_broadcasts_an_input) {
  Call strided = forward_call();
  Call compact = forward_call();
  for (auto& [name, tensor] : compact.tensors) tensor.view.strides = nullptr;
  ASSERT_EQ(strided.run(), TESSERA_OK);
  ASSERT_EQ(compact.run(), TESSERA_OK);
  EXPECT_EQ(std::memcmp(strided["out"].as<float>(), compact["out"].as<float>(), strided["out"].elements() * 4), 0);

  Call broadcast = forward_call();
  broadcast["k"].stride(0) = broadcast["v"].stride(0) = broadcast["q"].stride(0) = 0;
  ASSERT_EQ(broadcast.run(), TESSERA_OK) << tessera_last_error();
  const std::size_t half = broadcast["out"].elements() / 2;
  EXPECT_EQ(std::memcmp(broadcast["out"].as<float>(), broadcast["out"].as<float>() + half, half * 4), 0);
}

TEST(Cpp, forward_matches_the_c_call_and_bad_input_throws_with_the_message) {
  Call call = forward_call();
  ASSERT_EQ(call.run(), TESSERA_OK);
  Call cpp = forward_call();
  const Attention attention{.q = {cpp["q"].as<float>(), kFloat32, {kB, kSq, kHq, kD}},
                            .k = {cpp["k"].as<float>(), kFloat32, {kB, kSk, kHkv, kD}},
                            .v = {cpp["v"].as<float>(), kFloat32, {kB, kSk, kHkv, kDv}},
                            .out = {cpp["out"].as<float>(), kFloat32, {kB, kSq, kHq, kDv}}};
  attention_forward(attention);
  EXPECT_EQ(std::memcmp(call["out"].as<float>(), cpp["out"].as<float>(), call["out"].elements() * 4), 0);

  const Plan plan(TESSERA_ATTENTION_FORWARD, attention);
  EXPECT_NE(plan.explain().find("cpu_attention"), std::string::npos);
  EXPECT_NE(explain(TESSERA_ATTENTION_FORWARD, attention, "sm_75").find("sm_75"), std::string::npos);

  Attention bad = attention;
  bad.k = {};
  try {
    attention_forward(bad);
    FAIL() << "accepted a missing k";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), TESSERA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.what()).find("k is null"), std::string::npos);
  }
}

TEST(Cpp, e4m3_with_the_quantisers_scales_is_close_to_what_was_rounded) {
  constexpr std::int64_t kRows = 6, kDim = 16;
  constexpr std::int32_t kOffsets[] = {0, 4, kRows};
  std::vector<float> x(kRows * kDim), scale(2), values(x.size()), out(x.size());
  for (std::size_t n = 0; n < x.size(); ++n) x[n] = std::sin(static_cast<float>(n));
  std::vector<std::uint8_t> rounded(x.size());
  const Tensor offsets{kOffsets, kInt32, {3}}, scales{scale.data(), kFloat32, {2, 1, 1}};
  const Tensor given{x.data(), kFloat32, {kRows, 1, kDim}}, e4m3{rounded.data(), kFloat8E4m3, {kRows, 1, kDim}};
  attention_quantize_fp8({.x = given, .out = e4m3, .scale = scales, .cu_seqlens = offsets, .max_seqlen = 4});
  // With V of ones, the result is ones.
  std::vector<float> ones(x.size(), 1.0f), scale_v(2);
  std::vector<std::uint8_t> rounded_v(x.size());
  const Tensor v{rounded_v.data(), kFloat8E4m3, {kRows, 1, kDim}}, scales_v{scale_v.data(), kFloat32, {2, 1, 1}};
  attention_quantize_fp8({.x = {ones.data(), kFloat32, {kRows, 1, kDim}},
                          .out = v,
                          .scale = scales_v,
                          .cu_seqlens = offsets,
                          .max_seqlen = 4});
  attention_forward({.q = e4m3,
                     .k = e4m3,
                     .v = v,
                     .out = {out.data(), kFloat32, {kRows, 1, kDim}},
                     .cu_seqlens_q = offsets,
                     .cu_seqlens_k = offsets,
                     .max_seqlen_q = 4,
                     .max_seqlen_k = 4,
                     .q_scale = scales,
                     .k_scale = scales,
                     .v_scale = scales_v});
  for (const float value : out) EXPECT_NEAR(value, 1.0f, 1e-3f);
  const Tensor back{values.data(), kFloat32, {kRows, 1, kDim}};
  attention_quantize_fp8(
      {.x = given, .out = back, .scale = scales, .cu_seqlens = offsets, .max_seqlen = 4, .rotate = true});
  for (std::size_t n = 0; n < x.size(); ++n) EXPECT_NEAR(values[n], x[n], 0.15f) << n;
}

TEST(Cpp, a_decode_that_appends_matches_the_c_call) {
  Call call = append_call(), cpp = append_call();
  ASSERT_EQ(call.run(), TESSERA_OK) << tessera_last_error();
  Attention attention{.q = {cpp["q"].as<float>(), kFloat32, {kB, 2, kHq, kD}},
                      .k = {cpp["k"].as<float>(), kFloat32, {3, 12, kHkv, kD}},
                      .v = {cpp["v"].as<float>(), kFloat32, {3, 12, kHkv, kDv}},
                      .out = {cpp["out"].as<float>(), kFloat32, {kB, 2, kHq, kDv}},
                      .lse = {cpp["lse"].as<float>(), kFloat32, {kB, kHq, 2}},
                      .causal = true};
  attention.cache_seqlens = {cpp["cache_seqlens"].as<std::int32_t>(), kInt32, {kB}};
  attention.k_new = {cpp["k_new"].as<float>(), kFloat32, {kB, 2, kHkv, kD}};
  attention.v_new = {cpp["v_new"].as<float>(), kFloat32, {kB, 2, kHkv, kDv}};
  attention.rotary_cos = {cpp["rotary_cos"].as<float>(), kFloat32, {20, 3}};
  attention.rotary_sin = {cpp["rotary_sin"].as<float>(), kFloat32, {20, 3}};
  attention.rotary_seqlens = {cpp["rotary_seqlens"].as<std::int32_t>(), kInt32, {kB}};
  attention.cache_batch_idx = {cpp["cache_batch_idx"].as<std::int32_t>(), kInt32, {kB}};
  attention.leftpad_k = {cpp["leftpad_k"].as<std::int32_t>(), kInt32, {kB}};
  attention.status = {cpp["status"].as<std::int32_t>(), kInt32, {kB}};
  attention.batch_invariant = true;
  attention_decode(attention);
  for (const char* name : {"out", "lse", "k", "v", "status"}) EXPECT_EQ(cpp[name].bytes(), call[name].bytes()) << name;
  attention.rotary_interleaved = true;
  attention_decode(attention);
  EXPECT_NE(cpp["k"].bytes(), call["k"].bytes());
}

// DLPack's structs, as its header lays them out.
struct DLDevice {
  int device_type;
  std::int32_t device_id;
};
struct DLDataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

TEST(Tensor, has_the_layout_of_a_dltensor) {
  static_assert(sizeof(tessera_tensor) == sizeof(DLTensor));
  static_assert(offsetof(tessera_tensor, device) == offsetof(DLTensor, device));
  static_assert(offsetof(tessera_tensor, ndim) == offsetof(DLTensor, ndim));
  static_assert(offsetof(tessera_tensor, dtype) == offsetof(DLTensor, dtype));
  static_assert(offsetof(tessera_tensor, shape) == offsetof(DLTensor, shape));
  static_assert(offsetof(tessera_tensor, strides) == offsetof(DLTensor, strides));
  static_assert(offsetof(tessera_tensor, byte_offset) == offsetof(DLTensor, byte_offset));
}

TEST(Version, is_the_headers) {
  EXPECT_EQ(std::string(tessera_version()), std::to_string(TESSERA_VERSION_MAJOR) + "." +
                                                std::to_string(TESSERA_VERSION_MINOR) + "." +
                                                std::to_string(TESSERA_VERSION_PATCH));
  EXPECT_STREQ(tessera_status_name(TESSERA_UNSUPPORTED), "unsupported");
  EXPECT_STREQ(tessera_status_name(static_cast<tessera_status>(99)), "unknown");
}

}  // namespace
}  // namespace tessera::test
