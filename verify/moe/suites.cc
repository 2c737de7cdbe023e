#include <cmath>
#include <initializer_list>
#include <iterator>

#include "base/format.h"
#include "verify/moe/cases.h"
#include "verify/random.h"

namespace tessera::verify::moe {
namespace {

using T = MoeTensor;
constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

struct Shape {
  std::int64_t m, k, hidden, experts, top_k;
};
struct Options {
  bool backward = false, gated = true, kept = false, x_rows = false, balanced = false;
  int scoring = kMoeSoftmax;
  bool normalized = true, fp32_logits = false;
  int activation = kSilu;
  Layout layout = Layout::kPaddedHidden;
  Routing routing = Routing::kNormal;
  double scale = 1;
  std::uint64_t without = 0;  // bits of gradients that are not asked for
};

Case make(DType dtype, const Shape& s, const Options& o) {
  Case c;
  MoeProblem& p = c.problem;
  p.op = o.backward ? MoeOp::kBackward : MoeOp::kForward;
  p.dtype = dtype;
  p.m = s.m, p.k = s.k, p.hidden = s.hidden, p.experts = s.experts, p.top_k = s.top_k;
  p.activation = o.activation;
  p.scoring = o.scoring;
  const bool routes = o.scoring != kMoeGiven;
  p.normalized = o.normalized && routes;
  p.logits_dtype = o.fp32_logits || !routes ? DType::kFloat32 : dtype;
  const auto give = [&](bool wanted, std::initializer_list<T> tensors) {
    for (const T t : tensors) p.given |= wanted ? bit_of(t) : 0;
  };
  give(true, {T::kX, T::kUp, T::kDown, o.backward ? T::kDout : T::kOut});
  give(true, {T::kExperts, T::kWeights, T::kPositions, T::kOffsets});
  give(routes, {T::kLogits});
  give(o.gated, {T::kGate});
  give(o.kept, {T::kBefore});
  give(o.kept && o.gated, {T::kBeforeGate});
  give(o.x_rows, {T::kXRows});
  give(o.balanced, {o.backward ? T::kDbalanceLoss : T::kBalanceLoss});
  give(o.backward, {T::kDx, T::kDup, T::kDdown, routes ? T::kDlogits : T::kDweights});
  give(o.backward && o.gated, {T::kDgate});
  p.given &= ~o.without;
  c.layout = o.layout;
  c.routing = o.routing;
  c.scale = o.scale;
  complete(c);
  return c;
}

constexpr Shape kOdd{37, 40, 45, 5, 2}, kEven{70, 64, 72, 8, 2};

std::vector<Case> quick() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const bool backward : {false, true}) {
      out.push_back(make(dtype, kOdd, {.backward = backward, .kept = true, .balanced = true}));
      out.push_back(make(dtype, kEven, {.backward = backward, .gated = false, .scoring = kMoeSigmoid}));
    }
  }
  return out;
}

std::vector<Case> full() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const bool backward : {false, true}) {
      const auto add = [&](const Shape& s, Options o) {
        o.backward = backward;
        out.push_back(make(dtype, s, o));
      };
      for (const bool gated : {false, true}) {
        for (const bool kept : {false, true})
          add(kEven, {.gated = gated, .kept = kept, .x_rows = gated, .balanced = true});
        add(kOdd, {.gated = gated, .kept = true, .x_rows = gated, .layout = Layout::kUnaligned});
      }
      add(kOdd, {.kept = true, .activation = kGeluTanh, .layout = Layout::kCompact});
      add(kOdd, {.scoring = kMoeSigmoid, .normalized = false, .fp32_logits = true});
      add(kEven, {.balanced = true, .scoring = kMoeSigmoid});
      add(kEven, {.kept = true, .balanced = true, .normalized = false, .fp32_logits = true});
      add(kOdd, {.scoring = kMoeGiven});
      for (const Routing r : {Routing::kTies, Routing::kOneExpert, Routing::kEmpty}) {
        add({70, 24, 32, 40, 3}, {.kept = true, .balanced = true, .routing = r});
      }
      add({70, 24, 32, 9, 3}, {.scoring = kMoeGiven, .routing = Routing::kSkipped});
      // No tokens, one token, one expert, all experts.
      for (const Shape& s :
           {Shape{0, 16, 16, 4, 2}, Shape{1, 16, 16, 4, 2}, Shape{9, 16, 16, 1, 1}, Shape{9, 16, 16, 4, 4}}) {
        add(s, {.kept = true, .balanced = true});
      }
      // Several tiles for an expert, whole and not.
      add({700, 136, 328, 5, 2}, {.kept = true, .x_rows = true, .balanced = true});
      add({700, 136, 328, 5, 2}, {.kept = true, .x_rows = true, .routing = Routing::kOneExpert});
      add({6000, 16, 136, 5, 2}, {.kept = true, .x_rows = true, .balanced = true});  // for a CTA, too
      // More than 32 pairs per chunk; several experts per lane.
      add({1600, 16, 16, 64, 8}, {.kept = true, .balanced = true});
      add({300, 8, 16, 300, 32}, {.balanced = true, .scoring = kMoeSigmoid});
    }
    // Single gradients.
    constexpr std::uint64_t kWeights = bit_of(T::kDup) | bit_of(T::kDdown) | bit_of(T::kDgate);
    out.push_back(make(dtype, kEven, {.backward = true, .kept = true, .without = kWeights | bit_of(T::kDlogits)}));
    out.push_back(make(dtype, kEven, {.backward = true, .kept = true, .without = kWeights | bit_of(T::kDx)}));
    out.push_back(make(dtype, kEven, {.backward = true, .without = bit_of(T::kDx) | bit_of(T::kDdown)}));
  }
  return out;
}

std::vector<Case> hostile() {
  std::vector<Case> out;
  for (const DType dtype : kAllTypes) {
    for (const bool backward : {false, true}) {
      for (const int scoring : {kMoeSoftmax, kMoeSigmoid}) {
        for (const bool normalized : {false, true}) {
          out.push_back(make(dtype, kEven,
                             {.backward = backward,
                              .kept = true,
                              .balanced = true,
                              .scoring = scoring,
                              .normalized = normalized,
                              .routing = Routing::kHostile,
                              .scale = 20}));
        }
      }
      out.push_back(make(dtype, kEven, {.backward = backward, .balanced = true, .routing = Routing::kMasked}));
      out.push_back(make(dtype, kEven, {.backward = backward, .routing = Routing::kTies, .scale = 1e-3}));
    }
  }
  return out;
}

std::vector<Case> sanitize() {
  std::vector<Case> out;
  for (const bool backward : {false, true}) {
    out.push_back(make(DType::kBFloat16, kOdd, {.backward = backward, .kept = true, .balanced = true}));
    out.push_back(make(DType::kBFloat16, {70, 24, 32, 9, 3},
                       {.backward = backward, .gated = false, .scoring = kMoeGiven, .routing = Routing::kSkipped}));
  }
  return out;
}

std::vector<Case> bench() {
  return {make(DType::kBFloat16, {256, 256, 352, 16, 4}, {}),
          make(DType::kBFloat16, {256, 256, 352, 16, 4}, {.backward = true, .kept = true})};
}

std::vector<Case> bench_gpu() {
  std::vector<Case> out;
  for (const Shape& s : {Shape{8192, 4096, 14336, 8, 2}, Shape{8192, 2048, 1408, 64, 8}}) {
    out.push_back(make(DType::kBFloat16, s, {}));
    out.push_back(make(DType::kBFloat16, s, {.kept = true, .x_rows = true}));
    out.push_back(make(DType::kBFloat16, s, {.backward = true, .kept = true, .x_rows = true}));
  }
  return out;
}

std::vector<Case> evidence() {
  constexpr Shape kShape{256, 256, 512, 8, 2};
  return {make(DType::kBFloat16, kShape, {.kept = true, .x_rows = true}),
          make(DType::kBFloat16, kShape, {.backward = true, .kept = true, .x_rows = true})};
}

// A small problem from a number: what `tessera fuzz` tries.
Case random_case(std::uint64_t number, std::uint64_t kind_number) {
  Draw kind(kind_number, 0x6b696e64), draw(number, 0x66757a7b);
  const DType dtype = kind.one_in(16) ? DType::kFloat32 : kind.one_in(2) ? DType::kFloat16 : DType::kBFloat16;
  Shape s{};
  s.m = draw.one_in(4) ? 1 + draw.below(600) : draw.below(40);
  s.k = kind.one_in(2) ? 8 * (1 + draw.below(8)) : draw.below(50);
  s.hidden = kind.one_in(2) ? 8 * (1 + draw.below(8)) : draw.below(50);
  s.experts = kind.one_in(6) ? 1 + draw.below(130) : 1 + draw.below(12);
  s.top_k = 1 + draw.below(std::min<std::int64_t>(s.experts, 10));
  constexpr int kActivations[] = {kIdentity, kRelu, kSilu, kGeluTanh, kGeluErf};
  constexpr Layout kLayouts[] = {Layout::kCompact, Layout::kPaddedHidden, Layout::kUnaligned};
  constexpr Routing kRoutings[] = {Routing::kNormal, Routing::kTies, Routing::kEmpty, Routing::kHostile};
  Options o;
  o.backward = kind.one_in(2);
  o.gated = !kind.one_in(3);
  o.kept = kind.one_in(2);
  o.x_rows = kind.one_in(2);
  o.scoring = static_cast<int>(kind.below(3));
  o.balanced = o.scoring != kMoeGiven && kind.one_in(2);
  o.normalized = kind.one_in(2);
  o.fp32_logits = kind.one_in(3);
  o.activation = kind.pick(kActivations);
  o.layout = kind.pick(kLayouts);
  o.routing = o.scoring == kMoeGiven && draw.one_in(2) ? Routing::kSkipped : draw.pick(kRoutings);
  Case c = make(dtype, s, o);
  c.seed = number;
  return c;
}

const char* name_of(Routing r) {
  constexpr const char* kNames[] = {"", "ties", "one_expert", "empty", "hostile", "masked", "skipped"};
  return kNames[static_cast<std::size_t>(r)];
}

// The logits of a token; of a case whose experts are given, those that the experts are made from.
double logit_of(const Case& c, std::int64_t token, std::int64_t expert) {
  const RandomStream random(c.seed, 1000);
  const double x = random.normal(token * c.problem.experts + expert);
  switch (c.routing) {
    case Routing::kTies:
      return x > 0.5 ? 1 : 0;
    case Routing::kOneExpert:
      return expert == 3 ? 20 : x;
    case Routing::kEmpty:
      return expert % 2 == 0 ? x : x - 100;
    case Routing::kHostile:
      return token % 3 == 0 ? 10 * x - 150 : 3000 * x;
    case Routing::kMasked:
      return expert % 2 == 0 ? x : -INFINITY;
    default:
      return x;
  }
}

}  // namespace

bool is_integer(T t) { return t == T::kExperts || t == T::kPositions || t == T::kOffsets; }

bool is_written(const MoeProblem& p, T t) {
  if (p.op == MoeOp::kBackward) return t >= T::kDx && t <= T::kDgate;
  if (t == T::kExperts || t == T::kWeights) return p.scoring != kMoeGiven;
  return t == T::kOut || t == T::kPositions || t == T::kOffsets || t == T::kBalanceLoss || t == T::kBefore ||
         t == T::kBeforeGate || t == T::kXRows;
}

DType dtype_of(const MoeProblem& p, T t) {
  if (t == T::kLogits || t == T::kDlogits) return p.logits_dtype;
  const bool fp32 = t == T::kWeights || t == T::kDweights || t == T::kBalanceLoss || t == T::kDbalanceLoss;
  return fp32 ? DType::kFloat32 : p.dtype;
}

std::array<std::int64_t, 4> strides_of(const Case& c, T t) {
  const auto dims = shape_of(c.problem, t).dims;
  const bool compact = is_integer(t) || t == T::kWeights || t == T::kDweights || shape_of(c.problem, t).rank == 1;
  std::int64_t row = dims[2];
  if (c.layout == Layout::kUnaligned && !compact) row += 3;
  const bool between = t == T::kBefore || t == T::kBeforeGate || t == T::kXRows;
  if (c.layout == Layout::kPaddedHidden && between) row = (row + 7) / 8 * 8;
  const std::int64_t layer = row * dims[1];
  return {layer * dims[0], layer, row, 1};
}

void complete(Case& c) {
  MoeProblem& p = c.problem;
  p.aligned = ~std::uint64_t{0};
  for (int i = 0; i < kMoeGivenTensors; ++i) {
    const T t = static_cast<T>(i);
    if (!p.has(t) || is_integer(t) || dtype_of(p, t) != p.dtype || t == T::kLogits || t == T::kDlogits) continue;
    if (t == T::kWeights || t == T::kDweights || t == T::kBalanceLoss || t == T::kDbalanceLoss) continue;
    const auto dims = shape_of(p, t).dims;
    const auto strides = strides_of(c, t);
    const auto size = static_cast<std::int64_t>(size_of(p.dtype));
    for (const int dim : {0, 1}) {
      const auto at = static_cast<std::size_t>(dim);
      if (dims[at] > 1 && strides[at + 1] * size % 16 != 0) p.aligned &= ~bit_of(t);
    }
  }
  std::string text =
      format("moe/{}/{}/m{}_k{}_h{}_e{}_top{}/{}", p.op == MoeOp::kForward ? "fwd" : "bwd", tessera::name_of(p.dtype),
             p.m, p.k, p.hidden, p.experts, p.top_k, activation_name(p.activation));
  const auto add = [&](bool here, const char* what) {
    if (here) text += format("+{}", what);
  };
  add(p.has(T::kGate), "gated");
  add(p.scoring == kMoeSigmoid, "sigmoid");
  add(p.scoring == kMoeGiven, "given");
  add(p.normalized, "normalized");
  add(p.scoring != kMoeGiven && p.logits_dtype != p.dtype, "fp32_logits");
  add(p.has(T::kBefore), "kept");
  add(p.has(T::kXRows), "x_rows");
  add(p.has(T::kBalanceLoss) || p.has(T::kDbalanceLoss), "balanced");
  const bool backward = p.op == MoeOp::kBackward;
  add(backward && !p.has(T::kDx), "no_dx");
  add(backward && !p.has(T::kDup), "no_dup");
  add(backward && !p.has(T::kDdown), "no_ddown");
  add(backward && !p.has(T::kDlogits) && p.scoring != kMoeGiven, "no_dlogits");
  add(c.layout == Layout::kCompact, "compact");
  add(c.layout == Layout::kUnaligned, "unaligned");
  add(c.routing != Routing::kNormal, name_of(c.routing));
  if (c.scale != 1) text += format("+scale{}", c.scale);
  c.name = text;
}

double Case::flops() const {
  const MoeProblem& p = problem;
  const double forward = 2 * static_cast<double>(p.pairs()) * static_cast<double>(p.k) * static_cast<double>(p.hidden) *
                         (p.has(T::kGate) ? 3 : 2);
  return p.op == MoeOp::kForward ? forward : 2 * forward;
}

double Case::bytes() const {
  double bytes = 0;
  for (int i = 0; i < kMoeGivenTensors; ++i) {
    const T t = static_cast<T>(i);
    if (!problem.has(t)) continue;
    const auto dims = shape_of(problem, t).dims;
    bytes += static_cast<double>(dims[0]) * static_cast<double>(dims[1]) * static_cast<double>(dims[2]) *
             (is_integer(t) ? 4.0 : static_cast<double>(size_of(dtype_of(problem, t))));
  }
  return bytes;
}

double Case::unfused_bytes() const {
  const double rows = static_cast<double>(problem.pairs()) * static_cast<double>(size_of(problem.dtype));
  const double passes = problem.op == MoeOp::kForward ? 4 : 8;
  return bytes() + rows * passes * static_cast<double>(problem.hidden + problem.k);
}

const std::vector<std::string>& suite_names() {
  static const std::vector<std::string> names{"quick", "full", "hostile", "sanitize", "bench", "bench-gpu", "evidence"};
  return names;
}

std::unique_ptr<verify::Case> random_moe(std::uint64_t number, std::uint64_t kind) {
  return moe_case(random_case(number, kind));
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

Tensors make_inputs(const Case& c, Values wanted) {
  const MoeProblem& p = c.problem;
  const auto unit = [](std::int64_t terms) {
    return 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(terms, 1)));
  };
  const auto at = [](T t) { return static_cast<std::size_t>(t); };
  const auto tensor_of = [&](T t) -> HostTensor {
    const auto dims = shape_of(p, t).dims;
    return {1, dims[0], dims[1], dims[2]};
  };
  Tensors all;
  // The router first.
  HostTensor& logits = all[at(T::kLogits)];
  logits = tensor_of(T::kLogits);
  for (std::int64_t token = 0; token < p.m; ++token) {
    for (std::int64_t e = 0; e < p.experts; ++e) {
      logits.at(0, 0, token, e) = round_to(p.logits_dtype, logit_of(c, token, e));
    }
  }
  if (p.op == MoeOp::kBackward || p.scoring == kMoeGiven) {
    MoeProblem router = p;
    if (p.scoring == kMoeGiven) router.scoring = kMoeSoftmax;
    Tensors made = routed(router, all);
    if (c.routing == Routing::kSkipped) {
      HostTensor& experts = made[at(T::kExperts)];
      for (std::int64_t n = 0; n < experts.size(); n += 5) {
        experts.data[static_cast<std::size_t>(n)] = n % 2 == 0 ? -1.0 : static_cast<double>(p.experts);
      }
      const Tensors given = made;
      made = routed(p, given);
      made[at(T::kExperts)] = given[at(T::kExperts)];
      made[at(T::kWeights)] = given[at(T::kWeights)];
    }
    round_all(DType::kFloat32, made[at(T::kWeights)]);
    for (const T t : {T::kExperts, T::kWeights, T::kPositions, T::kOffsets}) {
      if (!is_written(p, t)) all[at(t)] = made[at(t)];
    }
  }
  if (p.scoring == kMoeGiven) logits = {};
  if (p.has(T::kDbalanceLoss))
    all[at(T::kDbalanceLoss)] = HostTensor(1, 1, 1, 1), all[at(T::kDbalanceLoss)].data[0] = 100;
  if (wanted == Values::kRouter) return all;
  for (const T t : {T::kX, T::kUp, T::kDown, T::kGate, T::kDout}) {
    if (!p.has(t)) continue;
    HostTensor& values = all[at(t)];
    values = tensor_of(t);
    const double scale = t == T::kX ? c.scale : t == T::kDown ? unit(p.hidden) : t == T::kDout ? 1 : unit(p.k);
    const RandomStream random(c.seed, static_cast<std::uint64_t>(t));
    for (std::int64_t n = 0; n < values.size(); ++n) {
      values.data[static_cast<std::size_t>(n)] = round_to(p.dtype, scale * random.normal(n));
    }
  }
  if (p.op == MoeOp::kBackward && (p.has(T::kBefore) || p.has(T::kXRows))) {
    MoeProblem forward = p;
    forward.op = MoeOp::kForward;
    forward.given &= bit_of(T::kDx) - 1;  // all that is before the gradients
    forward.given |= bit_of(T::kOut);
    const Tensors made = plain(forward, all, 0);
    for (const T t : {T::kBefore, T::kBeforeGate, T::kXRows}) {
      if (p.has(t)) all[at(t)] = made[at(t)];
    }
  }
  return all;
}

}  // namespace tessera::verify::moe
