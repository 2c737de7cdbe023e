// Attention problems by flags of the command line.
#include <algorithm>
#include <deque>
#include <map>

#include "attention/check.h"
#include "attention/family.h"
#include "base/format.h"
#include "base/tensor.h"
#include "tessera/attention.h"
#include "verify/attention/family.h"
#include "verify/attention/flags.h"

namespace tessera::verify {
namespace {

struct Options {
  std::string op = "forward";
  std::string dtype = "bf16";
  std::int64_t b = 1, sq = 2048, scale_block = 0, sk = -1, hq = 8, hkv = -1, d = 64, dv = -1;
  bool is_causal = false;
  std::string causal, align;
  std::vector<std::int64_t> window;
  float scale = 0, softcap = 0;
  bool alibi = false, varlen = false, lse = false, dlse = false, deterministic = false, cache_lengths = false;
  std::int64_t page_size = 0, append = 0, rotary = 0, chunk = 0;
  bool interleaved = false, cache_batch_idx = false, leftpad = false, batch_invariant = false, fp8 = false,
       rotate = false, residual = false, fp8_fast = false, e4m3_cache = false;
  std::string cache_scales = "head";
};

const std::map<std::string, tessera_attention_op> kOps{{"forward", TESSERA_ATTENTION_FORWARD},
                                                       {"backward", TESSERA_ATTENTION_BACKWARD},
                                                       {"decode", TESSERA_ATTENTION_DECODE}};
const std::map<std::string, tessera_dtype> kTypes{{"fp32", {TESSERA_FLOAT, 32, 1}},
                                                  {"fp16", {TESSERA_FLOAT, 16, 1}},
                                                  {"bf16", {TESSERA_BFLOAT, 16, 1}},
                                                  {"e4m3", {TESSERA_FLOAT8_E4M3FN, 8, 1}}};

// Tensors without data: explain looks at shapes only.
class Shapes {
 public:
  explicit Shapes(tessera_device device) : device_(device) {}
  const tessera_tensor* add(tessera_dtype dtype, std::vector<std::int64_t> shape) {
    shapes_.push_back(std::move(shape));
    tessera_tensor t{};
    t.device = device_;
    t.ndim = static_cast<std::int32_t>(shapes_.back().size());
    t.dtype = dtype;
    t.shape = shapes_.back().data();
    tensors_.push_back(t);
    return &tensors_.back();
  }

 private:
  tessera_device device_;
  std::deque<std::vector<std::int64_t>> shapes_;
  std::deque<tessera_tensor> tensors_;
};

tessera_attention arguments(const Options& o, Shapes& shapes) {
  const std::int64_t sk = o.sk < 0 ? o.sq : o.sk;
  const std::int64_t hkv = o.hkv < 0 ? o.hq : o.hkv;
  const std::int64_t dv = o.dv < 0 ? o.d : o.dv;
  const tessera_dtype type = kTypes.at(o.dtype);
  const tessera_dtype fp32 = kTypes.at("fp32");
  const tessera_dtype int32{TESSERA_INT, 32, 1};
  const bool backward = o.op == "backward";

  using Dims = std::vector<std::int64_t>;
  const auto rows_q = [&](std::int64_t d) { return o.varlen ? Dims{o.b * o.sq, o.hq, d} : Dims{o.b, o.sq, o.hq, d}; };
  const std::int64_t pages = o.page_size > 0 ? (sk + o.page_size - 1) / o.page_size : 0;
  const auto rows_k = [&](std::int64_t d) {
    if (o.page_size > 0) return Dims{o.b * pages, o.page_size, hkv, d};
    return o.varlen && o.op != "decode" ? Dims{o.b * sk, hkv, d} : Dims{o.b, sk, hkv, d};
  };
  const Dims rows = o.varlen ? Dims{o.hq, o.b * o.sq} : Dims{o.b, o.hq, o.sq};

  tessera_attention a = TESSERA_ATTENTION_INIT;
  a.q = shapes.add(type, rows_q(o.d));
  const tessera_dtype cache_type = o.e4m3_cache ? kTypes.at("e4m3") : type;
  a.k = shapes.add(cache_type, rows_k(o.d));
  a.v = shapes.add(cache_type, rows_k(dv));
  if (o.e4m3_cache) {
    Dims scales = {1, hkv, 1};
    if (o.cache_scales == "page") {
      scales = {o.b * pages, hkv, 1};
      a.flags |= TESSERA_SCALE_PER_PAGE;
    } else if (o.cache_scales == "token") {
      scales = {rows_k(o.d)[0], hkv, rows_k(o.d)[1]};
      a.flags |= TESSERA_SCALE_PER_TOKEN;
    }
    a.k_scale = a.v_scale = shapes.add(fp32, scales);
  }
  a.out = shapes.add(o.dtype == "e4m3" ? kTypes.at("bf16") : type, rows_q(dv));
  if (o.dtype == "e4m3") {
    const auto scales = [&](std::int64_t heads, std::int64_t rows) {
      const std::int64_t blocks = o.scale_block > 0 ? (rows + o.scale_block - 1) / o.scale_block : 1;
      return shapes.add(fp32, {o.b, heads, std::max<std::int64_t>(blocks, 1)});
    };
    a.q_scale = scales(o.hq, o.sq);
    a.k_scale = scales(hkv, sk);
    a.v_scale = scales(hkv, sk);
  }
  if (backward || o.lse) a.lse = shapes.add(fp32, rows);
  if (backward) {
    a.dout = shapes.add(type, rows_q(dv));
    a.dq = shapes.add(type, rows_q(o.d));
    a.dk = shapes.add(type, rows_k(o.d));
    a.dv = shapes.add(type, rows_k(dv));
  }
  if (o.dlse) a.dlse = shapes.add(fp32, rows);
  a.scale = o.scale;
  a.softcap = o.softcap;
  if (o.alibi) a.alibi_slopes = shapes.add(fp32, {o.hq});
  if (o.is_causal) a.flags |= TESSERA_CAUSAL;
  if (o.deterministic) a.flags |= TESSERA_DETERMINISTIC;
  const std::string& align = o.align.empty() ? o.causal : o.align;
  if (align == "top_left") a.alignment = TESSERA_ALIGN_TOP_LEFT;
  if (align == "bottom_right") a.alignment = TESSERA_ALIGN_BOTTOM_RIGHT;
  if (o.window.size() == 2) {
    a.window_left = o.window[0];
    a.window_right = o.window[1];
  }
  a.attention_chunk = o.chunk;
  if (o.varlen) {
    a.cu_seqlens_q = shapes.add(int32, {o.b + 1});
    a.max_seqlen_q = o.sq;
  }
  if (o.varlen && o.op != "decode") {
    a.cu_seqlens_k = shapes.add(int32, {o.b + 1});
    a.max_seqlen_k = sk;
  }
  if (o.cache_lengths || o.page_size > 0 || o.append > 0) a.cache_seqlens = shapes.add(int32, {o.b});
  if (o.page_size > 0) a.page_table = shapes.add(int32, {o.b, pages});
  if (o.append > 0) {
    a.k_new = shapes.add(type, {o.b, o.append, hkv, o.d});
    a.v_new = shapes.add(type, {o.b, o.append, hkv, dv});
  }
  if (o.rotary > 0) {  // as many positions as the cache has, and those of queries that are not appended
    const std::int64_t positions = std::max(pages * o.page_size, sk) + o.sq;
    a.rotary_cos = shapes.add(type, {positions, o.rotary / 2});
    a.rotary_sin = shapes.add(type, {positions, o.rotary / 2});
  }
  if (o.interleaved) a.flags |= TESSERA_ROTARY_INTERLEAVED;
  if (o.batch_invariant) a.flags |= TESSERA_BATCH_INVARIANT;
  if (o.fp8) a.flags |= TESSERA_FP8;
  if (o.rotate) a.flags |= TESSERA_FP8_ROTATE;
  if (o.residual) a.flags |= TESSERA_FP8_RESIDUAL;
  if (o.fp8_fast) a.flags |= TESSERA_FP8_FAST;
  if (o.cache_batch_idx) a.cache_batch_idx = shapes.add(int32, {o.b});
  if (o.leftpad) a.leftpad_k = shapes.add(int32, {o.b});
  return a;
}

std::int32_t to_int32(std::int64_t x) { return static_cast<std::int32_t>(x); }

Result<Options> options_from(const FlagValues& values) {
  Options o;
  const auto given = [&](const char* flag) { return values.count(flag) > 0; };
  const auto text = [&](const char* flag, std::string& to) {
    if (given(flag) && !values.at(flag).empty()) to = values.at(flag).front();
  };
  text("--op", o.op);
  text("--dtype", o.dtype);
  text("--causal", o.causal);
  text("--align", o.align);
  text("--cache-scales", o.cache_scales);
  o.is_causal = given("--causal");
  o.alibi = given("--alibi");
  o.varlen = given("--varlen");
  o.cache_lengths = given("--cache-lengths");
  o.lse = given("--lse");
  o.dlse = given("--dlse");
  o.deterministic = given("--deterministic");
  o.interleaved = given("--interleaved");
  o.cache_batch_idx = given("--cache-batch-idx");
  o.leftpad = given("--leftpad");
  o.batch_invariant = given("--batch-invariant");
  o.e4m3_cache = given("--e4m3-cache");
  o.fp8 = given("--fp8");
  o.rotate = given("--rotate");
  o.residual = given("--residual");
  o.fp8_fast = given("--fp8-fast");
  const std::vector<std::pair<const char*, std::int64_t*>> sizes = {
      {"--b", &o.b},           {"--sq", &o.sq},         {"--sk", &o.sk},       {"--hq", &o.hq},
      {"--hkv", &o.hkv},       {"--d", &o.d},           {"--dv", &o.dv},       {"--page-size", &o.page_size},
      {"--append", &o.append}, {"--rotary", &o.rotary}, {"--chunk", &o.chunk}, {"--scale-block", &o.scale_block}};
  const Status read = read_sizes(values, sizes, 0, 40);
  if (!read.ok()) return read;
  for (const auto& [flag, to] : {std::pair{"--scale", &o.scale}, std::pair{"--softcap", &o.softcap}}) {
    if (!given(flag)) continue;
    if (Status s = read_number(flag, values.at(flag).front(), *to); !s.ok()) return s;
  }
  if (given("--cache-scales") && !o.e4m3_cache) return invalid("--cache-scales is for --e4m3-cache");
  if (given("--scale-block") && o.dtype != "e4m3") return invalid("--scale-block is for --dtype e4m3");
  if (o.scale_block != 0 && o.scale_block != 64 && o.scale_block != 128) {
    return invalid(format("--scale-block is {}; 64, 128 and 0 are accepted", o.scale_block));
  }
  if (o.is_causal && !o.align.empty()) return invalid("--align is for masks without --causal, which names its own");
  if (o.rotary % 2 != 0) return invalid(format("--rotary is {}; an even number of columns is accepted", o.rotary));
  if (given("--window")) {
    for (const std::string& edge : values.at("--window")) {
      if (Status s = read_number("--window", edge, o.window.emplace_back()); !s.ok()) return s;
    }
  }
  return o;
}

}  // namespace

std::vector<Flag> attention_flags() {
  const std::vector<std::string> alignments = {"top_left", "bottom_right"};
  return {
      {"--op", "OP", "forward, backward or decode", "forward", {"forward", "backward", "decode"}},
      {"--dtype", "TYPE", "fp32, fp16, bf16 or (forward, to bf16) e4m3", "bf16", {"fp32", "fp16", "bf16", "e4m3"}},
      {"--scale-block", "N", "e4m3: rows that share a scale, 64 or 128; 0: all of a head", "0", {}},
      {"--b", "N", "Sequences", "1", {}},
      {"--sq", "N", "Queries of a sequence", "2048", {}},
      {"--sk", "N", "Keys of a sequence; default: --sq", "", {}},
      {"--hq", "N", "Query heads", "8", {}},
      {"--hkv", "N", "Key heads; default: --hq", "", {}},
      {"--d", "N", "Head dim of q and k", "64", {}},
      {"--dv", "N", "Head dim of v; default: --d", "", {}},
      {"--causal", "ALIGN", "top_left or bottom_right; may stand alone if --sq equals --sk", "", alignments, 0, 1},
      {"--align", "ALIGN", "Alignment of a window or ALiBi without --causal", "", alignments},
      {"--window", "L,R", "Keys seen left and right of the query's own; -1: all", "", {}, 2, 2},
      {"--chunk", "N", "Queries see only keys of their own chunk of N positions; 0: all", "0", {}},
      {"--scale", "X", "Of the scores; 0: 1 / sqrt(d)", "0", {}},
      {"--softcap", "X", "0: none", "0", {}},
      {"--alibi", "", "With ALiBi slopes", "", {}},
      {"--varlen", "", "Packed sequences of at most --sq and --sk; decode: packed queries", "", {}},
      {"--cache-lengths", "", "decode: lengths per sequence", "", {}},
      {"--e4m3-cache", "", "decode: k and v are e4m3, with scales", "", {}},
      {"--cache-scales", "OF", "e4m3-cache: a scale for each head, page or token", "head", {"head", "page", "token"}},
      {"--page-size", "N", "decode: a paged cache", "", {}},
      {"--append", "N", "decode: new keys of a sequence, written to the cache", "", {}},
      {"--rotary", "N", "decode: with rotary embedding of the first N columns of q and the new keys", "", {}},
      {"--interleaved", "", "decode: rotary pairs are columns 2i and 2i + 1", "", {}},
      {"--cache-batch-idx", "", "decode: each sequence names its row of the cache", "", {}},
      {"--leftpad", "", "decode: sequences begin behind padding", "", {}},
      {"--batch-invariant", "", "decode: results do not depend on the rest of the batch", "", {}},
      {"--fp8", "", "forward: q, k and v are rounded to e4m3 first", "", {}},
      {"--rotate", "", "with --fp8: q and k are multiplied by a Hadamard matrix before", "", {}},
      {"--residual", "", "with --fp8: what rounding takes from the largest key channels is kept", "", {}},
      {"--fp8-fast", "", "e4m3: sums of many keys may be truncated", "", {}},
      {"--lse", "", "With LSE as an output", "", {}},
      {"--dlse", "", "backward: with a gradient of LSE", "", {}},
      {"--deterministic", "", "backward: bitwise equal from run to run", "", {}},
  };
}

Result<std::string> explain_attention(const FlagValues& values, tessera_device device, const char* arch,
                                      tessera_explain_format format) {
  const auto options = options_from(values);
  if (!options.ok()) return options.status();
  Shapes shapes(device);
  const tessera_attention args = arguments(*options, shapes);
  const tessera_attention_op op = kOps.at(options->op);
  return text_from([&](char* text, std::size_t capacity, std::size_t* needed) {
    return tessera_attention_explain(op, &args, arch, format, text, capacity, needed);
  });
}

Result<std::unique_ptr<Case>> described_attention(const FlagValues& values) {
  const auto options = options_from(values);
  if (!options.ok()) return options.status();
  if (options->varlen || options->cache_lengths) {
    return invalid("a problem whose lengths differ by sequence cannot be made from flags; use a suite's");
  }
  Shapes shapes({TESSERA_CPU, 0});
  const tessera_attention args = arguments(*options, shapes);
  // The contract's own check makes the problem.
  const auto checked = attention::check(kOps.at(options->op), &args, Look::kShapes);
  if (!checked.ok()) return checked.status();
  cases::Case c;
  c.problem = checked->args.problem;
  const AttentionProblem& p = c.problem;
  if (p.seq_new > p.seq_k) return invalid(format("--append is {}; the cache holds {}", p.seq_new, p.seq_k));
  // The append fills the cache; the rows are the sequences' own in the reverse order.
  if (p.seq_new > 0) c.cache_lengths.assign(static_cast<std::size_t>(p.batch), to_int32(p.seq_k - p.seq_new));
  for (std::int64_t b = p.batch; options->cache_batch_idx && b > 0; --b) c.cache_batch_idx.push_back(to_int32(b - 1));
  if (options->leftpad) c.leftpad.assign(static_cast<std::size_t>(p.batch), to_int32(p.seq_k / 4));
  c.name = AttentionFamily::describe(c.problem);
  return attention_case(c);
}

}  // namespace tessera::verify
