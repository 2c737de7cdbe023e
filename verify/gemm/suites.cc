#include <algorithm>
#include <functional>
#include <initializer_list>

#include "base/format.h"
#include "verify/gemm/cases.h"

namespace tessera::verify::gemm {
namespace {

constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr int kActivations[] = {kRelu, kSilu, kGeluTanh, kGeluErf};

struct Shape {
  std::int64_t m, n, k;
};
using Change = std::function<void(Case&)>;

Case make(DType dtype, const Shape& s, std::initializer_list<Change> changes = {}) {
  Case c;
  c.problem.dtype = c.problem.out_dtype = dtype;
  c.problem.m = s.m;
  c.problem.n = s.n;
  c.problem.k = s.k;
  for (const Change& change : changes) change(c);
  // fp32 sums in another order, and functions that are good to an ulp or two, need tolerance where the plain computation
  // may be exact by luck. A 16-bit result needs one rounding of its own.
  c.floor = c.problem.out_dtype == DType::kFloat32 ? 4 : 1;
  set_alignment(c);
  c.name = describe(c);
  return c;
}

Change transposed(bool a, bool b) {
  return [=](Case& c) {
    c.problem.a_transposed = a;
    c.problem.b_transposed = b;
  };
}
Change to_fp32() {
  return [](Case& c) { c.problem.out_dtype = DType::kFloat32; };
}
Change bias() {
  return [](Case& c) { c.problem.bias = true; };
}
Change activation(int f) {
  return [=](Case& c) { c.problem.activation = f; };
}
Change gated() {
  return [](Case& c) { c.problem.gated = true; };
}
Change gradient() {
  return [](Case& c) { c.problem.gradient = true; };
}
Change preactivation() {
  return [](Case& c) { c.problem.preactivation = true; };
}
Change residual() {
  return [](Case& c) { c.problem.residual = true; };
}
Change layout(Layout l) {
  return [=](Case& c) { c.layout = l; };
}
Change distribution(Distribution d) {
  return [=](Case& c) { c.distribution = d; };
}
Change sampled(std::int64_t rows) {
  return [=](Case& c) { c.sample = rows; };
}
Change tagged(const char* tag) {
  return [=](Case& c) { c.tags.emplace_back(tag); };
}

std::vector<Case> quick() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    out.push_back(make(dtype, {130, 136, 72}, {bias(), activation(kSilu)}));
    out.push_back(make(dtype, {33, 65, 37}));
    out.push_back(make(dtype, {65, 48, 90}, {transposed(true, true), to_fp32()}));
  }
  return out;
}

std::vector<Case> full() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    // Edges of tiles, and sizes below one.
    for (const Shape& s : {Shape{1, 1, 1}, Shape{7, 7, 7}, Shape{1, 300, 129}, Shape{129, 1, 64}, Shape{64, 64, 64},
                           Shape{127, 255, 63}, Shape{128, 256, 128}, Shape{129, 257, 65}, Shape{300, 200, 1365},
                           Shape{0, 5, 3}, Shape{5, 0, 3}, Shape{5, 9, 0}}) {
      out.push_back(make(dtype, s));
    }
    // Every transposition with every kind of row.
    for (const bool a : {false, true}) {
      for (const bool b : {false, true}) {
        for (const Layout l : {Layout::kCompact, Layout::kPadded, Layout::kUnaligned}) {
          out.push_back(make(dtype, {200, 264, 136}, {transposed(a, b), layout(l)}));
          out.push_back(make(dtype, {141, 171, 93}, {transposed(a, b), layout(l), bias(), residual(), to_fp32()}));
        }
      }
    }
    // Epilogues, with rows that are and are not aligned.
    for (const Shape& s : {Shape{150, 184, 72}, Shape{150, 171, 77}}) {
      for (const int f : kActivations) {
        out.push_back(make(dtype, s, {bias(), activation(f), preactivation()}));
        out.push_back(make(dtype, s, {activation(f), gradient(), transposed(false, true)}));
        out.push_back(make(dtype, s, {bias(), gated(), activation(f), residual()}));
      }
      out.push_back(make(dtype, s, {gated(), activation(kSilu), transposed(false, true)}));
      out.push_back(make(dtype, s, {gated(), activation(kSilu), transposed(true, true), to_fp32()}));
      out.push_back(make(dtype, s, {residual()}));
      out.push_back(make(dtype, s, {residual(), to_fp32(), transposed(true, true)}));
      out.push_back(make(dtype, s, {bias(), gradient(), activation(kSilu), residual()}));
    }
    // Few elements and a long sum: K is split.
    out.push_back(make(dtype, {72, 56, 5000}, {transposed(true, true)}));
    out.push_back(make(dtype, {61, 45, 4099}, {transposed(true, true), residual(), to_fp32()}));
    out.push_back(make(dtype, {16, 130, 4096}, {bias(), activation(kGeluTanh), preactivation()}));
    if (dtype == DType::kFloat32) continue;
    // Many tiles: every CTA has several.
    out.push_back(make(dtype, {5000, 1365, 200}, {sampled(40), bias(), activation(kSilu)}));
    out.push_back(make(dtype, {5000, 1376, 200}, {sampled(40), bias(), activation(kSilu), preactivation()}));
    out.push_back(make(dtype, {5000, 512, 1365}, {sampled(40), residual()}));
    out.push_back(make(dtype, {4100, 2056, 264}, {sampled(40)}));
    out.push_back(make(dtype, {4100, 1032, 264}, {sampled(40), gated(), activation(kSilu)}));
    out.push_back(
        make(dtype, {5000, 1365, 512}, {sampled(40), transposed(false, true), gradient(), activation(kSilu)}));
    out.push_back(make(dtype, {1365, 512, 5001}, {sampled(40), transposed(true, true), to_fp32()}));
    out.push_back(make(dtype, {512, 1365, 5001}, {sampled(40), transposed(true, true)}));
  }
  return out;
}

std::vector<Case> hostile() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const Distribution d :
         {Distribution::kOneHot, Distribution::kSaturated, Distribution::kCancel, Distribution::kTiny}) {
      for (const Shape& s : {Shape{200, 272, 256}, Shape{190, 171, 133}}) {
        out.push_back(make(dtype, s, {distribution(d)}));
        out.push_back(make(dtype, s, {distribution(d), transposed(true, true), residual()}));
        if (d != Distribution::kSaturated) continue;
        for (const int f : kActivations) {
          out.push_back(make(dtype, s, {distribution(d), activation(f), bias(), preactivation()}));
          out.push_back(make(dtype, s, {distribution(d), activation(f), gradient()}));
        }
      }
    }
  }
  return out;
}

// Small, and one of each kind of kernel: for compute-sanitizer.
std::vector<Case> sanitize() {
  std::vector<Case> out;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    out.push_back(make(dtype, {130, 200, 136}, {bias(), activation(kSilu), residual()}));
    out.push_back(make(dtype, {130, 171, 93}, {bias(), activation(kGeluErf), preactivation()}));
    out.push_back(make(dtype, {130, 72, 77}, {gated(), activation(kSilu), transposed(false, true)}));
    out.push_back(make(dtype, {61, 45, 2051}, {transposed(true, true), residual(), to_fp32()}));
    out.push_back(make(dtype, {64, 96, 2048}, {transposed(true, false)}));
  }
  return out;
}

std::vector<Case> bench() {
  std::vector<Case> out;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    out.push_back(make(dtype, {512, 1376, 512}, {bias(), activation(kSilu)}));
    out.push_back(make(dtype, {512, 512, 1365}));
  }
  return out;
}

// The products of an MLP 512 -> d_ff -> 512 with SiLU over 36,096 tokens, forward and backward, and large ones.
std::vector<Case> bench_gpu() {
  std::vector<Case> out;
  constexpr DType kType = DType::kBFloat16;
  constexpr std::int64_t kTokens = 36096, kModel = 512;
  out.push_back(make(kType, {8192, 8192, 8192}, {tagged("large")}));
  out.push_back(make(kType, {4096, 4096, 4096}, {tagged("large")}));
  for (const std::int64_t hidden : {1376, 1365}) {
    out.push_back(make(kType, {kTokens, hidden, kModel}, {tagged("mlp")}));
    out.push_back(make(kType, {kTokens, hidden, kModel}, {tagged("mlp"), bias(), activation(kSilu), preactivation()}));
    out.push_back(make(kType, {kTokens, kModel, hidden}, {tagged("mlp")}));
    out.push_back(make(kType, {kTokens, kModel, hidden}, {tagged("mlp"), bias(), residual()}));
    out.push_back(make(kType, {kTokens, hidden, kModel}, {tagged("mlp"), transposed(false, true)}));
    out.push_back(make(kType, {kTokens, hidden, kModel},
                       {tagged("mlp"), transposed(false, true), gradient(), activation(kSilu)}));
    out.push_back(make(kType, {hidden, kModel, kTokens}, {tagged("mlp"), transposed(true, true)}));
    out.push_back(make(kType, {kModel, hidden, kTokens}, {tagged("mlp"), transposed(true, true)}));
  }
  out.push_back(make(kType, {kTokens, 1536, kModel}, {tagged("projection")}));
  out.push_back(make(kType, {kTokens, kModel, kModel}, {tagged("projection")}));
  out.push_back(make(kType, {8192, 11008, 4096}, {tagged("gated"), gated(), activation(kSilu)}));
  out.push_back(make(kType, {8192, 4096, 11008}, {tagged("gated")}));
  for (const std::int64_t m : {1, 16, 128}) out.push_back(make(kType, {m, 4096, 4096}, {tagged("few_rows")}));
  return out;
}

}  // namespace

const char* name_of(Distribution distribution) {
  switch (distribution) {
    case Distribution::kNormal:
      return "normal";
    case Distribution::kOneHot:
      return "one_hot";
    case Distribution::kSaturated:
      return "saturated";
    case Distribution::kCancel:
      return "cancel";
    case Distribution::kTiny:
      return "tiny";
  }
  return "?";
}

double Case::flops() const {
  const double each = static_cast<double>(problem.m) * static_cast<double>(problem.n) * static_cast<double>(problem.k);
  return 2 * each * (problem.gated ? 2 : 1);
}

double Case::bytes() const {
  const GemmProblem& p = problem;
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  const auto in = static_cast<double>(size_of(p.dtype)), to = static_cast<double>(size_of(p.out_dtype));
  const double operands = m * k * in + n * k * in * (p.gated ? 2 : 1);
  const double vectors = p.bias ? n * in * (p.gated ? 2 : 1) : 0;
  const double matrices = m * n * (to * (p.residual ? 2 : 1) + in * ((p.gradient ? 1 : 0) + (p.preactivation ? 1 : 0)));
  return operands + vectors + matrices;
}

double Case::unfused_bytes() const {
  const GemmProblem& p = problem;
  const double pass = 2 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(size_of(p.dtype));
  const int passes =
      (p.bias ? 1 : 0) + (p.activation != kIdentity || p.gradient ? 1 : 0) + (p.gated ? 1 : 0) + (p.residual ? 1 : 0);
  return bytes() + pass * passes;
}

std::int64_t row_stride(const Case& c, std::int64_t columns) {
  switch (c.layout) {
    case Layout::kCompact:
      return columns;
    case Layout::kPadded:
      return (columns + 7) / 8 * 8 + 8;
    case Layout::kUnaligned:
      return columns + 3;
  }
  return columns;
}

void set_alignment(Case& c) {
  GemmProblem& p = c.problem;
  const auto aligned = [&](std::int64_t rows, std::int64_t columns, DType dtype) {
    return rows <= 1 || columns == 0 || row_stride(c, columns) * static_cast<std::int64_t>(size_of(dtype)) % 16 == 0;
  };
  p.a_aligned = p.a_transposed ? aligned(p.k, p.m, p.dtype) : aligned(p.m, p.k, p.dtype);
  p.b_aligned = p.b_transposed ? aligned(p.k, p.n, p.dtype) : aligned(p.n, p.k, p.dtype);
  p.out_aligned = aligned(p.m, p.n, p.out_dtype);
  p.epilogue_aligned =
      ((!p.gradient && !p.preactivation) || aligned(p.m, p.n, p.dtype)) && (!p.residual || p.out_aligned);
}

std::string describe(const Case& c) {
  const GemmProblem& p = c.problem;
  std::string text = format("gemm/{}/m{}_n{}_k{}", tessera::name_of(p.dtype), p.m, p.n, p.k);
  std::vector<std::string> parts;
  if (p.a_transposed || p.b_transposed)
    parts.push_back(format("{}{}", p.a_transposed ? 't' : 'n', p.b_transposed ? 't' : 'n'));
  if (p.bias) parts.emplace_back("bias");
  if (p.activation != kIdentity) parts.emplace_back(activation_name(p.activation));
  if (p.gated) parts.emplace_back("gated");
  if (p.gradient) parts.emplace_back("gradient");
  if (p.preactivation) parts.emplace_back("preactivation");
  if (p.residual) parts.emplace_back("residual");
  if (p.out_dtype != p.dtype) parts.push_back(format("out_{}", tessera::name_of(p.out_dtype)));
  if (c.layout == Layout::kPadded) parts.emplace_back("padded");
  if (c.layout == Layout::kUnaligned) parts.emplace_back("unaligned");
  if (c.distribution != Distribution::kNormal) parts.emplace_back(name_of(c.distribution));
  return parts.empty() ? text : text + "/" + join(parts, "+");
}

const std::vector<std::string>& suite_names() {
  static const std::vector<std::string> names{"quick", "full", "hostile", "sanitize", "bench", "bench-gpu"};
  return names;
}

std::vector<Case> suite(std::string_view name) {
  std::vector<Case> all;
  if (name == "quick") all = quick();
  if (name == "full") all = full();
  if (name == "hostile") all = hostile();
  if (name == "sanitize") all = sanitize();
  if (name == "bench") all = bench();
  if (name == "bench-gpu") all = bench_gpu();
  // A shape may come up twice on the way through the loops; the list has it once.
  std::vector<Case> out;
  std::vector<std::string> seen;
  for (Case& c : all) {
    const auto at = std::lower_bound(seen.begin(), seen.end(), c.name);
    if (at != seen.end() && *at == c.name) continue;
    seen.insert(at, c.name);
    out.push_back(std::move(c));
  }
  return out;
}

}  // namespace tessera::verify::gemm
