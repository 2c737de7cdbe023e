// `tessera explain`: which kernel serves a problem, and why each other one does not.
#include <fmt/format.h>

#include <array>
#include <charconv>
#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/device.h"
#include "tessera/tessera.h"

namespace tessera::cli {
namespace {

struct Options {
  std::string op = "forward";
  std::string dtype = "bf16";
  std::int64_t b = 1, sq = 2048, sk = -1, hq = 8, hkv = -1, d = 64, dv = -1;
  std::string causal;
  bool is_causal = false;
  std::string align;
  std::vector<std::int64_t> window;
  float scale = 0, softcap = 0;
  bool alibi = false, varlen = false, lse = false, dlse = false, deterministic = false, cache_lengths = false;
  std::int64_t page_size = 0;
  std::vector<std::string> archs{"cpu"};
  std::string json;
};

const std::map<std::string, tessera_attention_op> kOps{{"forward", TESSERA_ATTENTION_FORWARD},
                                                       {"backward", TESSERA_ATTENTION_BACKWARD},
                                                       {"decode", TESSERA_ATTENTION_DECODE}};
const std::map<std::string, tessera_dtype> kTypes{
    {"fp32", {TESSERA_FLOAT, 32, 1}}, {"fp16", {TESSERA_FLOAT, 16, 1}}, {"bf16", {TESSERA_BFLOAT, 16, 1}}};

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
    return o.varlen ? Dims{o.b * sk, hkv, d} : Dims{o.b, sk, hkv, d};
  };
  const Dims rows = o.varlen ? Dims{o.hq, o.b * o.sq} : Dims{o.b, o.hq, o.sq};

  tessera_attention a = TESSERA_ATTENTION_INIT;
  a.q = shapes.add(type, rows_q(o.d));
  a.k = shapes.add(type, rows_k(o.d));
  a.v = shapes.add(type, rows_k(dv));
  a.out = shapes.add(type, rows_q(dv));
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
  if (o.varlen) {
    a.cu_seqlens_q = shapes.add(int32, {o.b + 1});
    a.cu_seqlens_k = shapes.add(int32, {o.b + 1});
    a.max_seqlen_q = o.sq;
    a.max_seqlen_k = sk;
  }
  if (o.cache_lengths || o.page_size > 0) a.cache_seqlens = shapes.add(int32, {o.b});
  if (o.page_size > 0) a.page_table = shapes.add(int32, {o.b, pages});
  return a;
}

// "cuda" and "cuda:N" are GPUs of this machine; anything else is an architecture.
std::optional<tessera_device> present_gpu(const std::string& arch) {
  if (arch == "cuda") return tessera_device{TESSERA_CUDA, 0};
  std::int32_t index = 0;
  const char* const end = arch.data() + arch.size();
  if (arch.rfind("cuda:", 0) != 0) return std::nullopt;
  const auto [stop, error] = std::from_chars(arch.data() + 5, end, index);
  if (error != std::errc() || stop != end || index < 0) return std::nullopt;
  return tessera_device{TESSERA_CUDA, index};
}

int run(const Options& o) {
  Json answers = Json::array();
  bool first = true;
  for (const std::string& arch : o.archs) {
    const std::optional<tessera_device> gpu = present_gpu(arch);
    const char* const asked = gpu ? nullptr : arch.c_str();
    Shapes shapes(gpu.value_or(tessera_device{TESSERA_CPU, 0}));
    const tessera_attention args = arguments(o, shapes);
    std::size_t needed = 0;
    tessera_status status = tessera_attention_explain(kOps.at(o.op), &args, asked, nullptr, 0, &needed);
    std::string text(needed + 1, '\0');
    if (status == TESSERA_OK || status == TESSERA_UNSUPPORTED) {
      status = tessera_attention_explain(kOps.at(o.op), &args, asked, text.data(), text.size(), &needed);
    }
    if (status != TESSERA_OK && status != TESSERA_UNSUPPORTED) {
      return fail(static_cast<ExitCode>(exit_code_of(Status(status, ""))), tessera_last_error());
    }
    text.resize(text.find('\0'));
    fmt::print("{}{}{}", first ? "" : "\n", text, text.empty() || text.back() != '\n' ? "\n" : "");
    first = false;
    answers.push_back({{"arch", arch}, {"text", text}});
  }
  return write_json(o.json, {{"op", o.op}, {"answers", answers}});
}

}  // namespace

Command add_explain(CLI::App& parent) {
  auto o = std::make_shared<Options>();
  CLI::App* app = parent.add_subcommand("explain", "Say which kernel serves a problem, and why not the others");
  app->add_option("--op", o->op, "forward, backward or decode")
      ->type_name("OP")
      ->check(quiet(CLI::IsMember({"forward", "backward", "decode"})))
      ->capture_default_str();
  app->add_option("--dtype", o->dtype, "fp32, fp16 or bf16")
      ->type_name("TYPE")
      ->check(quiet(CLI::IsMember({"fp32", "fp16", "bf16"})))
      ->capture_default_str();
  const CLI::Validator size = quiet(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40));
  app->add_option("--b", o->b, "Sequences")->type_name("N")->check(size)->capture_default_str();
  app->add_option("--sq", o->sq, "Queries of a sequence")->type_name("N")->check(size)->capture_default_str();
  app->add_option("--sk", o->sk, "Keys of a sequence; default: --sq")->type_name("N")->check(size);
  app->add_option("--hq", o->hq, "Query heads")->type_name("N")->check(size)->capture_default_str();
  app->add_option("--hkv", o->hkv, "Key heads; default: --hq")->type_name("N")->check(size);
  app->add_option("--d", o->d, "Head dim of q and k")->type_name("N")->check(size)->capture_default_str();
  app->add_option("--dv", o->dv, "Head dim of v; default: --d")->type_name("N")->check(size);
  app->add_option_function<std::vector<std::string>>(
         "--causal",
         [o](const std::vector<std::string>& values) {
           o->is_causal = true;
           if (!values.empty()) o->causal = values.front();
         },
         "top_left or bottom_right; may stand alone where --sq equals --sk")
      ->expected(0, 1)
      ->type_name("ALIGN")
      ->check(quiet(CLI::IsMember({"top_left", "bottom_right", ""})));
  app->add_option("--align", o->align, "Alignment of a window or ALiBi without --causal")
      ->type_name("ALIGN")
      ->check(quiet(CLI::IsMember({"top_left", "bottom_right"})));
  app->add_option("--window", o->window, "Keys seen left and right of the query's own; -1: all")
      ->type_name("L,R")
      ->delimiter(',')
      ->expected(2);
  app->add_option("--scale", o->scale, "Of the scores; 0: 1 / sqrt(d)")->capture_default_str();
  app->add_option("--softcap", o->softcap, "0: none")->capture_default_str();
  app->add_flag("--alibi", o->alibi, "With ALiBi slopes");
  app->add_flag("--varlen", o->varlen, "Packed sequences of at most --sq and --sk");
  app->add_flag("--cache-lengths", o->cache_lengths, "decode: lengths per sequence");
  app->add_option("--page-size", o->page_size, "decode: a paged cache")->type_name("N")->check(size);
  app->add_flag("--lse", o->lse, "With LSE as an output");
  app->add_flag("--dlse", o->dlse, "backward: with a gradient of LSE");
  app->add_flag("--deterministic", o->deterministic, "backward: bitwise equal from run to run");
  app->add_option("--arch", o->archs,
                  "cpu, sm_75 ... sm_90a, which need not be present, or cuda:N, which is, with what was tuned on it; "
                  "separated by commas")
      ->type_name("ARCH")
      ->delimiter(',')
      ->capture_default_str();
  app->add_option("--json", o->json, "Write the answers to this file")->type_name("FILE");
  app->footer(
      "Examples:\n"
      "  tessera explain --sq 4096 --d 80 --causal\n"
      "  tessera explain --op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128 --page-size 64 --arch sm_80\n"
      "  tessera explain --op backward --sq 512 --sk 2048 --causal bottom_right --arch cpu,sm_75,sm_90a\n"
      "  tessera explain --b 2 --sq 8192 --hq 16 --d 128 --causal --arch cuda:0");
  return {app, [o] { return run(*o); }};
}

}  // namespace tessera::cli
