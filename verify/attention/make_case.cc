#include "verify/attention/make_case.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/format.h"

namespace tessera::cases {

std::string describe(const Case& c) {
  const AttentionProblem& p = c.problem;
  std::string text = format("{}/{}{}/b{}_sq{}_sk{}_h{}",
                            p.op == kForward    ? "fwd"
                            : p.op == kBackward ? "bwd"
                                                : "dec",
                            p.fp8 ? "e4m3_" : "", name_of(p.dtype), p.batch, p.seq_q, p.seq_k, p.heads_q);
  if (p.heads_kv != p.heads_q) text += format(":{}", p.heads_kv);
  text += format("_d{}", p.dim_qk);
  if (p.dim_v != p.dim_qk) text += format(":{}", p.dim_v);

  std::vector<std::string> parts;
  const char* where = p.alignment == Alignment::kBottomRight ? "br" : "tl";
  const bool placed = p.causal || p.window_left >= 0 || p.window_right >= 0 || p.chunk > 0 || p.alibi;
  if (p.causal) parts.push_back(p.op == kDecode ? "causal" : format("causal_{}", where));
  if (placed && !p.causal && p.op != kDecode && p.seq_q != p.seq_k) parts.push_back(where);
  if (p.window_left >= 0 || p.window_right >= 0) {
    parts.push_back(format("window{},{}", p.window_left, p.window_right));
  }
  if (p.chunk > 0) parts.push_back(format("chunk{}", p.chunk));
  if (p.softcap > 0) parts.push_back(format("softcap{}", p.softcap));
  if (p.alibi) parts.push_back(c.slopes_per_batch ? "alibi_b" : "alibi");
  if (std::abs(p.scale * std::sqrt(static_cast<float>(p.dim_qk)) - 1) > 1e-3F) {
    parts.push_back(format("scale{:.3g}", p.scale));
  }
  if (p.varlen && p.op == kDecode) {
    parts.push_back(format("queries{}of{}", join(c.lengths_q, ","), p.total_q));
  } else if (p.varlen) {
    parts.push_back(format("varlen{}:{}", p.total_q, p.total_k));
  }
  if (p.fp8_cache) parts.push_back("e4m3_cache");
  if (has_key_scales(p)) {
    parts.push_back(format("scale_per_{}{}", name_of(p.cache_scales), c.scales_per_head ? "" : "_of_all_heads"));
  } else if ((p.fp8 || p.fp8_cache) && !c.scales_per_head) {
    parts.push_back("scale_per_tensor");
  }
  if (c.scales_per_batch) parts.push_back("scale_per_sequence");
  if (p.q_scale_block + p.k_scale_block + p.v_scale_block > 0) {
    parts.push_back(format("scales{},{},{}", p.q_scale_block, p.k_scale_block, p.v_scale_block));
  }
  if (p.rounds_to_fp8)
    parts.push_back(p.rotates ? "rotated_to_e4m3" : p.residuals ? "to_e4m3_with_residuals" : "to_e4m3");
  if (p.fp8_fast) parts.push_back("truncated_sums");
  if (c.scale_exponent != 0) parts.push_back(format("scale2^{}", c.scale_exponent));
  if (c.value_exponent != 0) parts.push_back(format("values2^{}", c.value_exponent));
  if (c.uneven > 0) parts.push_back(c.uneven == 64 ? "uneven" : format("uneven{}", c.uneven));
  if (p.paged) parts.push_back(format("page{}", p.page_size));
  if (!c.cache_lengths.empty()) {
    constexpr std::size_t kNamed = 16;
    parts.push_back(c.cache_lengths.size() <= kNamed ? format("lens{}", join(c.cache_lengths, ",")) : "ragged");
  }
  if (p.seq_new > 0) parts.push_back(format("append{}", p.seq_new));
  if (p.rotary_dim > 0) parts.push_back(format("rotary{}{}", p.rotary_dim, p.rotary_interleaved ? "i" : ""));
  if (p.rotary_dim > 0 && p.rotary_rows != p.seq_k) parts.push_back(format("of{}", p.rotary_rows));
  if (!c.rotary_lengths.empty()) parts.push_back(format("at{}", join(c.rotary_lengths, ",")));
  if (!c.cache_batch_idx.empty()) parts.push_back(format("rows{}of{}", join(c.cache_batch_idx, ","), p.cache_rows));
  if (!c.leftpad.empty()) parts.push_back(format("leftpad{}", join(c.leftpad, ",")));
  if (c.bad_page >= 0) parts.push_back(format("bad_page{}", c.bad_page));
  if (p.batch_invariant) parts.push_back("invariant");
  if (c.with_status) parts.push_back("status");
  if (c.refused) parts.push_back("refused");
  if (p.with_dlse) parts.push_back("dlse");
  if (p.op != kBackward && !p.with_lse) parts.push_back("no_lse");
  if (p.deterministic) parts.push_back("det");
  if (c.layout == Layout::kHeadsMajor) parts.push_back("heads_major");
  if (c.layout == Layout::kPadded) parts.push_back("padded");
  if (c.layout == Layout::kUnaligned) parts.push_back("unaligned");
  if (c.distribution != Distribution::kNormal) parts.push_back(name_of(c.distribution));
  if (c.seed != Case().seed) parts.push_back(format("seed{}", c.seed));
  return parts.empty() ? text : text + "/" + join(parts, "+");
}

Case make(AttentionOp op, DType dtype, const Shape& s, std::initializer_list<Change> changes) {
  Case c;
  AttentionProblem& p = c.problem;
  p.op = op;
  p.dtype = dtype;
  p.batch = s.b;
  p.seq_q = s.sq;
  p.seq_k = s.sk;
  p.heads_q = s.hq;
  p.heads_kv = s.hkv;
  p.dim_qk = s.dqk;
  p.dim_v = s.dv;
  p.scale = 1.0F / std::sqrt(static_cast<float>(s.dqk));
  p.with_lse = op != kBackward;
  if (op == kDecode) p.alignment = Alignment::kBottomRight;
  // fp32 sums in another order, and an exp that is good to an ulp or two, need tolerance in small cases, whose plain
  // computation may be exact by luck. A 16-bit result needs one rounding of its own.
  c.floor = dtype == DType::kFloat32 ? 4 : 1;
  for (const Change& change : changes) change(c);
  if (op == kBackward) p.with_lse = false;
  if (op == kDecode && !p.paged && p.cache_rows == 0) p.cache_rows = p.batch;
  p.leftpad = !c.leftpad.empty();
  if (p.rotary_dim > 0) p.rotary_rows += p.seq_k;
  c.name = describe(c);
  return c;
}

Change top_left() {
  return [](Case& c) { c.problem.alignment = Alignment::kTopLeft; };
}
Change bottom_right() {
  return [](Case& c) { c.problem.alignment = Alignment::kBottomRight; };
}
Change causal() {
  return [](Case& c) { c.problem.causal = true; };
}
Change window(std::int64_t left, std::int64_t right) {
  return [=](Case& c) {
    c.problem.window_left = left;
    c.problem.window_right = right;
  };
}
Change chunk(std::int64_t positions) {
  return [=](Case& c) { c.problem.chunk = positions; };
}
Change softcap(float cap) {
  return [=](Case& c) { c.problem.softcap = cap; };
}
Change alibi(bool per_batch) {
  return [=](Case& c) {
    c.problem.alibi = true;
    c.slopes_per_batch = per_batch;
  };
}
Change scale(float by) {
  return [=](Case& c) { c.problem.scale = by; };
}
Change dlse() {
  return [](Case& c) { c.problem.with_dlse = c.problem.op == kBackward; };
}
Change no_lse() {
  return [](Case& c) { c.problem.with_lse = false; };
}
Change layout(Layout l) {
  return [=](Case& c) { c.layout = l; };
}
Change rounded_to_fp8(bool rotated) {
  return [=](Case& c) {
    c.problem.rounds_to_fp8 = true;
    c.problem.rotates = rotated;
  };
}
Change rounded_to_fp8_with_residuals() {
  return [](Case& c) { c.problem.rounds_to_fp8 = c.problem.residuals = true; };
}
Change truncated_sums() {
  return [](Case& c) { c.problem.fp8_fast = true; };
}
Change fp8(std::int64_t q_block, std::int64_t k_block, std::int64_t v_block) {
  return [=](Case& c) {
    c.problem.fp8 = true;
    c.scales_per_head = q_block >= 0;
    // As the contract infers it: rows that one block holds have no blocks.
    const auto block = [](std::int64_t rows, std::int64_t of) { return of > 0 && rows > of ? of : 0; };
    c.problem.q_scale_block = block(c.problem.seq_q, q_block);
    c.problem.k_scale_block = block(c.problem.seq_k, k_block);
    c.problem.v_scale_block = block(c.problem.seq_k, v_block);
  };
}
Change scale_exponent(int exponent) {
  return [=](Case& c) { c.scale_exponent = exponent; };
}
Change uneven(int rows_of_v) {
  return [=](Case& c) { c.uneven = rows_of_v; };
}
Change deterministic() {
  return [](Case& c) { c.problem.deterministic = c.problem.op == kBackward; };
}
Change values(Distribution d) {
  return [=](Case& c) { c.distribution = d; };
}
Change seed(std::uint64_t number) {
  return [=](Case& c) { c.seed = number; };
}
Change varlen(const std::vector<std::int32_t>& lengths_q, const std::vector<std::int32_t>& lengths_k,
              std::int64_t slack) {
  return [=](Case& c) {
    AttentionProblem& p = c.problem;
    p.varlen = true;
    p.batch = static_cast<std::int64_t>(lengths_q.size());
    p.seq_q = *std::max_element(lengths_q.begin(), lengths_q.end());
    p.seq_k = *std::max_element(lengths_k.begin(), lengths_k.end());
    p.total_q = std::accumulate(lengths_q.begin(), lengths_q.end(), slack);
    p.total_k = std::accumulate(lengths_k.begin(), lengths_k.end(), slack);
    c.lengths_q = lengths_q;
    c.lengths_k = lengths_k;
  };
}
Change cache_lengths(const std::vector<std::int32_t>& lengths) {
  return [=](Case& c) { c.cache_lengths = lengths; };
}
Change packed_queries(const std::vector<std::int32_t>& lengths, std::int64_t slack) {
  return [=](Case& c) {
    AttentionProblem& p = c.problem;
    p.varlen = true;
    p.batch = static_cast<std::int64_t>(lengths.size());
    p.seq_q = *std::max_element(lengths.begin(), lengths.end());
    p.total_q = std::accumulate(lengths.begin(), lengths.end(), slack);
    c.lengths_q = lengths;
  };
}
Change paged(std::int64_t page_size) {
  return [=](Case& c) {
    AttentionProblem& p = c.problem;
    p.paged = true;
    p.page_size = page_size;
    p.max_pages_per_seq = (p.seq_k + page_size - 1) / page_size;
    p.seq_k = p.max_pages_per_seq * page_size;
    p.num_pages = p.batch * p.max_pages_per_seq + 2;
  };
}
Change append(std::int64_t keys) {
  return [=](Case& c) { c.problem.seq_new = keys; };
}
Change rotary(std::int64_t columns, bool interleaved, std::int64_t more) {
  return [=](Case& c) {
    c.problem.rotary_dim = columns;
    c.problem.rotary_interleaved = interleaved;
    c.problem.rotary_rows = more;  // make() adds the cache's, which a later change may pad to whole pages
  };
}
Change rotary_lengths(const std::vector<std::int32_t>& lengths) {
  return [=](Case& c) { c.rotary_lengths = lengths; };
}
Change cache_batch_idx(const std::vector<std::int32_t>& rows, std::int64_t cache_rows) {
  return [=](Case& c) {
    c.cache_batch_idx = rows;
    c.problem.cache_rows = cache_rows;
  };
}
Change leftpad(const std::vector<std::int32_t>& keys) {
  return [=](Case& c) { c.leftpad = keys; };
}
Change batch_invariant() {
  return [](Case& c) { c.problem.batch_invariant = c.compare_alone = true; };
}
Change status() {
  return [](Case& c) { c.with_status = true; };
}
Change e4m3_cache() {
  return [](Case& c) { c.problem.fp8_cache = true; };
}
Change one_scale() {
  return [](Case& c) { c.scales_per_head = false; };
}
Change scales_per_batch() {
  return [](Case& c) { c.scales_per_batch = true; };
}
Change scales_per_token() {
  return [](Case& c) {
    c.problem.fp8_cache = true;
    c.problem.cache_scales = CacheScales::kPerToken;
  };
}
Change scales_per_page() {
  return [](Case& c) {
    c.problem.fp8_cache = true;
    c.problem.cache_scales = CacheScales::kPerPage;
  };
}
Change value_exponent(int exponent) {
  return [=](Case& c) { c.value_exponent = exponent; };
}
Change queries_of(double size) {
  return [=](Case& c) {
    c.query_size = size;
    c.problem.scale /= static_cast<float>(size);
  };
}
Change refused() {
  return [](Case& c) { c.refused = c.with_status = true; };
}
Change bad_page(std::int64_t sequence) {
  return [=](Case& c) { c.bad_page = sequence; };
}

}  // namespace tessera::cases
