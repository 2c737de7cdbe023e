#include <cmath>
#include <initializer_list>

#include "base/format.h"
#include "verify/mlp/cases.h"
#include "verify/random.h"

namespace tessera::verify::mlp {
namespace {

using T = MlpTensor;
constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr int kActivations[] = {kRelu, kSilu, kGeluTanh, kGeluErf};

struct Shape {
  std::int64_t m, k, hidden, n;
};
struct Options {
  MlpOp op = MlpOp::kForward;
  bool gated = false, biased = false, kept = false;
  int activation = kSilu;
  Layout layout = Layout::kPaddedHidden;
  double scale = 1;
  std::uint32_t without = 0;  // bits of gradients that are not asked for
};

Case make(DType dtype, const Shape& s, const Options& o) {
  Case c;
  MlpProblem& p = c.problem;
  p.op = o.op;
  p.dtype = dtype;
  p.m = s.m, p.k = s.k, p.hidden = s.hidden, p.n = s.n;
  p.activation = o.activation;
  const bool forward = o.op == MlpOp::kForward;
  const auto give = [&](bool wanted, std::initializer_list<T> tensors) {
    for (const T t : tensors) p.given |= wanted ? bit_of(t) : 0;
  };
  give(true, {T::kX, T::kUp, T::kDown, forward ? T::kOut : T::kDout});
  give(o.gated, {T::kGate});
  give(o.biased, {T::kUpBias});
  give(o.biased && o.gated, {T::kGateBias});
  give(o.biased && forward, {T::kDownBias, T::kResidual});
  give(o.kept, {T::kBefore, o.gated ? T::kBeforeGate : T::kHidden});
  give(!forward, {T::kDx, T::kDup, T::kDdown});
  give(!forward && o.gated, {T::kDgate});
  give(!forward && o.biased, {T::kDbefore});
  give(!forward && o.biased && o.gated, {T::kDbeforeGate});
  p.given &= ~o.without;
  c.layout = o.layout;
  c.scale = o.scale;
  set_alignment(c);
  c.name = describe(c);
  return c;
}

constexpr Shape kOdd{70, 40, 45, 33}, kEven{136, 64, 72, 48};
// Few output columns, and as many rows as make one kernel the fastest: an odd number of tiles of hidden columns, of which the
// last is not full, and rows of out that are not aligned; an even number, and two row tiles for most CTAs; all of K.
constexpr Shape kNarrow{16800, 72, 400, 30}, kNarrowTwice{33700, 16, 320, 32}, kNarrowDeep{16500, 512, 160, 8};

std::vector<Case> quick() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const bool gated : {false, true}) {
      out.push_back(make(dtype, kOdd, {.gated = gated}));
      out.push_back(make(dtype, kOdd, {.op = MlpOp::kBackward, .gated = gated, .kept = true}));
    }
  }
  return out;
}

std::vector<Case> full() {
  std::vector<Case> out;
  constexpr MlpOp kBackward = MlpOp::kBackward;
  for (const DType dtype : kAllTypes) {
    for (const MlpOp op : {MlpOp::kForward, kBackward}) {
      for (const bool gated : {false, true}) {
        for (const bool kept : {false, true}) {
          for (const Layout l : {Layout::kCompact, Layout::kPaddedHidden, Layout::kFreeHidden, Layout::kUnaligned}) {
            out.push_back(make(dtype, kOdd, {.op = op, .gated = gated, .biased = true, .kept = kept, .layout = l}));
          }
          out.push_back(make(dtype, kEven, {.op = op, .gated = gated, .kept = kept, .activation = kGeluErf}));
        }
        for (const int f : kActivations) {
          out.push_back(make(dtype, {33, 24, 37, 17}, {.op = op, .gated = gated, .kept = true, .activation = f}));
        }
        out.push_back(make(dtype, {33, 24, 37, 17}, {.op = op, .gated = gated, .activation = kIdentity}));
        for (const Shape& s : {Shape{0, 8, 8, 8}, Shape{1, 1, 1, 1}, Shape{5, 0, 7, 3}, Shape{5, 3, 0, 4}}) {
          out.push_back(make(dtype, s, {.op = op, .gated = gated, .biased = true}));
        }
      }
    }
    // Single gradients.
    constexpr std::uint32_t kWeights = bit_of(T::kDup) | bit_of(T::kDdown) | bit_of(T::kDgate);
    for (const bool gated : {false, true}) {
      out.push_back(make(dtype, kOdd, {.op = kBackward, .gated = gated, .kept = true, .without = kWeights}));
      out.push_back(make(dtype, kOdd, {.op = kBackward, .gated = gated, .without = bit_of(T::kDx) | bit_of(T::kDup)}));
    }
    if (dtype == DType::kFloat32) continue;
    // Many tiles, and sums that are split.
    out.push_back(make(dtype, {2600, 96, 205, 88}, {.biased = true, .kept = true}));
    out.push_back(make(dtype, {2600, 96, 205, 88}, {.op = kBackward, .biased = true, .kept = true}));
    out.push_back(make(dtype, {2600, 96, 200, 88}, {.op = kBackward, .gated = true}));
    for (const MlpOp op : {MlpOp::kForward, kBackward}) {
      out.push_back(make(dtype, {2600, 96, 200, 88}, {.op = op, .gated = true, .kept = true}));
      out.push_back(make(dtype, {17000, 24, 136, 16}, {.op = op, .gated = true, .kept = true}));
      out.push_back(make(dtype, {2600, 96, 205, 88},
                         {.op = op, .gated = true, .biased = true, .kept = true, .layout = Layout::kFreeHidden}));
    }
    for (const Shape& s : {kNarrow, kNarrowTwice, kNarrowDeep}) out.push_back(make(dtype, s, {}));
    for (const int f : {kIdentity, kRelu, kGeluTanh, kGeluErf}) {
      out.push_back(make(dtype, {16897, 16, 320, 5}, {.activation = f}));
    }
  }
  return out;
}

std::vector<Case> hostile() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const MlpOp op : {MlpOp::kForward, MlpOp::kBackward}) {
      for (const bool gated : {false, true}) {
        for (const int f : kActivations) {
          out.push_back(make(dtype, kOdd,
                             {.op = op, .gated = gated, .kept = true, .activation = f, .scale = gated ? 20.0 : 100.0}));
        }
        out.push_back(make(dtype, kOdd, {.op = op, .gated = gated, .kept = true, .scale = 1e-3}));
      }
    }
    if (dtype != DType::kFloat32) out.push_back(make(dtype, {16800, 16, 320, 5}, {.scale = 100.0}));
  }
  return out;
}

std::vector<Case> sanitize() {
  std::vector<Case> out = {make(DType::kBFloat16, kNarrow, {})};
  for (const bool gated : {false, true}) {
    out.push_back(make(DType::kBFloat16, kOdd, {.gated = gated, .biased = true, .kept = true}));
    out.push_back(make(DType::kBFloat16, kOdd, {.op = MlpOp::kBackward, .gated = gated, .layout = Layout::kUnaligned}));
  }
  return out;
}

std::vector<Case> bench() {
  return {make(DType::kBFloat16, {256, 512, 1365, 512}, {}),
          make(DType::kBFloat16, {256, 512, 1365, 512}, {.op = MlpOp::kBackward, .kept = true})};
}

std::vector<Case> bench_gpu() {
  std::vector<Case> out;
  for (const auto& [shape, gated] :
       {std::pair{Shape{36096, 512, 1365, 512}, false}, {{8192, 4096, 11008, 4096}, true}}) {
    out.push_back(make(DType::kBFloat16, shape, {.gated = gated}));
    out.push_back(make(DType::kBFloat16, shape, {.gated = gated, .kept = true, .layout = Layout::kFreeHidden}));
    out.push_back(make(DType::kBFloat16, shape,
                       {.op = MlpOp::kBackward, .gated = gated, .kept = true, .layout = Layout::kFreeHidden}));
  }
  out.push_back(make(DType::kBFloat16, {32000, 512, 13656, 32}, {}));
  for (Case& c : out) c.tags.emplace_back("mlp");
  return out;
}

std::vector<Case> evidence() {
  constexpr Shape kShape{256, 512, 1365, 512};
  return {make(DType::kBFloat16, kShape, {.kept = true, .layout = Layout::kFreeHidden}),
          make(DType::kBFloat16, kShape, {.op = MlpOp::kBackward, .kept = true, .layout = Layout::kFreeHidden})};
}

HostTensor tensor_of(const MlpProblem& p, T tensor, bool with_values) {
  const Dims dims = dims_of(p, tensor);
  if (with_values) return {1, 1, dims.rows, dims.columns};
  HostTensor t;
  t.shape = {1, 1, dims.rows, dims.columns};
  return t;
}

Tensors make_tensors(const Case& c, bool with_values) {
  const MlpProblem& p = c.problem;
  const auto unit = [](std::int64_t terms) {
    return 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(terms, 1)));
  };
  Tensors all;
  for (int i = 0; i < kMlpTensors; ++i) {
    const T t = static_cast<T>(i);
    if (!p.has(t) || is_written(p, t)) continue;
    HostTensor& values = all[static_cast<std::size_t>(i)];
    values = tensor_of(p, t, with_values);
    if (!with_values || is_between_layers(t)) continue;
    const double scale = t == T::kX                     ? c.scale
                         : t == T::kUp || t == T::kGate ? unit(p.k)
                         : t == T::kDown                ? unit(p.hidden)
                                                        : 1;
    const RandomStream random(c.seed, static_cast<std::uint64_t>(i));
    for (std::int64_t n = 0; n < values.size(); ++n) {
      values.data[static_cast<std::size_t>(n)] = round_to(p.dtype, scale * random.normal(n));
    }
  }
  if (p.op == MlpOp::kBackward && p.has(T::kBefore) && with_values) {
    MlpProblem forward = p;
    forward.op = MlpOp::kForward;
    const Tensors made = plain(forward, all, 0);
    for (const T t : {T::kBefore, T::kBeforeGate, T::kHidden}) {
      if (p.has(t)) all[static_cast<std::size_t>(t)] = made[static_cast<std::size_t>(t)];
    }
  }
  return all;
}

}  // namespace

const char* name_of(T tensor) {
  constexpr const char* kNames[] = {
      "x",      "up",          "down",   "out", "dout", "gate",  "up_bias", "gate_bias", "down_bias",    "residual",
      "before", "before_gate", "hidden", "dx",  "dup",  "ddown", "dgate",   "dbefore",   "dbefore_gate", "dhidden"};
  return kNames[static_cast<std::size_t>(tensor)];
}

bool is_vector(T tensor) { return tensor == T::kUpBias || tensor == T::kGateBias || tensor == T::kDownBias; }
bool is_between_layers(T tensor) {
  return tensor == T::kBefore || tensor == T::kBeforeGate || tensor == T::kHidden || tensor == T::kDbefore ||
         tensor == T::kDbeforeGate;
}
bool is_written(const MlpProblem& p, T tensor) {
  if (p.op == MlpOp::kBackward) return tensor >= T::kDx && tensor <= T::kDbeforeGate;
  return tensor == T::kOut || is_between_layers(tensor);
}

Dims dims_of(const MlpProblem& p, T tensor) {
  switch (tensor) {
    case T::kX:
    case T::kDx:
      return {p.m, p.k};
    case T::kUp:
    case T::kGate:
    case T::kDup:
    case T::kDgate:
      return {p.hidden, p.k};
    case T::kDown:
    case T::kDdown:
      return {p.n, p.hidden};
    case T::kUpBias:
    case T::kGateBias:
      return {1, p.hidden};
    case T::kDownBias:
      return {1, p.n};
    case T::kOut:
    case T::kDout:
    case T::kResidual:
      return {p.m, p.n};
    default:
      return {p.m, p.hidden};
  }
}

std::int64_t row_stride(const Case& c, T tensor) {
  const std::int64_t columns = dims_of(c.problem, tensor).columns;
  if (c.layout == Layout::kUnaligned && !is_vector(tensor)) return columns + 3;
  if (!is_between_layers(tensor)) return columns;
  const std::int64_t multiple = c.layout == Layout::kPaddedHidden ? 8 : c.layout == Layout::kFreeHidden ? 64 : 1;
  return (columns + multiple - 1) / multiple * multiple;
}

void set_alignment(Case& c) {
  MlpProblem& p = c.problem;
  p.aligned = ~0u;
  p.hidden_padded = c.layout == Layout::kFreeHidden;
  for (int i = 0; i < kMlpTensors; ++i) {
    const T t = static_cast<T>(i);
    if (!p.has(t) || is_vector(t)) continue;
    const Dims dims = dims_of(p, t);
    const bool matters = dims.rows > 1 && dims.columns > 0;
    if (matters && row_stride(c, t) * static_cast<std::int64_t>(size_of(p.dtype)) % 16 != 0) p.aligned &= ~bit_of(t);
  }
}

std::string describe(const Case& c) {
  const MlpProblem& p = c.problem;
  std::string text = format("mlp/{}/{}/m{}_k{}_h{}_n{}/{}", p.op == MlpOp::kForward ? "fwd" : "bwd",
                            tessera::name_of(p.dtype), p.m, p.k, p.hidden, p.n, activation_name(p.activation));
  const auto add = [&](bool here, const char* what) {
    if (here) text += format("+{}", what);
  };
  add(p.has(T::kGate), "gated");
  add(p.has(T::kUpBias), "bias");
  add(p.has(T::kBefore), "kept");
  add(p.op == MlpOp::kBackward && !p.has(T::kDx), "no_dx");
  add(p.op == MlpOp::kBackward && !p.has(T::kDup), "no_dup");
  add(p.op == MlpOp::kBackward && !p.has(T::kDdown), "no_ddown");
  add(c.layout == Layout::kCompact, "compact");
  add(c.layout == Layout::kUnaligned, "unaligned");
  add(c.layout == Layout::kFreeHidden, "free");
  if (c.scale != 1) text += format("+scale{}", c.scale);
  return text;
}

double Case::flops() const {
  const MlpProblem& p = problem;
  const double products = static_cast<double>(p.k) * (p.has(T::kGate) ? 2 : 1) + static_cast<double>(p.n);
  const double forward = 2 * static_cast<double>(p.m) * static_cast<double>(p.hidden) * products;
  return p.op == MlpOp::kForward ? forward : 2 * forward;
}

double Case::bytes() const {
  double elements = 0;
  for (int i = 0; i < kMlpTensors; ++i) {
    if (!problem.has(static_cast<T>(i))) continue;
    const Dims dims = dims_of(problem, static_cast<T>(i));
    elements += static_cast<double>(dims.rows) * static_cast<double>(dims.columns);
  }
  return elements * static_cast<double>(size_of(problem.dtype));
}

double Case::unfused_bytes() const {
  const double pass = static_cast<double>(problem.m) * static_cast<double>(problem.hidden) *
                      static_cast<double>(size_of(problem.dtype));
  return bytes() + pass * (problem.op == MlpOp::kForward ? 4 : 8);
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

Tensors make_inputs(const Case& c) { return make_tensors(c, true); }
Tensors make_shapes(const Case& c) { return make_tensors(c, false); }

}  // namespace tessera::verify::mlp
