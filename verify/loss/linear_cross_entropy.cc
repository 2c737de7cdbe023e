#include "verify/loss/linear_cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "base/format.h"
#include "loss/family.h"
#include "verify/device.h"
#include "verify/parallel.h"
#include "verify/random.h"

namespace tessera::verify::linear_cross_entropy {
namespace {

// sum over i of a(row, i) b(i, column), with a(row, i) = value_a(row, i). terms: by Cauchy and Schwarz, and what the errors
// of A add.
template <class Real, class A, class B>
HostTensor product(std::int64_t m, std::int64_t n, std::int64_t k, const A& value_a, const B& value_b, int threads) {
  HostTensor out(1, 1, m, n);
  in_parallel(m, threads, [&](std::int64_t row) {
    std::vector<Real> sums(static_cast<std::size_t>(n));
    for (std::int64_t i = 0; i < k; ++i) {
      const auto left = static_cast<Real>(value_a(row, i));
      for (std::int64_t j = 0; j < n; ++j) {
        sums[static_cast<std::size_t>(j)] += left * static_cast<Real>(value_b(i, j));
      }
    }
    for (std::int64_t j = 0; j < n; ++j) out.at(0, 0, row, j) = static_cast<double>(sums[static_cast<std::size_t>(j)]);
  });
  return out;
}

template <class Real>
Outputs compute(const LossProblem& p, const Inputs& in, int threads) {
  constexpr bool kPlain = sizeof(Real) == sizeof(float);
  const auto finished = [&](HostTensor& t) {
    if (kPlain) round_all(p.dtype, t);
  };
  const HostTensor &hidden = in.hidden, &weight = in.weight;
  HostTensor logits = product<Real>(
      p.rows, p.classes, p.width, [&](auto r, auto i) { return hidden.at(0, 0, r, i); },
      [&](auto i, auto c) { return weight.at(0, 0, c, i); }, threads);
  finished(logits);
  const double logit_terms = largest_norm(hidden, false) * largest_norm(weight, false);

  HostTensor dlogits(1, 1, p.rows, p.classes);
  std::vector<Real> losses(static_cast<std::size_t>(p.rows));
  Real sum = 0;
  std::int64_t counted = 0;
  double most_dout = 1;
  for (std::int64_t row = 0; row < p.rows; ++row) {
    const std::int32_t target = in.target[static_cast<std::size_t>(row)];
    if (target < 0 || target >= p.classes) continue;
    ++counted;
    Real most = static_cast<Real>(logits.at(0, 0, row, 0)), all = 0;
    for (std::int64_t c = 1; c < p.classes; ++c) most = std::max(most, static_cast<Real>(logits.at(0, 0, row, c)));
    for (std::int64_t c = 0; c < p.classes; ++c) all += std::exp(static_cast<Real>(logits.at(0, 0, row, c)) - most);
    Real& loss = losses[static_cast<std::size_t>(row)];
    loss = (most - static_cast<Real>(logits.at(0, 0, row, target))) + std::log(all);
    sum += loss;
    const Real dout = in.dout.empty() ? Real(1) : static_cast<Real>(in.dout.data[static_cast<std::size_t>(row)]);
    most_dout = std::max(most_dout, static_cast<double>(std::abs(dout)));
    for (std::int64_t c = 0; c < p.classes; ++c) {
      const Real softmax = std::exp(static_cast<Real>(logits.at(0, 0, row, c)) - most) / all;
      dlogits.at(0, 0, row, c) = static_cast<double>((c == target ? softmax - 1 : softmax) * dout);
    }
  }
  finished(dlogits);
  // An error of a logit changes its softmax by at most a quarter of it.
  const double dlogit_terms = most_dout * (1 + logit_terms / 4);

  Outputs results;
  const bool reduced = p.reduction != Reduction::kNone;
  results.out = HostTensor(1, 1, 1, reduced ? 1 : p.rows);
  results.out.terms = 2 * logit_terms * (p.reduction == Reduction::kSum ? static_cast<double>(counted) : 1);
  if (!reduced) {
    for (std::size_t i = 0; i < losses.size(); ++i) results.out.data[i] = static_cast<double>(losses[i]);
  } else {
    if (p.reduction == Reduction::kMean) sum /= static_cast<Real>(std::max<std::int64_t>(counted, 1));
    results.out.data[0] = static_cast<double>(sum);
  }
  const auto d = [&](auto row, auto c) { return dlogits.at(0, 0, row, c); };
  if (p.dhidden) {
    results.dhidden = product<Real>(
        p.rows, p.width, p.classes, d, [&](auto c, auto i) { return weight.at(0, 0, c, i); }, threads);
    results.dhidden.terms = largest_norm(dlogits, false) * largest_norm(weight, true) +
                            std::sqrt(static_cast<double>(p.classes)) * dlogit_terms * largest(weight);
    finished(results.dhidden);
  }
  if (p.dweight) {
    results.dweight = product<Real>(
        p.classes, p.width, p.rows, [&](auto c, auto row) { return d(row, c); },
        [&](auto row, auto i) { return hidden.at(0, 0, row, i); }, threads);
    results.dweight.terms = largest_norm(dlogits, true) * largest_norm(hidden, true) +
                            std::sqrt(static_cast<double>(p.rows)) * dlogit_terms * largest(hidden);
    finished(results.dweight);
  }
  return results;
}

class Trial final : public TrialOf<Case, Inputs, Outputs, Buffers> {
 public:
  explicit Trial(const Case& c) : TrialOf(c, make_inputs(c)) {}

 private:
  void compute(int threads) override {
    exact_ = linear_cross_entropy::expected(case_.problem, inputs_, threads);
    plain_ = linear_cross_entropy::plain(case_.problem, inputs_, threads);
  }
  void compare(const Buffers& buffers, Judgement& judgement) override {
    const LossProblem& p = case_.problem;
    const Outputs got = buffers.results();
    // fp32 sums in another order, and functions that are good to an ulp or two, need tolerance where the plain computation
    // may be exact by luck. dweight is rounded up to eight times.
    const double floor = p.dtype == DType::kFloat32 ? 4 : 2;
    judgement.add("out", verify::judge(got.out, exact_.out, plain_.out, DType::kFloat32, 4));
    if (p.dhidden) {
      judgement.add("dhidden", verify::judge(got.dhidden, exact_.dhidden, plain_.dhidden, p.dtype, floor));
    }
    if (p.dweight) {
      judgement.add("dweight", verify::judge(got.dweight, exact_.dweight, plain_.dweight, p.dtype, floor));
    }
  }
};

Inputs make_shapes(const Case& c) {
  const LossProblem& p = c.problem;
  Inputs in;
  in.hidden.shape = {1, 1, p.rows, p.width};
  in.weight.shape = {1, 1, p.classes, p.width};
  in.dout.shape = {1, 1, 1, p.rows};
  const RandomStream targets(c.seed, 2);
  for (std::int64_t row = 0; row < p.rows; ++row) {
    const auto target = static_cast<std::int32_t>(targets.bits(row) % static_cast<std::uint64_t>(p.classes));
    const bool ignored = c.ignored == Ignored::kAll || (c.ignored == Ignored::kSome && row % 5 == 3);
    in.target.push_back(!ignored ? target : row % 2 == 0 ? -100 : static_cast<std::int32_t>(p.classes));
  }
  return in;
}

class LinearCrossEntropyCase final : public CaseOf<LossFamily, linear_cross_entropy::Case> {
 public:
  using CaseOf::CaseOf;

  std::unique_ptr<verify::Trial> trial() const override { return std::make_unique<Trial>(seeded()); }
  std::unique_ptr<verify::Case> quick_check() const override {
    linear_cross_entropy::Case c = seeded();
    c.problem.rows = std::min<std::int64_t>(c.problem.rows, 60);
    c.problem.width = std::min<std::int64_t>(c.problem.width, 512);
    c.problem.classes = std::min<std::int64_t>(c.problem.classes, 2000);
    complete(c);
    return linear_cross_entropy_case(c);
  }
  Result<std::unique_ptr<Call>> timed_call(Device&) const override {
    return std::unique_ptr<Call>(std::make_unique<Buffers>(case_, make_shapes(case_)));
  }
  std::vector<std::unique_ptr<verify::Case>> tuning_checks() const override { return {}; }
};

struct Shape {
  std::int64_t rows, width, classes;
};
struct Options {
  bool gradient = true;
  Reduction reduction = Reduction::kMean;
  bool weighted = false;
  Ignored ignored = Ignored::kSome;
  bool huge = false, unaligned = false;
  bool no_dhidden = false, no_dweight = false;
};

Case make(DType dtype, const Shape& s, const Options& o) {
  Case c;
  LossProblem& p = c.problem;
  p.op = LossOp::kLinearCrossEntropy;
  p.dtype = dtype;
  p.rows = s.rows, p.width = s.width, p.classes = s.classes;
  p.reduction = o.reduction;
  p.weighted = o.weighted;
  p.dhidden = o.gradient && !o.no_dhidden;
  p.dweight = o.gradient && !o.no_dweight;
  c.ignored = o.ignored;
  c.huge = o.huge;
  c.unaligned = o.unaligned;
  complete(c);
  return c;
}

double elements(std::int64_t rows, std::int64_t columns) {
  return static_cast<double>(rows) * static_cast<double>(columns);
}

constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

}  // namespace

double Case::flops() const {
  const LossProblem& p = problem;
  return 2 * elements(p.rows, p.classes) * static_cast<double>(p.width) *
         (1 + (p.dhidden ? 1 : 0) + (p.dweight ? 1 : 0));
}

double Case::bytes() const {
  const LossProblem& p = problem;
  return (elements(p.rows, p.width) * (p.dhidden ? 2 : 1) + elements(p.classes, p.width) * (p.dweight ? 2 : 1)) *
         static_cast<double>(size_of(p.dtype));
}

// Logits are written, read twice for the loss, and their gradient is written and read twice.
double Case::unfused_bytes() const {
  const LossProblem& p = problem;
  return bytes() + elements(p.rows, p.classes) * static_cast<double>(size_of(p.dtype)) * (p.dweight ? 7 : 3);
}

void complete(Case& c) {
  LossProblem& p = c.problem;
  const std::int64_t row = (p.width + (c.unaligned ? 3 : 0)) * static_cast<std::int64_t>(size_of(p.dtype));
  const auto aligned = [&](bool given, std::int64_t rows) {
    return !given || rows <= 1 || p.width == 0 || row % 16 == 0;
  };
  p.hidden_aligned = aligned(true, p.rows);
  p.weight_aligned = aligned(true, p.classes);
  p.dhidden_aligned = aligned(p.dhidden, p.rows);
  p.dweight_aligned = aligned(p.dweight, p.classes);
  std::vector<std::string> parts;
  if (p.reduction != Reduction::kMean) parts.emplace_back(tessera::name_of(p.reduction));
  if (p.dhidden) parts.emplace_back("dhidden");
  if (p.dweight) parts.emplace_back("dweight");
  if (p.weighted) parts.emplace_back("dout");
  if (c.ignored == Ignored::kNone) parts.emplace_back("all_counted");
  if (c.ignored == Ignored::kAll) parts.emplace_back("all_ignored");
  if (c.huge) parts.emplace_back("huge");
  if (c.unaligned) parts.emplace_back("unaligned");
  c.name = format("linear_cross_entropy/{}/r{}_c{}_v{}", tessera::name_of(p.dtype), p.rows, p.width, p.classes);
  if (!parts.empty()) c.name += "/" + join(parts, "+");
}

Inputs make_inputs(const Case& c) {
  const LossProblem& p = c.problem;
  Inputs in = make_shapes(c);
  in.hidden = HostTensor(1, 1, p.rows, p.width);
  in.weight = HostTensor(1, 1, p.classes, p.width);
  const RandomStream of_hidden(c.seed, 0), of_weight(c.seed, 1), of_dout(c.seed, 3);
  const double unit = 2 / std::sqrt(static_cast<double>(std::max<std::int64_t>(p.width, 1)));
  for (std::int64_t n = 0; n < in.hidden.size(); ++n) {
    const bool chosen = n % p.width == n / p.width % p.width;
    in.hidden.data[static_cast<std::size_t>(n)] = !c.huge ? of_hidden.normal(n) : chosen ? 100 : 0;
  }
  for (std::int64_t n = 0; n < in.weight.size(); ++n) {
    in.weight.data[static_cast<std::size_t>(n)] = of_weight.normal(n) * (c.huge ? 80 : unit);
  }
  round_all(p.dtype, in.hidden);
  round_all(p.dtype, in.weight);
  if (p.weighted) {
    in.dout = HostTensor(1, 1, 1, p.rows);
    for (std::int64_t n = 0; n < p.rows; ++n) in.dout.data[static_cast<std::size_t>(n)] = of_dout.normal(n);
    round_all(DType::kFloat32, in.dout);
  }
  return in;
}

Outputs expected(const LossProblem& problem, const Inputs& inputs, int threads) {
  return compute<double>(problem, inputs, threads);
}
Outputs plain(const LossProblem& problem, const Inputs& inputs, int threads) {
  return compute<float>(problem, inputs, threads);
}

Buffers::Buffers(const Case& c, const Inputs& in) : LossCall(TESSERA_LOSS_LINEAR_CROSS_ENTROPY), problem_(c.problem) {
  const LossProblem& p = problem_;
  const auto matrix = [&](Buffer& b, const HostTensor& like, bool written) {
    b.shape = like.shape;
    const std::int64_t row = b.shape[3] + (c.unaligned ? 3 : 0), all = b.shape[2] * row;
    b.strides = {all, all, row, 1};
    b.fill(p.dtype, 2, like, written);
  };
  const auto vector = [&](Buffer& b, std::int64_t size, const HostTensor& values, bool written) {
    b.shape = {1, 1, 1, size};
    b.strides = {size, size, size, 1};
    b.fill(DType::kFloat32, 1, values, written);
  };
  HostTensor none;
  matrix(hidden_, in.hidden, false);
  matrix(weight_, in.weight, false);
  if (p.dhidden) matrix(dhidden_, in.hidden, true);
  if (p.dweight) matrix(dweight_, in.weight, true);
  target_.fill(in.target, 1, 1);
  if (p.weighted) vector(dout_, p.rows, in.dout, false);
  vector(out_, p.reduction == Reduction::kNone ? p.rows : 1, none, true);
  args_.hidden = hidden_.view();
  args_.weight = weight_.view();
  args_.target = target_.view();
  args_.dout = dout_.view();
  args_.out = out_.view();
  args_.dhidden = dhidden_.view();
  args_.dweight = dweight_.view();
  args_.reduction = static_cast<tessera_reduction>(p.reduction);
}

std::vector<Buffer*> Buffers::buffers() {
  return used_of({&hidden_, &weight_, &target_, &dout_, &out_, &dhidden_, &dweight_});
}

Outputs Buffers::results() const {
  const auto read = [](const Buffer& b) {
    HostTensor t;
    if (!b.used()) return t;
    t = HostTensor(b.shape[0], b.shape[1], b.shape[2], b.shape[3]);
    b.read(t);
    return t;
  };
  return {read(out_), read(dhidden_), read(dweight_)};
}

std::vector<Case> suite(std::string_view name) {
  constexpr Shape kOdd{70, 33, 101}, kChunks{4200, 8, 40};
  std::vector<Case> out;
  if (name == "quick") {
    for (const DType dtype : kAllTypes) out.push_back(make(dtype, kOdd, {}));
  } else if (name == "full") {
    for (const DType dtype : kAllTypes) {
      out.push_back(make(dtype, kOdd, {.gradient = false, .reduction = Reduction::kSum}));
      out.push_back(make(dtype, kOdd, {.reduction = Reduction::kNone, .weighted = true}));
      out.push_back(make(dtype, kOdd, {.unaligned = true}));
      out.push_back(make(dtype, kOdd, {.no_dhidden = true}));
      out.push_back(make(dtype, kOdd, {.ignored = Ignored::kNone, .no_dweight = true}));
      out.push_back(make(dtype, kChunks, {}));
      out.push_back(make(dtype, {2300, 8, 17}, {.gradient = false, .reduction = Reduction::kNone}));
      for (const Shape& s : {Shape{0, 8, 8}, Shape{1, 1, 1}, Shape{5, 0, 3}, Shape{3, 8, 1}})
        out.push_back(make(dtype, s, {}));
    }
    // A row that is longer than shared memory.
    out.push_back(make(DType::kBFloat16, {4, 8, 130001}, {}));
    out.push_back(make(DType::kFloat16, {4, 8, 60001}, {}));
  } else if (name == "hostile") {
    for (const DType dtype : kAllTypes) {
      out.push_back(make(dtype, kOdd, {.huge = true}));
      out.push_back(make(dtype, kOdd, {.ignored = Ignored::kAll}));
    }
  } else if (name == "sanitize") {
    out.push_back(make(DType::kBFloat16, kOdd, {}));
    out.push_back(make(DType::kFloat16, {3, 8, 60001}, {.unaligned = true}));
  } else if (name == "bench") {
    out.push_back(make(DType::kBFloat16, {128, 256, 4000}, {}));
  } else if (name == "bench-gpu") {
    out.push_back(make(DType::kBFloat16, {8192, 4096, 131072}, {.gradient = false}));
    out.push_back(make(DType::kBFloat16, {8192, 4096, 131072}, {}));
  } else if (name == "evidence") {
    out.push_back(make(DType::kBFloat16, {128, 512, 8000}, {}));
  }
  for (Case& c : out) c.tags.emplace_back("linear_cross_entropy");
  return out;
}

std::unique_ptr<verify::Case> linear_cross_entropy_case(const Case& c) {
  return std::make_unique<LinearCrossEntropyCase>(c);
}

}  // namespace tessera::verify::linear_cross_entropy
