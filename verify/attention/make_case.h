// How suites write their cases: an op, a type, a shape and a list of changes.
#pragma once

#include <functional>
#include <initializer_list>
#include <vector>

#include "verify/attention/cases.h"

namespace tessera::cases {

constexpr AttentionOp kForward = AttentionOp::kForward;
constexpr AttentionOp kBackward = AttentionOp::kBackward;
constexpr AttentionOp kDecode = AttentionOp::kDecode;

struct Shape {
  std::int64_t b, sq, sk, hq, hkv, dqk, dv;
};

using Change = std::function<void(Case&)>;

// With its name.
Case make(AttentionOp op, DType dtype, const Shape& s, std::initializer_list<Change> changes = {});
std::string describe(const Case& c);

Change top_left();
Change bottom_right();
Change causal();
Change window(std::int64_t left, std::int64_t right);
Change chunk(std::int64_t positions);
Change softcap(float cap);
Change alibi(bool per_batch = false);
Change scale(float by);
Change dlse();
Change no_lse();
Change layout(Layout l);
// q, k and v of e4m3, with scales per block of so many rows, or per head (0), or per tensor (-1, of all).
Change fp8(std::int64_t q_block = 0, std::int64_t k_block = 0, std::int64_t v_block = 0);
// q, k and v are rounded to e4m3 by the call.
Change rounded_to_fp8(bool rotated = false);
Change rounded_to_fp8_with_residuals();
// Sums of many keys may be truncated.
Change truncated_sums();
Change scale_exponent(int exponent);
Change uneven(int rows_of_v = 64);
Change deterministic();
Change values(Distribution d);
Change seed(std::uint64_t number);
// slack: rows of q and k behind the last sequence.
Change varlen(const std::vector<std::int32_t>& lengths_q, const std::vector<std::int32_t>& lengths_k,
              std::int64_t slack = 0);

// Decode.
Change cache_lengths(const std::vector<std::int32_t>& lengths);  // before an append
Change packed_queries(const std::vector<std::int32_t>& lengths, std::int64_t slack = 0);
Change paged(std::int64_t page_size);
Change append(std::int64_t keys);
// Of the first `columns`; positions are as many as the cache has, and `more`.
Change rotary(std::int64_t columns, bool interleaved = false, std::int64_t more = 0);
Change rotary_lengths(const std::vector<std::int32_t>& lengths);
Change cache_batch_idx(const std::vector<std::int32_t>& rows, std::int64_t cache_rows);
Change leftpad(const std::vector<std::int32_t>& keys);
Change batch_invariant();
Change status();
// k and v of e4m3, with scales per head, that are no powers of two; or of all, or of each sequence, too.
Change e4m3_cache();
Change one_scale();
Change scales_per_batch();
// Or with scales beside the keys.
Change scales_per_token();
Change scales_per_page();
Change value_exponent(int exponent);
// q near such a value; the scale of scores is divided by it.
Change queries_of(double size);
Change refused();  // with status
Change bad_page(std::int64_t sequence);

// Decode's part of the suites (decode_suites.cc).
void add_quick_decode(std::vector<Case>& out, DType dtype);
void add_full_decode(std::vector<Case>& out, DType dtype);
void add_hostile_decode(std::vector<Case>& out, DType dtype);
void add_sanitize_decode(std::vector<Case>& out);

// e4m3's part (fp8_suites.cc).
void add_quick_fp8(std::vector<Case>& out);
void add_full_fp8(std::vector<Case>& out);
void add_hostile_fp8(std::vector<Case>& out);
void add_sanitize_fp8(std::vector<Case>& out);
void add_bench_fp8(std::vector<Case>& out);

}  // namespace tessera::cases
