#include <algorithm>
#include <functional>
#include <initializer_list>

#include "base/format.h"
#include "tessera/gemm.h"
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
Change groups(std::int64_t count, int grouping, Routing routing = Routing::kEven) {
  return [=](Case& c) {
    c.problem.op = GemmOp::kGrouped;
    c.problem.groups = count;
    c.problem.grouping = grouping;
    c.routing = routing;
  };
}
Change shared_a() {
  return [](Case& c) { c.problem.a_shared = true; };
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
    out.push_back(make(dtype, {300, 72, 40}, {groups(5, kRaggedRows, Routing::kRandom)}));
    out.push_back(make(dtype, {72, 40, 300}, {groups(5, kRaggedSums, Routing::kRandom), transposed(true, true)}));
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
    // Padding of out may be overwritten.
    const Shape odd = {150, 171, 77};
    out.push_back(make(dtype, odd, {layout(Layout::kFreePadding)}));
    out.push_back(make(dtype, odd, {layout(Layout::kFreePadding), bias(), activation(kSilu), preactivation()}));
    out.push_back(
        make(dtype, odd, {layout(Layout::kFreePadding), activation(kSilu), gradient(), transposed(false, true)}));
    out.push_back(make(dtype, odd, {layout(Layout::kFreePadding), gated(), activation(kSilu)}));
    out.push_back(make(dtype, odd, {layout(Layout::kFreePadding), residual(), to_fp32()}));
    out.push_back(make(dtype, {61, 45, 4099}, {layout(Layout::kFreePadding), transposed(true, true)}));
    out.push_back(
        make(dtype, {400, 171, 93}, {groups(4, kRaggedRows, Routing::kRandom), layout(Layout::kFreePadding), bias()}));
    // Few elements and a long sum: K is split.
    out.push_back(make(dtype, {72, 56, 5000}, {transposed(true, true)}));
    out.push_back(make(dtype, {61, 45, 4099}, {transposed(true, true), residual(), to_fp32()}));
    out.push_back(make(dtype, {16, 130, 4096}, {bias(), activation(kGeluTanh), preactivation()}));
    // Many columns: the CPU keeps rows of A that it has packed.
    out.push_back(make(dtype, {200, 2100, 600}));
    out.push_back(make(dtype, {110, 2100, 530}, {gated(), activation(kSilu), transposed(true, false)}));
    out.push_back(make(dtype, {200, 2100, 300}, {groups(3, kRaggedRows, Routing::kRandom)}));
    out.push_back(make(dtype, {110, 2100, 300}, {groups(3, kRaggedSums, Routing::kRandom), transposed(true, true)}));
    // Pairs of column tiles that share A.
    if (dtype == DType::kBFloat16)
      out.push_back(make(dtype, {1152, 384, 12000}, {sampled(60), transposed(true, true)}));
    // Groups: empty ones, single rows, the edges of tiles; more groups than a warp has lanes.
    for (const Routing routing : {Routing::kEven, Routing::kRandom, Routing::kHalf}) {
      out.push_back(make(dtype, {640, 200, 136}, {groups(7, kRaggedRows, routing)}));
      out.push_back(make(dtype, {200, 136, 640}, {groups(7, kRaggedSums, routing), transposed(true, true)}));
    }
    out.push_back(make(dtype, {700, 40, 24}, {groups(70, kRaggedRows, Routing::kRandom), transposed(false, true)}));
    out.push_back(
        make(dtype, {24, 40, 700}, {groups(70, kRaggedSums, Routing::kRandom), transposed(true, true), to_fp32()}));
    for (const Layout l : {Layout::kCompact, Layout::kPadded, Layout::kUnaligned, Layout::kInterleaved}) {
      out.push_back(make(dtype, {141, 171, 93}, {groups(3, kBatched), layout(l), bias(), residual()}));
      out.push_back(make(dtype, {72, 136, 64}, {groups(3, kBatched), layout(l), transposed(true, true)}));
      if (l == Layout::kInterleaved) continue;
      out.push_back(
          make(dtype, {400, 171, 93},
               {groups(4, kRaggedRows, Routing::kRandom), layout(l), bias(), activation(kSilu), preactivation()}));
      out.push_back(
          make(dtype, {93, 171, 400},
               {groups(4, kRaggedSums, Routing::kRandom), layout(l), transposed(true, true), residual(), to_fp32()}));
    }
    out.push_back(make(dtype, {100, 3, 136}, {groups(10, kBatched), layout(Layout::kInterleaved)}));
    out.push_back(make(dtype, {150, 72, 64}, {groups(4, kBatched), shared_a(), bias(), activation(kGeluTanh)}));
    for (const Shape& s : {Shape{500, 184, 72}, Shape{500, 171, 77}}) {
      out.push_back(make(dtype, s, {groups(6, kRaggedRows, Routing::kRandom), gated(), bias(), activation(kSilu)}));
      out.push_back(
          make(dtype, s,
               {groups(6, kRaggedRows, Routing::kRandom), gradient(), activation(kGeluErf), transposed(false, true)}));
      out.push_back(make(dtype, s, {groups(6, kRaggedRows, Routing::kRandom), preactivation(), activation(kRelu)}));
      out.push_back(make(dtype, s, {groups(6, kRaggedRows, Routing::kRandom), residual(), to_fp32()}));
    }
    out.push_back(make(dtype, {0, 5, 3}, {groups(2, kRaggedRows)}));
    out.push_back(make(dtype, {5, 7, 0}, {groups(2, kRaggedSums), transposed(true, true)}));
    out.push_back(make(dtype, {9, 5, 0}, {groups(2, kRaggedRows), bias()}));
    if (dtype == DType::kFloat32) continue;
    out.push_back(make(dtype, {9000, 520, 72}, {sampled(60), groups(20, kRaggedRows, Routing::kRandom)}));
    out.push_back(make(dtype, {9000, 776, 72},
                       {sampled(60), groups(8, kRaggedRows, Routing::kHalf), gated(), activation(kSilu)}));
    out.push_back(
        make(dtype, {520, 776, 9000}, {sampled(60), groups(8, kRaggedSums, Routing::kRandom), transposed(true, true)}));
    if (dtype == DType::kBFloat16) {
      out.push_back(make(dtype, {1024, 1024, 9000},
                         {sampled(60), groups(8, kRaggedSums, Routing::kRandom), transposed(true, true)}));
    }
    // Many tiles: every CTA has several.
    out.push_back(make(dtype, {5000, 1365, 200}, {sampled(40), bias(), activation(kSilu)}));
    out.push_back(make(dtype, {5000, 1376, 200}, {sampled(40), bias(), activation(kSilu), preactivation()}));
    out.push_back(make(dtype, {5000, 512, 1365}, {sampled(40), residual()}));
    out.push_back(make(dtype, {4100, 2056, 264}, {sampled(40)}));
    out.push_back(make(dtype, {4100, 1032, 264}, {sampled(40), gated(), activation(kSilu)}));
    out.push_back(
        make(dtype, {5000, 1365, 512}, {sampled(40), transposed(false, true), gradient(), activation(kSilu)}));
    out.push_back(make(dtype, {1365, 512, 9001}, {sampled(40), transposed(true, true), to_fp32()}));
    out.push_back(make(dtype, {512, 1365, 9003}, {sampled(40), transposed(true, true)}));
    // Rows that start anywhere, of a and out together, of a weight, of both operands of a weight's gradient, of a gated
    // product; and rows whose ends are not whole chunks.
    out.push_back(make(dtype, {5000, 1365, 200}, {sampled(40), transposed(false, true)}));
    out.push_back(make(dtype, {9001, 171, 93}, {sampled(60), transposed(false, true), bias()}));
    out.push_back(make(dtype, {5000, 171, 96}, {sampled(40), gated(), activation(kSilu)}));
    out.push_back(make(dtype, {333, 333, 9001}, {sampled(40), transposed(true, true), residual()}));
    out.push_back(make(dtype, {5000, 1365, 200}, {sampled(40), layout(Layout::kPadded), residual()}));
    out.push_back(make(dtype, {5000, 1365, 200}, {sampled(40), layout(Layout::kFreePadding)}));
    out.push_back(make(dtype, {5000, 520, 200}, {sampled(40), layout(Layout::kUnaligned), bias()}));
    // Tiles of 192 rows: of rows of a that start anywhere, and of a transposed b.
    if (dtype != DType::kFloat32) {
      out.push_back(make(dtype, {17000, 128, 93}, {sampled(60), layout(Layout::kGaps), activation(kSilu)}));
      out.push_back(
          make(dtype, {9001, 1024, 200}, {sampled(60), transposed(false, true), activation(kSilu), preactivation()}));
    }
    // The rows of the last round in smaller tiles: of rows that start anywhere, of a, of a and out, and of columns of a.
    if (dtype == DType::kBFloat16) {
      out.push_back(make(dtype, {20000, 256, 1500}, {sampled(60), bias(), residual()}));
      out.push_back(make(dtype, {20000, 249, 1500}, {sampled(60)}));
      out.push_back(make(dtype, {20000, 256, 2048}, {sampled(60), transposed(true, false)}));
    }
    // Few columns.
    out.push_back(make(dtype, {5000, 64, 1365}, {sampled(40), residual()}));
    out.push_back(make(dtype, {5000, 200, 93}, {sampled(40), bias(), activation(kSilu)}));
    out.push_back(make(dtype, {40, 1365, 5001}, {transposed(true, true)}));
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
        out.push_back(make(dtype, s, {distribution(d), groups(3, kRaggedRows, Routing::kRandom)}));
        out.push_back(
            make(dtype, s, {distribution(d), groups(3, kRaggedSums, Routing::kHalf), transposed(true, true)}));
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
    out.push_back(make(dtype, {300, 72, 40}, {groups(5, kRaggedRows, Routing::kRandom), residual()}));
    out.push_back(make(dtype, {72, 45, 300}, {groups(5, kRaggedSums, Routing::kRandom), transposed(true, true)}));
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
  out.push_back(make(kType, {kTokens, 1376, kModel}, {tagged("mlp"), activation(kSilu)}));
  out.push_back(make(kType, {kTokens, 1376, kModel}, {tagged("mlp"), activation(kSilu), preactivation()}));
  out.push_back(make(kType, {kTokens, 1536, kModel}, {tagged("projection")}));
  out.push_back(make(kType, {kTokens, kModel, kModel}, {tagged("projection")}));
  out.push_back(make(kType, {8192, 11008, 4096}, {tagged("gated"), gated(), activation(kSilu)}));
  out.push_back(make(kType, {8192, 4096, 11008}, {tagged("gated")}));
  // Experts of a mixture, up projections over 8,192 tokens: top 2 of 8 and top 8 of 64, with their gradients.
  for (const Routing routing : {Routing::kEven, Routing::kHalf}) {
    out.push_back(make(kType, {16384, 14336, 4096}, {tagged("grouped"), groups(8, kRaggedRows, routing)}));
    out.push_back(make(kType, {65536, 1408, 2048}, {tagged("grouped"), groups(64, kRaggedRows, routing)}));
  }
  out.push_back(
      make(kType, {65536, 2048, 1408}, {tagged("grouped"), groups(64, kRaggedRows), transposed(false, true)}));
  out.push_back(make(kType, {1408, 2048, 65536}, {tagged("grouped"), groups(64, kRaggedSums), transposed(true, true)}));
  out.push_back(make(kType, {14336, 4096, 16384}, {tagged("grouped"), groups(8, kRaggedSums), transposed(true, true)}));
  out.push_back(
      make(kType, {65536, 1408, 2048}, {tagged("grouped"), groups(64, kRaggedRows), gated(), activation(kSilu)}));
  for (const std::int64_t m : {1, 16, 128}) out.push_back(make(kType, {m, 4096, 4096}, {tagged("few_rows")}));
  return out;
}

std::vector<Case> evidence() {
  constexpr DType kType = DType::kBFloat16;
  return {make(kType, {4096, 4096, 4096}, {sampled(24)}), make(kType, {16, 4096, 4096}, {sampled(16)}),
          make(kType, {36096, 1365, 512}, {sampled(24), bias(), activation(kSilu), preactivation()}),
          make(kType, {36096, 512, 1365}, {sampled(24), bias(), residual()})};
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
  return 2 * each * (problem.gated ? 2 : 1) * static_cast<double>(problem.grouping == kBatched ? problem.groups : 1);
}

double Case::bytes() const {
  const GemmProblem& p = problem;
  const auto m = static_cast<double>(p.m), n = static_cast<double>(p.n), k = static_cast<double>(p.k);
  const auto in = static_cast<double>(size_of(p.dtype)), to = static_cast<double>(size_of(p.out_dtype));
  const Layers layers = layers_of(p);
  const double operands =
      m * k * in * static_cast<double>(layers.a) + n * k * in * (p.gated ? 2 : 1) * static_cast<double>(layers.b);
  const double vectors =
      p.bias ? n * in * (p.gated ? 2 : 1) * static_cast<double>(std::max<std::int64_t>(p.groups, 1)) : 0;
  const double matrices = m * n * static_cast<double>(layers.out) *
                          (to * (p.residual ? 2 : 1) + in * ((p.gradient ? 1 : 0) + (p.preactivation ? 1 : 0)));
  return operands + vectors + matrices;
}

double Case::unfused_bytes() const {
  const GemmProblem& p = problem;
  const double pass = 2 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(size_of(p.dtype));
  const int passes =
      (p.bias ? 1 : 0) + (p.activation != kIdentity || p.gradient ? 1 : 0) + (p.gated ? 1 : 0) + (p.residual ? 1 : 0);
  return bytes() + pass * passes;
}

MatrixStrides strides_of(const Case& c, std::int64_t layers, std::int64_t rows, std::int64_t columns) {
  std::int64_t row = columns;
  switch (c.layout) {
    case Layout::kCompact:
      break;
    case Layout::kPadded:
      row = (columns + 7) / 8 * 8 + 8;
      break;
    case Layout::kFreePadding:
      row = (columns + 63) / 64 * 64;
      break;
    case Layout::kGaps:
      row = columns + 8;
      break;
    case Layout::kUnaligned:
      row = columns + 3;
      break;
    case Layout::kInterleaved:
      return {layers * columns, columns};
  }
  return {row, rows * row};
}

std::uint32_t flags_of(const Case& c) {
  std::uint32_t flags = 0;
  if (c.problem.a_transposed) flags |= TESSERA_GEMM_A_TRANSPOSED;
  if (c.problem.b_transposed) flags |= TESSERA_GEMM_B_TRANSPOSED;
  if (c.layout == Layout::kFreePadding) flags |= TESSERA_GEMM_OUT_PADDED;
  return flags;
}

void set_alignment(Case& c) {
  GemmProblem& p = c.problem;
  const auto aligned = [&](std::int64_t layers, std::int64_t rows, std::int64_t columns, DType dtype) {
    const MatrixStrides strides = strides_of(c, layers, rows, columns);
    const auto multiple = [&](std::int64_t stride) {
      return stride * static_cast<std::int64_t>(size_of(dtype)) % 16 == 0;
    };
    if (layers * rows * columns == 0) return true;
    return (rows == 1 || multiple(strides.row)) && (layers == 1 || multiple(strides.layer));
  };
  const Layers layers = layers_of(p);
  p.a_aligned = p.a_transposed ? aligned(layers.a, p.k, p.m, p.dtype) : aligned(layers.a, p.m, p.k, p.dtype);
  p.b_aligned = p.b_transposed ? aligned(layers.b, p.k, p.n, p.dtype) : aligned(layers.b, p.n, p.k, p.dtype);
  p.out_aligned = aligned(layers.out, p.m, p.n, p.out_dtype);
  p.out_padded = c.layout == Layout::kFreePadding && p.n * static_cast<std::int64_t>(size_of(p.dtype)) % 16 != 0;
  p.epilogue_aligned = ((!p.gradient && !p.preactivation) || aligned(layers.out, p.m, p.n, p.dtype)) &&
                       (!p.residual || p.out_aligned) &&
                       (!p.bias || p.op != GemmOp::kGrouped || aligned(1, p.groups, p.n, p.dtype));
}

std::string describe(const Case& c) {
  const GemmProblem& p = c.problem;
  std::string text = format("gemm/{}/m{}_n{}_k{}", tessera::name_of(p.dtype), p.m, p.n, p.k);
  std::vector<std::string> parts;
  if (p.op == GemmOp::kGrouped) {
    parts.push_back(format("{}_{}",
                           p.grouping == kRaggedRows   ? "ragged_rows"
                           : p.grouping == kRaggedSums ? "ragged_sums"
                           : p.a_shared                ? "shared_a"
                                                       : "batched",
                           p.groups));
    if (c.routing == Routing::kRandom) parts.emplace_back("random");
    if (c.routing == Routing::kHalf) parts.emplace_back("half");
  }
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
  if (c.layout == Layout::kFreePadding) parts.emplace_back("free_padding");
  if (c.layout == Layout::kGaps) parts.emplace_back("gaps");
  if (c.layout == Layout::kUnaligned) parts.emplace_back("unaligned");
  if (c.layout == Layout::kInterleaved) parts.emplace_back("interleaved");
  if (c.distribution != Distribution::kNormal) parts.emplace_back(name_of(c.distribution));
  return parts.empty() ? text : text + "/" + join(parts, "+");
}

const std::vector<std::string>& suite_names() {
  static const std::vector<std::string> names{"quick", "full", "hostile", "sanitize", "bench", "bench-gpu", "evidence"};
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
  if (name == "evidence") all = evidence();
  return once_each(std::move(all));
}

}  // namespace tessera::verify::gemm
