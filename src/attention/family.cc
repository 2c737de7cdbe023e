#include "attention/family.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "attention/backward_convert.h"
#include "attention/backward_preprocess.h"
#include "attention/cache_append.h"
#include "attention/gpu.h"
#include "attention/params.h"
#include "attention/quantize_fp8.h"
#include "attention/value_transpose.h"
#include "base/arithmetic.h"
#include "base/format.h"

// Every kernel of the family; each has a host file of that name. One line adds a kernel.
#define TESSERA_ATTENTION_KERNELS(each)                                                                    \
  each(backward) each(backward_sm90) each(backward_wide_sm90) each(decode) each(forward) each(forward_fp8) \
      each(forward_fp8_sm90) each(forward_sm90) each(cpu)

namespace tessera {
namespace attention {

#define TESSERA_DECLARE(name) Implementation name();
TESSERA_ATTENTION_KERNELS(TESSERA_DECLARE)
#undef TESSERA_DECLARE

}  // namespace attention

const std::vector<attention::Implementation>& AttentionFamily::implementations() {
#define TESSERA_LIST(name) attention::name(),
  static const std::vector<attention::Implementation> list = {TESSERA_ATTENTION_KERNELS(TESSERA_LIST)};
#undef TESSERA_LIST
  return list;
}

std::string AttentionFamily::describe(const Problem& p) {
  std::string text = format("{} {}{} ", name_of(p.op), p.fp8 ? "e4m3 to " : "", name_of(p.dtype));
  if (p.rounds_to_fp8) {
    text += p.rotates     ? "rotated and rounded to e4m3 "
            : p.residuals ? "rounded to e4m3 with residuals "
                          : "rounded to e4m3 ";
  }
  if (p.fp8_fast) text += "with truncated sums ";
  if (p.varlen) {
    text += format("{} packed sequences, Sq<={} Sk{}{}", p.batch, p.seq_q,
                   p.op == AttentionOp::kDecode ? "=" : "<=", p.seq_k);
  } else {
    text += format("B={} Sq={} Sk={}", p.batch, p.seq_q, p.seq_k);
  }
  text += format(" Hq={} Hkv={} Dqk={} Dv={}", p.heads_q, p.heads_kv, p.dim_qk, p.dim_v);
  if (p.fp8_cache) text += " e4m3 cache";
  if (has_key_scales(p)) text += format(" scales per {}", name_of(p.cache_scales));
  if (p.paged) text += format(" pages of {}", p.page_size);
  const bool by_position = attention::is_masked(p) || p.alibi;
  if (p.causal) text += " causal";
  if (p.window_left >= 0 || p.window_right >= 0) text += format(" window({}, {})", p.window_left, p.window_right);
  if (p.chunk > 0) text += format(" chunk={}", p.chunk);
  if (p.alibi) text += " alibi";
  if (by_position) text += p.alignment == Alignment::kTopLeft ? " top-left" : " bottom-right";
  if (p.softcap > 0) text += format(" softcap={}", p.softcap);
  if (p.q_scale_block > 0) text += format(" q_scale/{}", p.q_scale_block);
  if (p.k_scale_block > 0) text += format(" k_scale/{}", p.k_scale_block);
  if (p.v_scale_block > 0) text += format(" v_scale/{}", p.v_scale_block);
  if (p.leftpad) text += " leftpad";
  if (p.seq_new > 0) text += format(" appends {}", p.seq_new);
  if (p.rotary_dim > 0) text += format(" rotary {}{}", p.rotary_dim, p.rotary_interleaved ? " interleaved" : "");
  if (p.batch_invariant) text += " batch_invariant";
  if (p.with_dlse) text += " dlse";
  if (p.deterministic) text += " deterministic";
  return text;
}

engine::Fields AttentionFamily::fields(const Problem& p) {
  engine::Fields fields = {{"dtype", std::string(name_of(p.dtype))},
                           {"batch", p.batch},
                           {"seq_q", p.seq_q},
                           {"seq_k", p.seq_k},
                           {"heads_q", p.heads_q},
                           {"heads_kv", p.heads_kv},
                           {"dim_qk", p.dim_qk},
                           {"dim_v", p.dim_v},
                           {"causal", p.causal}};
  // Fields that few problems have are named only if this one has them.
  const auto add = [&](const char* name, bool present, const auto& value) {
    if (present) fields.push_back({name, value});
  };
  add("alignment", p.alignment == Alignment::kBottomRight, std::string("bottom_right"));
  add("window_left", p.window_left >= 0, p.window_left);
  add("window_right", p.window_right >= 0, p.window_right);
  add("chunk", p.chunk > 0, p.chunk);
  const auto usual = 1.0f / std::sqrt(static_cast<float>(p.dim_qk));
  add("scale", std::abs(p.scale - usual) > 1e-6f * usual, static_cast<double>(p.scale));
  add("softcap", p.softcap > 0, static_cast<double>(p.softcap));
  add("fp8", p.fp8, true);
  add("fp8_cache", p.fp8_cache, true);
  add("cache_scales", has_key_scales(p), std::string(name_of(p.cache_scales)));
  add("rounds_to_fp8", p.rounds_to_fp8, true);
  add("rotates", p.rotates, true);
  add("residuals", p.residuals, true);
  add("fp8_fast", p.fp8_fast, true);
  add("q_scale_block", p.q_scale_block > 0, p.q_scale_block);
  add("k_scale_block", p.k_scale_block > 0, p.k_scale_block);
  add("v_scale_block", p.v_scale_block > 0, p.v_scale_block);
  add("alibi", p.alibi, true);
  add("varlen", p.varlen, true);
  add("total_q", p.varlen, p.total_q);
  add("total_k", p.varlen && p.op != AttentionOp::kDecode, p.total_k);
  add("page_size", p.paged, p.page_size);
  add("leftpad", p.leftpad, true);
  add("seq_new", p.seq_new > 0, p.seq_new);
  add("rotary_dim", p.rotary_dim > 0, p.rotary_dim);
  add("rotary_interleaved", p.rotary_interleaved, true);
  add("batch_invariant", p.batch_invariant, true);
  add("dlse", p.with_dlse, true);
  add("deterministic", p.deterministic, true);
  return fields;
}

bool AttentionFamily::covers(const Problem& planned, const Problem& given) {
  if (given == planned) return true;
  Problem asked = given;
  if (planned.varlen && asked.varlen && asked.seq_q <= planned.seq_q && asked.seq_k <= planned.seq_k) {
    asked.seq_q = planned.seq_q;
    if (asked.op != AttentionOp::kDecode) asked.seq_k = planned.seq_k;  // decode's is what the cache holds
  }
  // A kernel that does not need a property takes tensors with and without it.
  if (!planned.vectors) asked.vectors = false;
  if (!planned.tensor_maps) asked.tensor_maps = false;
  return asked == planned;
}

std::string AttentionFamily::difference(const Problem& planned, const Problem& given) {
  std::string text;
  const auto compare = [&](const char* what, const auto& was, const auto& is) {
    if (was != is) text += format("{}{} is {}, not {}", text.empty() ? "" : "; ", what, is, was);
  };
  compare("dtype", std::string(name_of(planned.dtype)), std::string(name_of(given.dtype)));
  compare("q e4m3", planned.fp8, given.fp8);
  compare("cache e4m3", planned.fp8_cache, given.fp8_cache);
  compare("scales of the cache", std::string(name_of(planned.cache_scales)), std::string(name_of(given.cache_scales)));
  compare("rounded to e4m3", planned.rounds_to_fp8, given.rounds_to_fp8);
  compare("rotated", planned.rotates, given.rotates);
  compare("residuals", planned.residuals, given.residuals);
  compare("truncated sums", planned.fp8_fast, given.fp8_fast);
  compare("rows per scale of q", planned.q_scale_block, given.q_scale_block);
  compare("rows per scale of k", planned.k_scale_block, given.k_scale_block);
  compare("rows per scale of v", planned.v_scale_block, given.v_scale_block);
  compare("packed by cu_seqlens", planned.varlen, given.varlen);
  compare("batch", planned.batch, given.batch);
  compare("Sq", planned.seq_q, given.seq_q);
  compare("Sk", planned.seq_k, given.seq_k);
  compare("rows of q", planned.total_q, given.total_q);
  compare("rows of k", planned.total_k, given.total_k);
  compare("Hq", planned.heads_q, given.heads_q);
  compare("Hkv", planned.heads_kv, given.heads_kv);
  compare("Dqk", planned.dim_qk, given.dim_qk);
  compare("Dv", planned.dim_v, given.dim_v);
  compare("scale", planned.scale, given.scale);
  compare("softcap", planned.softcap, given.softcap);
  compare("causal", planned.causal, given.causal);
  compare("window_left", planned.window_left, given.window_left);
  compare("window_right", planned.window_right, given.window_right);
  compare("attention_chunk", planned.chunk, given.chunk);
  compare("bottom-right alignment", planned.alignment == Alignment::kBottomRight,
          given.alignment == Alignment::kBottomRight);
  compare("alibi_slopes given", planned.alibi, given.alibi);
  compare("page_table given", planned.paged, given.paged);
  compare("page size", planned.page_size, given.page_size);
  compare("pages", planned.num_pages, given.num_pages);
  compare("pages of a sequence", planned.max_pages_per_seq, given.max_pages_per_seq);
  compare("leftpad_k given", planned.leftpad, given.leftpad);
  compare("batch of k", planned.cache_rows, given.cache_rows);
  compare("new keys", planned.seq_new, given.seq_new);
  compare("rotary columns", planned.rotary_dim, given.rotary_dim);
  compare("rotary positions", planned.rotary_rows, given.rotary_rows);
  compare("rotary pairs interleaved", planned.rotary_interleaved, given.rotary_interleaved);
  compare("batch_invariant", planned.batch_invariant, given.batch_invariant);
  compare("lse given", planned.with_lse, given.with_lse);
  compare("dlse given", planned.with_dlse, given.with_dlse);
  compare("deterministic", planned.deterministic, given.deterministic);
  compare("every row at a multiple of 16 bytes", planned.vectors, given.vectors);
  compare("strides of all inputs positive", planned.tensor_maps, given.tensor_maps);
  return text;
}

namespace {

// The exponent of the nearest power of two, by ratio.
int bucket(std::int64_t size) {
  if (size <= 1) return 0;
  const int floor = std::bit_width(static_cast<std::uint64_t>(size)) - 1;
  const double power = static_cast<double>(std::int64_t{1} << floor);
  return floor + (static_cast<double>(size) > power * 1.41421356 ? 1 : 0);
}

}  // namespace

// E.g. "attention_forward bf16 d128x128 masked q2^13 k2^13 many". q and k: the nearest power of two to the queries and
// to the most keys that one of them sees. many: there are at least as many tiles of 128 queries, of all heads, as
// multiprocessors; else few.
std::string AttentionFamily::tuning_class(const Problem& p, int multiprocessors) {
  constexpr std::int64_t kRows = 128;
  const std::int64_t tiles = saturating_product(ceil_div(p.seq_q, kRows), p.batch, p.heads_q);
  const char* const e4m3 = has_key_scales(p)                            ? "e4m3 cache with scales of keys "
                           : p.fp8_cache                                ? "e4m3 cache "
                           : p.residuals                                ? "rounded to e4m3 with residuals "
                           : p.rounds_to_fp8                            ? "rounded to e4m3 "
                           : !p.fp8                                     ? ""
                           : p.k_scale_block > 0 || p.v_scale_block > 0 ? "e4m3 in blocks to "
                                                                        : "e4m3 to ";
  return format("{} {}{}{} d{}x{}{}{}{}{} q2^{} k2^{} {}", name_of(p.op), e4m3, p.fp8_fast ? "truncated " : "",
                name_of(p.dtype), p.dim_qk, p.dim_v, attention::is_masked(p) ? " masked" : "",
                attention::has_score_mod(p) ? " score_mod" : "", p.deterministic ? " deterministic" : "",
                p.heads_q > p.heads_kv ? format(" group {}", p.heads_q / p.heads_kv) : "", bucket(p.seq_q),
                bucket(attention::most_keys_seen(p)), tiles >= multiprocessors ? "many" : "few");
}

// The head dim of most is a run-time value, so these few instances are all there are.
std::vector<jit::KernelInstance> AttentionFamily::shared_steps(const engine::Device& device) {
  std::vector<jit::KernelInstance> list;
  if (device.compute == 90 && device.specific) {
    list.push_back(attention::instance_of(attention::kValueTranspose));
    for (const int dim : {80, 128, 256}) {
      QuantizeFp8Config config = attention::quantize_config(DType::kBFloat16, dim, 0, 128);
      list.push_back(attention::instance_of(config));
      config = attention::quantize_config(DType::kBFloat16, dim, 0);
      config.rotates = config.values = true;
      list.push_back(attention::instance_of(config));
    }
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int vector : {8, 1}) {
      list.push_back(attention::instance_of(attention::preprocess_config(dtype, vector)));
      list.push_back(attention::instance_of(attention::convert_config(dtype, vector)));
      list.push_back(attention::instance_of(attention::append_config(dtype, vector)));
    }
  }
  return list;
}

}  // namespace tessera
