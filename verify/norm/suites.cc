#include <algorithm>
#include <functional>
#include <initializer_list>

#include "base/format.h"
#include "verify/norm/cases.h"

namespace tessera::verify::norm {
namespace {

constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

using Change = std::function<void(Case&)>;

Case make(NormOp op, DType dtype, std::int64_t rows, std::int64_t columns, std::initializer_list<Change> changes = {}) {
  Case c;
  NormProblem& p = c.problem;
  p.op = op;
  p.dtype = dtype;
  p.rows = rows;
  p.columns = columns;
  p.weight = true;
  p.parameters = op == NormOp::kBackward;
  p.statistics = op == NormOp::kForward;
  for (const Change& change : changes) change(c);
  complete(c);
  return c;
}
constexpr NormOp kForward = NormOp::kForward, kBackward = NormOp::kBackward;

Change layer() {
  return [](Case& c) {
    c.problem.centered = true;
    c.problem.bias = c.problem.op == NormOp::kForward;
  };
}
Change residual() {
  return [](Case& c) { c.problem.residual = true; };
}
// Without weight, statistics and gradients of parameters.
Change bare() {
  return [](Case& c) { c.problem.weight = c.problem.bias = c.problem.statistics = c.problem.parameters = false; };
}
Change layout(Layout l) {
  return [=](Case& c) { c.layout = l; };
}
Change distribution(Distribution d) {
  return [=](Case& c) { c.distribution = d; };
}

struct RotaryShape {
  std::int64_t batch, seq, heads, dim, rotated;
};
Case rotary(DType dtype, const RotaryShape& s, std::initializer_list<Change> changes = {}) {
  Case c;
  NormProblem& p = c.problem;
  p.op = NormOp::kRotary;
  p.dtype = p.table_dtype = dtype;
  p.batch = s.batch, p.seq = s.seq, p.heads = s.heads, p.columns = s.dim, p.rotated = s.rotated;
  p.rows = s.batch * s.seq * s.heads;
  for (const Change& change : changes) change(c);
  complete(c);
  return c;
}
Change interleaved() {
  return [](Case& c) { c.problem.interleaved = true; };
}
Change positions() {
  return [](Case& c) { c.problem.positions = true; };
}
Change inverse() {
  return [](Case& c) { c.problem.inverse = true; };
}
Change fp32_tables() {
  return [](Case& c) { c.problem.table_dtype = DType::kFloat32; };
}

std::vector<Case> quick() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const NormOp op : {kForward, kBackward}) {
      out.push_back(make(op, dtype, 19, 136, {residual()}));
      out.push_back(make(op, dtype, 19, 1365, {layer(), residual()}));
    }
    out.push_back(rotary(dtype, {2, 5, 3, 64, 64}));
    out.push_back(rotary(dtype, {2, 5, 6, 40, 24}, {interleaved(), positions()}));
  }
  return out;
}

std::vector<Case> full() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const NormOp op : {kForward, kBackward}) {
      // Threads per row, rows per CTA, and rows that are longer than the registers.
      for (const std::int64_t columns : {1, 7, 64, 129, 1000, 4096, 8200, 17001}) {
        const std::int64_t rows = columns < 200 ? 37 : columns < 5000 ? 5 : 2;
        out.push_back(make(op, dtype, rows, columns, {residual()}));
        out.push_back(make(op, dtype, rows, columns, {layer()}));
      }
      for (const Layout l : {Layout::kPadded, Layout::kUnaligned}) {
        out.push_back(make(op, dtype, 9, 200, {layout(l), layer(), residual()}));
        out.push_back(make(op, dtype, 9, 333, {layout(l), residual()}));
      }
      out.push_back(make(op, dtype, 9, 520, {bare()}));
      out.push_back(make(op, dtype, 9, 131, {bare(), layer()}));
      out.push_back(make(op, dtype, 0, 64, {layer()}));
      if (dtype != DType::kBFloat16) continue;
      // Every CTA has several rows.
      out.push_back(make(op, dtype, 20000, 40, {residual()}));
      out.push_back(make(op, dtype, 1300, 1032, {layer(), residual()}));
      out.push_back(make(op, dtype, 1300, 1029, {residual()}));
    }
    for (const RotaryShape& s :
         {RotaryShape{1, 9, 1, 128, 128}, RotaryShape{2, 7, 9, 96, 32}, RotaryShape{2, 3, 5, 18, 10},
          RotaryShape{3, 4, 4, 64, 0}, RotaryShape{2, 0, 4, 64, 64}}) {
      out.push_back(rotary(dtype, s, {fp32_tables()}));
      out.push_back(rotary(dtype, s, {interleaved(), inverse()}));
      out.push_back(rotary(dtype, s, {positions(), inverse(), layout(Layout::kPadded)}));
      out.push_back(rotary(dtype, s, {interleaved(), fp32_tables(), layout(Layout::kUnaligned)}));
    }
  }
  return out;
}

std::vector<Case> hostile() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const NormOp op : {kForward, kBackward}) {
      for (const Distribution d :
           {Distribution::kOffset, Distribution::kConstant, Distribution::kOutlier, Distribution::kTiny}) {
        out.push_back(make(op, dtype, 23, 512, {distribution(d)}));
        out.push_back(make(op, dtype, 23, 1365, {distribution(d), layer()}));
      }
    }
  }
  return out;
}

// Small, and one of each kind of kernel: for compute-sanitizer.
std::vector<Case> sanitize() {
  std::vector<Case> out;
  for (const NormOp op : {kForward, kBackward}) {
    out.push_back(make(op, DType::kBFloat16, 19, 136, {residual()}));
    out.push_back(make(op, DType::kFloat16, 19, 333, {layer(), residual(), layout(Layout::kUnaligned)}));
    out.push_back(make(op, DType::kFloat32, 2, 17001, {layer()}));
  }
  out.push_back(rotary(DType::kBFloat16, {2, 5, 6, 96, 64}));
  out.push_back(rotary(DType::kFloat16, {2, 5, 3, 18, 10}, {interleaved(), positions()}));
  return out;
}

std::vector<Case> bench() {
  std::vector<Case> out;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const NormOp op : {kForward, kBackward}) {
      out.push_back(make(op, dtype, 2048, 1024, {residual()}));
      out.push_back(make(op, dtype, 2048, 1024, {layer()}));
    }
    out.push_back(rotary(dtype, {1, 2048, 16, 64, 64}));
  }
  return out;
}

std::vector<Case> bench_gpu() {
  std::vector<Case> out;
  constexpr DType kType = DType::kBFloat16;
  constexpr std::int64_t kRows = 16384;
  for (const NormOp op : {kForward, kBackward}) {
    for (const std::int64_t columns : {4096, 8192, 1365, 128}) {
      const std::int64_t rows = columns == 128 ? kRows * 40 : columns == 1365 ? 36096 : kRows;
      out.push_back(make(op, kType, rows, columns, {residual()}));
      if (columns != 8192) out.push_back(make(op, kType, rows, columns));
      if (columns != 128) out.push_back(make(op, kType, rows, columns, {layer(), residual()}));
    }
  }
  out.push_back(rotary(kType, {1, kRows, 32, 128, 128}));
  out.push_back(rotary(kType, {1, kRows, 32, 128, 128}, {interleaved()}));
  out.push_back(rotary(kType, {1, kRows, 32, 128, 64}, {positions()}));
  out.push_back(rotary(kType, {1, kRows, 32, 128, 64}));
  out.push_back(rotary(kType, {1, kRows, 32, 128, 128}, {positions()}));
  out.push_back(rotary(kType, {1, kRows, 32, 128, 128}, {fp32_tables()}));
  return out;
}

std::vector<Case> evidence() {
  constexpr DType kType = DType::kBFloat16;
  return {make(kForward, kType, 1024, 4096, {residual()}), make(kForward, kType, 3072, 1365, {layer(), residual()}),
          make(kBackward, kType, 1024, 4096, {residual()}), rotary(kType, {1, 1024, 32, 128, 128})};
}

std::string describe(const Case& c) {
  const NormProblem& p = c.problem;
  std::string text;
  std::vector<std::string> parts;
  const auto add = [&](bool present, const char* name) {
    if (present) parts.emplace_back(name);
  };
  if (p.op == NormOp::kRotary) {
    text = format("rotary/{}/b{}_s{}_h{}_d{}", tessera::name_of(p.dtype), p.batch, p.seq, p.heads, p.columns);
    if (p.rotated != p.columns) parts.push_back(format("r{}", p.rotated));
    if (p.table_dtype != p.dtype) parts.push_back(format("tables_{}", tessera::name_of(p.table_dtype)));
  } else {
    text = format("{}{}/{}/r{}_n{}", p.centered ? "layernorm" : "rmsnorm", p.op == NormOp::kForward ? "" : "_bwd",
                  tessera::name_of(p.dtype), p.rows, p.columns);
  }
  add(p.residual, "residual");
  add(p.op != NormOp::kRotary && !p.weight, "bare");
  add(p.interleaved, "interleaved");
  add(p.positions, "positions");
  add(p.inverse, "inverse");
  add(c.layout == Layout::kPadded, "padded");
  add(c.layout == Layout::kUnaligned, "unaligned");
  add(c.distribution != Distribution::kNormal, name_of(c.distribution));
  return parts.empty() ? text : text + "/" + join(parts, "+");
}

}  // namespace

const char* name_of(Distribution distribution) {
  switch (distribution) {
    case Distribution::kNormal:
      return "normal";
    case Distribution::kOffset:
      return "offset";
    case Distribution::kConstant:
      return "constant";
    case Distribution::kOutlier:
      return "outlier";
    case Distribution::kTiny:
      return "tiny";
  }
  return "?";
}

double Case::flops() const { return 8 * static_cast<double>(problem.rows) * static_cast<double>(problem.columns); }

double Case::unfused_bytes() const { return 2 * bytes(); }

double Case::bytes() const {
  const NormProblem& p = problem;
  const double matrix =
      static_cast<double>(p.rows) * static_cast<double>(p.columns) * static_cast<double>(size_of(p.dtype));
  switch (p.op) {
    case NormOp::kForward:
      return matrix * (p.residual ? 4 : 2);
    case NormOp::kBackward:
      return matrix * (p.residual ? 4 : 3);
    case NormOp::kRotary:
      break;
  }
  return 2 * matrix +
         static_cast<double>(p.seq) * static_cast<double>(p.rotated) * static_cast<double>(size_of(p.table_dtype));
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

void complete(Case& c) {
  NormProblem& p = c.problem;
  // fp32 sums in another order, and functions that are good to an ulp or two, need tolerance where the plain computation
  // may be exact by luck. A 16-bit result needs one rounding of its own.
  c.floor = p.dtype == DType::kFloat32 ? 4 : 1;
  const auto aligned = [&](std::int64_t rows, std::int64_t columns, DType dtype) {
    return rows <= 1 || columns == 0 || row_stride(c, columns) * static_cast<std::int64_t>(size_of(dtype)) % 16 == 0;
  };
  const std::int64_t elements = 16 / static_cast<std::int64_t>(size_of(p.dtype));
  if (p.op == NormOp::kRotary) {
    const std::int64_t unit = p.interleaved ? elements : 2 * elements;
    const std::int64_t table = p.positions ? 2 * p.seq + 3 : p.seq;
    p.aligned = p.rotated % unit == 0 && p.columns % elements == 0 && aligned(p.rows, p.columns, p.dtype) &&
                aligned(table, p.rotated / 2, p.table_dtype);
  } else {
    p.aligned = p.columns % elements == 0 && aligned(p.rows, p.columns, p.dtype);
  }
  c.name = describe(c);
}

const std::vector<std::string>& suite_names() {
  static const std::vector<std::string> names{"quick", "full", "hostile", "sanitize", "bench", "bench-gpu", "evidence"};
  return names;
}

std::vector<Case> suite(std::string_view name) {
  if (name == "quick") return quick();
  if (name == "full") return full();
  if (name == "hostile") return hostile();
  if (name == "sanitize") return sanitize();
  if (name == "bench") return bench();
  if (name == "bench-gpu") return bench_gpu();
  if (name == "evidence") return evidence();
  return {};
}

}  // namespace tessera::verify::norm
