// Every way to spoil a call returns a sentence that names the argument, and writes nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "tests/api/fixture.h"

namespace tessera::test {
namespace {

constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max() / 2;

struct BadInput {
  const char* promise;
  Call (*make)();
  std::function<void(Call&)> spoil;
  const char* names;  // what the sentence must name
};

class Refuses : public testing::TestWithParam<BadInput> {};

TEST_P(Refuses, with_a_sentence_that_names_the_argument_and_writes_nothing) {
  const BadInput& bad = GetParam();
  Call good = bad.make();
  ASSERT_EQ(good.run(), TESSERA_OK) << "before it is spoilt: " << tessera_last_error();

  Call call = bad.make();
  bad.spoil(call);
  EXPECT_EQ(call.run(), TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(tessera_last_error()).find(bad.names), std::string::npos) << tessera_last_error();
  EXPECT_TRUE(call.outputs_untouched());

  tessera_plan* plan = nullptr;
  EXPECT_EQ(tessera_attention_plan_create(call.op, &call.args, &plan), TESSERA_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
}

Call square() { return forward_call(); }
Call rectangular() { return forward_call(3, 8); }

const BadInput kBadInputs[] = {
    {"null_q", square, [](Call& c) { c.args.q = nullptr; }, "q is null"},
    {"null_out", square, [](Call& c) { c.args.out = nullptr; }, "out is null"},
    {"null_lse_in_backward", backward_call, [](Call& c) { c.args.lse = nullptr; }, "lse is null"},
    {"null_data", square, [](Call& c) { c["k"].view.data = nullptr; }, "k.data is null"},
    {"null_shape", square, [](Call& c) { c["v"].view.shape = nullptr; }, "v.shape is null"},
    {"tensor_of_another_op", square, [](Call& c) { c.args.dq = c.args.q; }, "dq is given"},
    {"wrong_rank", square, [](Call& c) { c["q"].view.ndim = 3; }, "q has 3 dims"},
    {"absurd_rank", square, [](Call& c) { c["q"].view.ndim = 1 << 30; }, "q has"},
    {"wrong_rank_of_lse", square, [](Call& c) { c["lse"].view.ndim = 2; }, "lse has 2 dims"},
    {"mismatched_batch", square, [](Call& c) { c["k"].shape(0) = 1, c["v"].shape(0) = 1; }, "k has batch = 1"},
    {"mismatched_length_of_v", square, [](Call& c) { c["v"].shape(1) = 4; }, "v has length = 4"},
    {"mismatched_heads_of_v", square, [](Call& c) { c["v"].shape(2) = 1; }, "v has heads = 1"},
    {"mismatched_head_dim", square, [](Call& c) { c["k"].shape(3) = 4; }, "k has head dim = 4"},
    {"mismatched_out", square, [](Call& c) { c["out"].shape(3) = 8; }, "out has head dim = 8"},
    {"mismatched_lse", square, [](Call& c) { c["lse"].shape(2) = 4; }, "lse has length = 4"},
    {"mismatched_dk", backward_call, [](Call& c) { c["dk"].shape(1) = 4; }, "dk has length = 4"},
    {"negative_dim", square, [](Call& c) { c["q"].shape(1) = -5; }, "q has a negative dim"},
    {"zero_heads", square, [](Call& c) { c["q"].shape(2) = 0, c["out"].shape(2) = 0, c["lse"].shape(1) = 0; },
     "q has 0 heads"},
    {"zero_head_dim", square, [](Call& c) { c["q"].shape(3) = 0, c["k"].shape(3) = 0; }, "q has head dim 0"},
    {"heads_not_a_multiple", square, [](Call& c) { c["q"].shape(2) = 3, c["out"].shape(2) = 3, c["lse"].shape(1) = 3; },
     "q has 3 heads and k has 2"},
    {"float64", square,
     [](Call& c) {
       c["q"].view.dtype = {TESSERA_FLOAT, 64, 1};
     },
     "q is float64"},
    {"int8", square,
     [](Call& c) {
       c["k"].view.dtype = {TESSERA_INT, 8, 1};
     },
     "k is int8"},
    {"vector_lanes", square, [](Call& c) { c["q"].view.dtype.lanes = 4; }, "q is float32x4"},
    {"mixed_dtypes", square, [](Call& c) { c["v"].view.dtype = kBf16; }, "v is bf16, but q is fp32"},
    {"e4m3_without_scales", square,
     [](Call& c) {
       for (const char* name : {"q", "k", "v"}) c[name].view.dtype = kE4m3;
     },
     "q_scale is null; e4m3 needs it"},
    {"e4m3_for_one_input", square, [](Call& c) { c["q"].view.dtype = kE4m3; }, "k is fp32, but q is e4m3"},
    {"e4m3_in_backward", backward_call,
     [](Call& c) {
       for (const char* name : {"q", "k", "v", "out", "dout", "dq", "dk", "dv"}) c[name].view.dtype = kE4m3;
     },
     "out is e4m3"},
    {"scales_of_fp32", square, [](Call& c) { c.args.q_scale = &c["lse"].view; }, "q_scale is given, but q is fp32"},
    {"half_lse", square, [](Call& c) { c["lse"].view.dtype = kFp16; }, "lse is fp16"},
    {"misaligned_pointer", square, [](Call& c) { c["q"].view.byte_offset = 2; }, "q starts at address"},
    {"negative_stride", square, [](Call& c) { c["q"].stride(1) = -32; }, "q has stride -32"},
    {"overflowing_stride", square, [](Call& c) { c["q"].stride(0) = kHuge; }, "q of shape"},
    {"overflowing_stride_sum", square, [](Call& c) { c["k"].stride(1) = kHuge / 4, c["k"].stride(0) = kHuge; },
     "k of shape"},
    {"overflowing_byte_offset", square,
     [](Call& c) { c["q"].view.byte_offset = std::numeric_limits<std::uint64_t>::max() - 3; }, "q of shape"},
    {"broadcast_beyond_any_memory", square,
     [](Call& c) {
       for (const char* name : {"k", "v"}) c[name].shape(1) = std::int64_t{1} << 56, c[name].stride(1) = 0;
     },
     "k of shape"},
    {"gap_in_the_last_dim", square, [](Call& c) { c["k"].stride(3) = 2; }, "k has stride 2 in its last dim"},
    {"output_onto_itself", square, [](Call& c) { c["out"].stride(1) = 0; }, "out is written"},
    {"window_left_below_minus_one", square, [](Call& c) { c.args.window_left = -2; }, "window_left is -2"},
    {"window_right_below_minus_one", square, [](Call& c) { c.args.window_right = -9; }, "window_right is -9"},
    {"negative_chunk", square, [](Call& c) { c.args.attention_chunk = -1; }, "attention_chunk is -1"},
    {"chunk_without_alignment", rectangular, [](Call& c) { c.args.attention_chunk = 4; }, "alignment"},
    {"nan_scale", square, [](Call& c) { c.args.scale = std::nanf(""); }, "scale is nan"},
    {"infinite_scale", square, [](Call& c) { c.args.scale = INFINITY; }, "scale is inf"},
    {"negative_softcap", square, [](Call& c) { c.args.softcap = -1; }, "softcap is -1"},
    {"unknown_flag", square, [](Call& c) { c.args.flags = 1u << 10; }, "flags has unknown bits 0x400"},
    {"unknown_alignment", square, [](Call& c) { c.args.alignment = static_cast<tessera_alignment>(7); },
     "alignment is 7"},
    {"wrong_struct_size", square, [](Call& c) { c.args.struct_size = 8; }, "struct_size is 8"},
    {"unknown_device", square, [](Call& c) { c["q"].view.device.type = 77; }, "q is on device type 77"},
    {"two_devices", square, [](Call& c) { c["k"].view.device.type = TESSERA_CUDA; }, "k is on cuda:0, but q is on cpu"},
    {"causal_without_alignment", rectangular, [](Call& c) { c.args.flags = TESSERA_CAUSAL; }, "alignment"},
    {"window_without_alignment", rectangular, [](Call& c) { c.args.window_left = 2; }, "alignment"},
    {"max_seqlen_without_packing", square, [](Call& c) { c.args.max_seqlen_q = 5; }, "max_seqlen_q"},
    {"one_cu_seqlens_only", varlen_call, [](Call& c) { c.args.cu_seqlens_k = nullptr; }, "cu_seqlens_k is null"},
    {"cu_seqlens_not_at_zero", varlen_call,
     [](Call& c) {
       c.set("cu_seqlens_q", {1, 3, 3, 7});
     },
     "cu_seqlens_q[0]"},
    {"cu_seqlens_falling", varlen_call,
     [](Call& c) {
       c.set("cu_seqlens_q", {0, 5, 3, 7});
     },
     "cu_seqlens_q[2] is 3"},
    {"cu_seqlens_past_the_end", varlen_call,
     [](Call& c) {
       c.set("cu_seqlens_k", {0, 4, 6, 10});
     },
     "cu_seqlens_k ends at 10"},
    {"cu_seqlens_of_other_count", varlen_call, [](Call& c) { c["cu_seqlens_k"].shape(0) = 3; },
     "cu_seqlens_k has entries = 3"},
    {"cu_seqlens_empty", varlen_call, [](Call& c) { c["cu_seqlens_q"].shape(0) = 0; }, "cu_seqlens_q has 0 entries"},
    {"max_seqlen_too_small", varlen_call, [](Call& c) { c.args.max_seqlen_q = 2; }, "max_seqlen_q is 2"},
    {"negative_max_seqlen", varlen_call, [](Call& c) { c.args.max_seqlen_k = -1; }, "max_seqlen_k is -1"},
    {"packed_causal_without_alignment", varlen_call, [](Call& c) { c.args.flags = TESSERA_CAUSAL; }, "alignment"},
    {"cache_length_past_the_end", decode_call,
     [](Call& c) {
       c.set("cache_seqlens", {12, 13});
     },
     "cache_seqlens[1] is 13"},
    {"e4m3_cache_without_scales", e4m3_cache_call, [](Call& c) { c.args.v_scale = nullptr; },
     "v_scale is null; e4m3 needs it"},
    {"e4m3_keys_alone", e4m3_cache_call, [](Call& c) { c["v"].view.dtype = kFp32; }, "v is fp32, but k is e4m3"},
    {"e4m3_values_alone", decode_call, [](Call& c) { c["v"].view.dtype = kE4m3; }, "v is e4m3, but k is fp32"},
    {"e4m3_queries_of_a_cache", e4m3_cache_call, [](Call& c) { c["q"].view.dtype = kE4m3; },
     "q is e4m3, which attention_forward takes"},
    {"scale_of_a_cache_of_fp32", e4m3_cache_call,
     [](Call& c) {
       for (const char* name : {"k", "v"}) c[name].view.dtype = kFp32;
     },
     "k_scale is given, but k is fp32"},
    {"query_scale_of_a_cache", e4m3_cache_call, [](Call& c) { c.args.q_scale = &c["k_scale"].view; },
     "q_scale is given, but attention_decode does not take it"},
    {"blocks_of_a_cache", e4m3_cache_call, [](Call& c) { c["k_scale"].shape(2) = 2; }, "k_scale has 2 blocks"},
    {"scales_of_other_heads", e4m3_cache_call, [](Call& c) { c["v_scale"].shape(1) = 4; }, "v_scale has heads = 4"},
    {"scale_of_zero", e4m3_cache_call, [](Call& c) { c["k_scale"].as<float>()[1] = 0; }, "k_scale[0, 1, 0] is 0"},
    {"scale_of_infinity", e4m3_cache_call, [](Call& c) { c["v_scale"].as<float>()[0] = INFINITY; },
     "v_scale[0, 0, 0] is inf"},
    {"scales_per_token_of_other_keys", token_scale_call, [](Call& c) { c["k_scale"].shape(2) = 3; },
     "k_scale has keys = 3, but k gives 12"},
    {"scales_per_token_of_other_heads", token_scale_call, [](Call& c) { c["v_scale"].shape(1) = 1; },
     "v_scale has heads = 1, but k gives"},
    {"scales_per_token_of_another_batch", token_scale_call, [](Call& c) { c["v_scale"].shape(0) = 1; },
     "v_scale has batch = 1, but k gives"},
    {"scales_per_page_of_other_pages", page_scale_call, [](Call& c) { c["k_scale"].shape(0) = 2; },
     "k_scale has pages = 2, but k gives 6"},
    {"scales_of_keys_per_page", page_scale_call, [](Call& c) { c["k_scale"].shape(2) = 4; },
     "k_scale has keys = 4, but TESSERA_SCALE_PER_PAGE gives 1"},
    {"scale_of_a_key_in_use", token_scale_call, [](Call& c) { c["k_scale"].as<float>()[0] = NAN; },
     "k_scale[0, 0, 0] is nan"},
    {"scale_of_a_page_in_use", page_scale_call, [](Call& c) { c["v_scale"].as<float>()[5 * kHkv] = 0; },
     "v_scale[5, 0, 0] is 0"},
    {"scales_per_page_without_pages", e4m3_cache_call, [](Call& c) { c.args.flags = TESSERA_SCALE_PER_PAGE; },
     "flags has TESSERA_SCALE_PER_PAGE, but page_table is null"},
    {"scales_per_token_of_a_cache_of_fp32", decode_call, [](Call& c) { c.args.flags = TESSERA_SCALE_PER_TOKEN; },
     "flags has TESSERA_SCALE_PER_TOKEN, but k is not e4m3"},
    {"scales_per_token_in_forward", square, [](Call& c) { c.args.flags = TESSERA_SCALE_PER_TOKEN; },
     "which is for decode"},
    {"scales_per_page_and_token", page_scale_call, [](Call& c) { c.args.flags |= TESSERA_SCALE_PER_TOKEN; },
     "TESSERA_SCALE_PER_PAGE and TESSERA_SCALE_PER_TOKEN; one of them is accepted"},
    {"negative_cache_length", decode_call,
     [](Call& c) {
       c.set("cache_seqlens", {-1, 3});
     },
     "cache_seqlens[0] is -1"},
    {"chunk_in_backward", backward_call, [](Call& c) { c.args.attention_chunk = 4; }, "attention_chunk is 4"},
    {"top_left_decode", decode_call, [](Call& c) { c.args.alignment = TESSERA_ALIGN_TOP_LEFT; }, "alignment"},
    {"page_past_the_end", paged_call,
     [](Call& c) {
       c.set("page_table", {5, 0, 6, 1, 0, 0});
     },
     "page_table[0, 2] is 6"},
    {"negative_page", paged_call,
     [](Call& c) {
       c.set("page_table", {5, -1, 3, 1, 0, 0});
     },
     "page_table[0, 1] is -1"},
    {"page_table_of_other_batch", paged_call, [](Call& c) { c["page_table"].shape(0) = 1; }, "page_table has rows = 1"},
    {"k_new_alone", append_call, [](Call& c) { c.args.v_new = nullptr; }, "v_new is null, but k_new is given"},
    {"append_with_packed_queries", append_call, [](Call& c) { c.args.cu_seqlens_q = c.args.cache_seqlens; },
     "k_new and cu_seqlens_q are both given"},
    {"v_new_alone", append_call, [](Call& c) { c.args.k_new = nullptr; }, "k_new is null, but v_new is given"},
    {"append_without_lengths", append_call, [](Call& c) { c.args.cache_seqlens = nullptr; }, "cache_seqlens is null"},
    {"append_in_forward", square, [](Call& c) { c.args.k_new = c.args.v_new = c.args.k; }, "k_new is given"},
    {"empty_append", append_call, [](Call& c) { c["k_new"].shape(1) = c["v_new"].shape(1) = 0; }, "k_new has length 0"},
    {"append_without_queries", append_call,
     [](Call& c) { c["q"].shape(1) = c["out"].shape(1) = c["lse"].shape(2) = 0; }, "q has length 0"},
    {"k_new_of_other_batch", append_call, [](Call& c) { c["k_new"].shape(0) = 1; }, "k_new has batch = 1"},
    {"k_new_of_other_heads", append_call, [](Call& c) { c["k_new"].shape(2) = 1; }, "k_new has heads = 1"},
    {"k_new_of_other_dim", append_call, [](Call& c) { c["k_new"].shape(3) = 4; }, "k_new has head dim = 4"},
    {"k_new_of_other_type", append_call, [](Call& c) { c["k_new"].view.dtype = kBf16; }, "k_new is bf16"},
    {"v_new_of_other_length", append_call, [](Call& c) { c["v_new"].shape(1) = 1; }, "v_new has length = 1"},
    {"v_new_of_other_dim", append_call, [](Call& c) { c["v_new"].shape(3) = 8; }, "v_new has head dim = 8"},
    {"append_to_a_broadcast_cache", append_call, [](Call& c) { c["k"].stride(0) = 0; }, "k is written"},
    {"append_to_a_full_cache", append_call,
     [](Call& c) {
       c.set("cache_seqlens", {11, 0});
     },
     "cache_seqlens[0] is 11 and k_new has 2 more; the cache holds 12"},
    {"append_behind_the_end", append_call,
     [](Call& c) {
       c.set("cache_seqlens", {10, std::numeric_limits<std::int32_t>::max()});
     },
     "cache_seqlens[1] is 2147483647"},
    {"append_to_a_negative_length", append_call,
     [](Call& c) {
       c.set("cache_seqlens", {10, -2});
     },
     "cache_seqlens[1] is -2"},
    {"page_of_a_new_key_past_the_end", paged_append_call,
     [](Call& c) {
       c.set("page_table", {5, 0, 3, 1, 6, 0});
     },
     "page_table[1, 1] is 6"},
    {"append_past_the_page_table", paged_append_call,
     [](Call& c) {
       c.set("cache_seqlens", {12, 4});
     },
     "cache_seqlens[0] is 12 and k_new has 1 more"},
    {"rotary_cos_alone", append_call, [](Call& c) { c.args.rotary_sin = nullptr; }, "rotary_sin is null"},
    {"rotary_sin_alone", append_call, [](Call& c) { c.args.rotary_cos = nullptr; }, "rotary_cos is null"},
    {"rotary_without_new_keys", append_call, [](Call& c) { c.args.k_new = c.args.v_new = nullptr; },
     "rotary_cos is given, but k_new is null"},
    {"rotary_of_other_rank", append_call, [](Call& c) { c["rotary_cos"].view.ndim = 1; }, "rotary_cos has 1 dims"},
    {"rotary_of_other_type", append_call, [](Call& c) { c["rotary_sin"].view.dtype = kFp16; }, "rotary_sin is fp16"},
    {"rotary_of_two_lengths", append_call, [](Call& c) { c["rotary_sin"].shape(0) = 19; },
     "rotary_sin has positions = 19"},
    {"rotary_of_two_widths", append_call, [](Call& c) { c["rotary_sin"].shape(1) = 2; }, "rotary_sin has columns = 2"},
    {"rotary_wider_than_the_head", append_call,
     [](Call& c) { c["rotary_cos"].shape(1) = c["rotary_sin"].shape(1) = 5; }, "rotary_cos has 5 columns"},
    {"rotary_of_no_columns", append_call, [](Call& c) { c["rotary_cos"].shape(1) = c["rotary_sin"].shape(1) = 0; },
     "rotary_cos has 0 columns"},
    {"rotary_position_past_the_end", append_call,
     [](Call& c) {
       c.set("rotary_seqlens", {19, 0});
     },
     "rotary_seqlens[0] is 19"},
    {"negative_rotary_position", append_call,
     [](Call& c) {
       c.set("rotary_seqlens", {0, -1});
     },
     "rotary_seqlens[1] is -1"},
    {"cache_length_past_the_rotary_positions", append_call,
     [](Call& c) {
       c.args.rotary_seqlens = nullptr;
       c["rotary_cos"].shape(0) = c["rotary_sin"].shape(0) = 11;
     },
     "cache_seqlens[0] is 10, but rotary_cos has 11 positions"},
    {"rotary_seqlens_without_rotary", append_call, [](Call& c) { c.args.rotary_cos = c.args.rotary_sin = nullptr; },
     "rotary_seqlens is given, but rotary_cos is null"},
    {"rotary_seqlens_of_other_count", append_call, [](Call& c) { c["rotary_seqlens"].shape(0) = 1; },
     "rotary_seqlens has entries = 1"},
    {"interleaved_without_rotary", decode_call, [](Call& c) { c.args.flags = TESSERA_ROTARY_INTERLEAVED; },
     "TESSERA_ROTARY_INTERLEAVED"},
    {"fp8_rotate_without_fp8", square, [](Call& c) { c.args.flags = TESSERA_FP8_ROTATE; }, "but not TESSERA_FP8"},
    {"fp8_fast_without_fp8", square, [](Call& c) { c.args.flags = TESSERA_FP8_FAST; }, "q is not e4m3"},
    {"fp8_residual_without_fp8", square, [](Call& c) { c.args.flags = TESSERA_FP8_RESIDUAL; }, "but not TESSERA_FP8"},
    {"fp8_rotate_and_residual", square,
     [](Call& c) { c.args.flags = TESSERA_FP8 | TESSERA_FP8_ROTATE | TESSERA_FP8_RESIDUAL; }, "one of them is accepted"},
    {"fp8_chunk", square,
     [](Call& c) {
       c.args.flags = TESSERA_FP8;
       c.args.attention_chunk = 4;
     },
     "attention_chunk is 4, which is not taken with e4m3"},
    {"batch_invariant_forward", square, [](Call& c) { c.args.flags = TESSERA_BATCH_INVARIANT; },
     "TESSERA_BATCH_INVARIANT"},
    {"cache_row_past_the_end", append_call, [](Call& c) { c.set("cache_batch_idx", {3, 0}); },
     "cache_batch_idx[0] is 3"},
    {"negative_cache_row", append_call, [](Call& c) { c.set("cache_batch_idx", {2, -1}); }, "cache_batch_idx[1] is -1"},
    {"cache_rows_of_other_count", append_call, [](Call& c) { c["cache_batch_idx"].shape(0) = 1; },
     "cache_batch_idx has entries = 1"},
    {"cache_rows_and_pages", paged_call, [](Call& c) { c.args.cache_batch_idx = c.args.cache_seqlens; },
     "cache_batch_idx and page_table"},
    {"cache_of_other_batch", append_call, [](Call& c) { c.args.cache_batch_idx = nullptr; }, "k has batch = 3"},
    {"negative_left_padding", append_call, [](Call& c) { c.set("leftpad_k", {0, -4}); }, "leftpad_k[1] is -4"},
    {"left_padding_of_other_count", append_call, [](Call& c) { c["leftpad_k"].shape(0) = 1; },
     "leftpad_k has entries = 1"},
    {"status_of_other_count", append_call, [](Call& c) { c["status"].shape(0) = 1; }, "status has entries = 1"},
    {"status_of_other_type", append_call, [](Call& c) { c["status"].view.dtype = kFp32; }, "status is"},
};

INSTANTIATE_TEST_SUITE_P(BadInput, Refuses, testing::ValuesIn(kBadInputs),
                         [](const auto& info) { return std::string(info.param.promise); });

}  // namespace
}  // namespace tessera::test
