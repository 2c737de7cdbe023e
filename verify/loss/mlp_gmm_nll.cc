#include "verify/loss/mlp_gmm_nll.h"

#include <algorithm>
#include <cmath>

#include "base/arithmetic.h"
#include "base/format.h"
#include "loss/family.h"
#include "verify/device.h"
#include "verify/random.h"

namespace tessera::verify::mlp_gmm_nll {
namespace {

using loss::Distribution;
using loss::Outputs;
using T = MlpTensor;

HostTensor& at(mlp::Tensors& tensors, T t) { return tensors[static_cast<std::size_t>(t)]; }

// The likelihood of the MLP's result.
loss::Inputs likelihood_of(const LossProblem& p, HostTensor params, const HostTensor& target) {
  loss::Inputs in;
  in.problem = p;
  in.problem.op = LossOp::kGmmNll;
  in.params = std::move(params);
  in.params.shape = {1, p.rows, p.components, 3};
  in.target = target;
  return in;
}

// For each row, how far its gradient moves if its parameters do by a rounding of the largest of them: some rows are many times
// as sensitive as the median one.
std::vector<double> gradient_rounding(const loss::Inputs& in, const HostTensor& gradient, int threads) {
  const std::int64_t columns = 3 * in.problem.components;
  std::vector<double> furthest(static_cast<std::size_t>(in.problem.rows));
  for (const int sign : {1, -1}) {
    loss::Inputs moved = in;
    for (std::size_t row = 0; row < furthest.size(); ++row) {
      double* values = moved.params.data.data() + row * static_cast<std::size_t>(columns);
      double most = 0;
      for (std::int64_t i = 0; i < columns; ++i) most = std::max(most, std::abs(values[i]));
      for (std::int64_t i = 0; i < columns; ++i) {
        values[i] += (i % 2 == 0 ? sign : -sign) * most * epsilon_of(in.problem.dtype);
      }
    }
    const HostTensor there = loss::expected(moved, threads).dparams;
    for (std::size_t row = 0; row < furthest.size(); ++row) {
      double sum = 0;
      for (std::int64_t i = 0; i < columns; ++i) {
        const auto r = static_cast<std::int64_t>(row);
        const double difference = there.at(0, 0, r, i) - gradient.at(0, 0, r, i);
        sum += difference * difference;
      }
      furthest[row] = std::max(furthest[row], std::sqrt(sum));
    }
  }
  return furthest;
}

// What rounding hidden values and parameters to their type does to the losses, as expected: of each row, or of their sum or mean.
std::vector<double> loss_rounding(const LossProblem& p, const HostTensor& hidden, const HostTensor& down,
                                  const HostTensor& params, const HostTensor& gradient) {
  const std::int64_t columns = 3 * p.components;
  const auto rounded = [&](double value) { return round_to(p.dtype, value) == value ? 0 : value; };
  std::vector<double> squares(static_cast<std::size_t>(p.reduction == Reduction::kNone ? p.rows : 1));
  for (std::int64_t row = 0; row < p.rows; ++row) {
    double sum = 0;
    const auto add = [&](double value, double slope) { sum += value * value * slope * slope; };
    for (std::int64_t i = 0; i < columns; ++i)
      add(rounded(params.at(0, 0, 0, row * columns + i)), gradient.at(0, 0, row, i));
    for (std::int64_t j = 0; j < p.mlp.hidden; ++j) {
      double slope = 0;
      for (std::int64_t i = 0; i < columns; ++i) slope += gradient.at(0, 0, row, i) * down.at(0, 0, i, j);
      add(rounded(hidden.at(0, 0, row, j)), slope);
    }
    squares[p.reduction == Reduction::kNone ? static_cast<std::size_t>(row) : 0] += sum;
  }
  const double share = p.reduction == Reduction::kMean ? 1 / static_cast<double>(std::max<std::int64_t>(p.rows, 1)) : 1;
  for (double& square : squares) square = share * rounding_error_of(p.dtype) * std::sqrt(square);
  return squares;
}

class Trial final : public TrialOf<Case, Inputs, Outputs, Buffers> {
 public:
  explicit Trial(const Case& c) : TrialOf(c, make_inputs(c)) {}

 private:
  void compute(int threads) override {
    exact_ = mlp_gmm_nll::expected(case_.problem, inputs_, threads);
    plain_ = mlp_gmm_nll::plain(case_.problem, inputs_, threads);
  }
  void compare(const Buffers& buffers, Judgement& judgement) override {
    const LossProblem& p = case_.problem;
    const Outputs got = buffers.results();
    // fp32 sums in another order, and functions that are good to an ulp or two, need tolerance where the plain computation
    // may be exact by luck.
    const auto of_rows = [](HostTensor losses) {
      losses.shape = {1, 1, losses.size(), 1};
      return losses;
    };
    judgement.add("out", verify::judge(of_rows(got.out), of_rows(exact_.out), of_rows(plain_.out), DType::kFloat32, 4));
    if (p.gradient) {
      const double floor = p.dtype == DType::kFloat32 ? 4 : 2;
      judgement.add("dparams", verify::judge(got.dparams, exact_.dparams, plain_.dparams, p.dtype, floor));
    }
  }
};

Inputs make_shapes(const Case& c) {
  Inputs in;
  for (const T t : {T::kX, T::kUp, T::kDown}) {
    const mlp::Dims dims = mlp::dims_of(c.problem.mlp, t);
    at(in.tensors, t).shape = {1, 1, dims.rows, dims.columns};
  }
  in.target.shape = {1, 1, 1, c.problem.rows};
  return in;
}

class MlpGmmNllCase final : public CaseOf<LossFamily, mlp_gmm_nll::Case> {
 public:
  using CaseOf::CaseOf;

  std::unique_ptr<verify::Trial> trial() const override { return std::make_unique<Trial>(seeded()); }
  std::unique_ptr<verify::Case> quick_check() const override {
    mlp_gmm_nll::Case c = seeded();
    c.problem.rows = std::min<std::int64_t>(c.problem.rows, 200);
    complete(c);
    return mlp_gmm_nll_case(c);
  }
  Result<std::unique_ptr<Call>> timed_call(Device&) const override {
    return std::unique_ptr<Call>(std::make_unique<Buffers>(case_, make_shapes(case_)));
  }
  std::vector<std::unique_ptr<verify::Case>> tuning_checks() const override { return {}; }
};

struct Shape {
  std::int64_t rows, width, hidden, components;
};
struct Options {
  bool gradient = true;
  Reduction reduction = Reduction::kMean;
  int activation = kSilu;
  bool own_target = false, unaligned = false;
  Distribution distribution = Distribution::kNormal;
};

Case make(DType dtype, const Shape& s, const Options& o) {
  Case c;
  LossProblem& p = c.problem;
  p.op = LossOp::kMlpGmmNll;
  p.dtype = dtype;
  p.target_dtype = o.own_target ? dtype : DType::kFloat32;
  p.rows = s.rows;
  p.components = s.components;
  p.gradient = o.gradient;
  p.reduction = o.reduction;
  p.mlp.k = s.width;
  p.mlp.hidden = s.hidden;
  p.mlp.activation = o.activation;
  c.distribution = o.distribution;
  c.unaligned = o.unaligned;
  complete(c);
  return c;
}

std::int64_t stride_of(const Case& c, std::int64_t columns) {
  return c.unaligned ? columns + 3 : ceil_div(columns, 8) * 8;
}

constexpr DType kAllTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

}  // namespace

double Case::flops() const {
  const MlpProblem& p = problem.mlp;
  return 2 * static_cast<double>(p.m) * static_cast<double>(p.hidden) * static_cast<double>(p.k + p.n);
}

double Case::bytes() const {
  const MlpProblem& p = problem.mlp;
  const auto elements = static_cast<double>(p.m * (p.k + (problem.gradient ? p.n : 0)) + p.hidden * (p.k + p.n));
  return elements * static_cast<double>(size_of(p.dtype));
}

// Hidden rows and parameters are written and read.
double Case::unfused_bytes() const {
  const MlpProblem& p = problem.mlp;
  return bytes() + 2 * static_cast<double>(p.m * (p.hidden + p.n)) * static_cast<double>(size_of(p.dtype));
}

void complete(Case& c) {
  LossProblem& p = c.problem;
  MlpProblem& m = p.mlp;
  p.op = LossOp::kMlpGmmNll;
  m.dtype = p.dtype;
  m.m = p.rows;
  m.n = 3 * p.components;
  if (c.distribution != Distribution::kNormal) m.activation = kIdentity;
  m.given = bit_of(T::kX) | bit_of(T::kUp) | bit_of(T::kDown) | bit_of(T::kOut);
  m.aligned = ~0u;
  for (const T t : {T::kX, T::kUp, T::kDown}) {
    const mlp::Dims dims = mlp::dims_of(m, t);
    const std::int64_t bytes = stride_of(c, dims.columns) * static_cast<std::int64_t>(size_of(p.dtype));
    if (dims.rows > 1 && dims.columns > 0 && bytes % 16 != 0) m.aligned &= ~bit_of(t);
  }
  std::vector<std::string> parts;
  if (m.activation != kSilu) parts.emplace_back(m.activation == kIdentity ? "linear" : activation_name(m.activation));
  if (p.reduction != Reduction::kMean) parts.emplace_back(tessera::name_of(p.reduction));
  if (p.gradient) parts.emplace_back("gradient");
  if (p.target_dtype != DType::kFloat32) parts.push_back(format("target_{}", tessera::name_of(p.target_dtype)));
  if (c.unaligned) parts.emplace_back("unaligned");
  if (c.distribution != Distribution::kNormal) parts.emplace_back(loss::name_of(c.distribution));
  c.name = format("mlp_gmm_nll/{}/r{}_c{}_h{}_k{}", tessera::name_of(p.dtype), p.rows, m.k, m.hidden, p.components);
  if (!parts.empty()) c.name += "/" + join(parts, "+");
}

Inputs make_inputs(const Case& c) {
  const LossProblem& p = c.problem;
  Inputs in = make_shapes(c);
  // Those of the likelihood's own cases: of a normal distribution the target alone, else the parameters, too.
  loss::Case of_params;
  of_params.problem = p;
  of_params.problem.rows = std::max(p.rows, p.mlp.hidden);
  of_params.distribution = c.distribution;
  of_params.seed = c.seed;
  const loss::Inputs likelihood = loss::make_inputs(of_params);
  in.target = HostTensor(1, 1, 1, p.rows);
  std::copy_n(likelihood.target.data.begin(), p.rows, in.target.data.begin());
  const bool exact = c.distribution != Distribution::kNormal;
  for (const T t : {T::kX, T::kUp, T::kDown}) {
    HostTensor& tensor = at(in.tensors, t);
    const std::int64_t rows = tensor.shape[2], columns = tensor.shape[3];
    tensor = HostTensor(1, 1, rows, columns);
    const RandomStream values(c.seed, 16 + static_cast<std::uint64_t>(t));
    const double unit = t == T::kX ? 1 : 1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(columns, 1)));
    for (std::int64_t n = 0; n < tensor.size(); ++n) {
      const std::int64_t row = n / columns, column = n % columns;
      double& value = tensor.data[static_cast<std::size_t>(n)];
      if (!exact) {
        value = unit * values.normal(n) * (t == T::kDown && row % 3 == 2 ? 0.25 : 1);  // log sigma is small
      } else if (t == T::kDown) {
        value = likelihood.params.at(0, column, row / 3, row % 3);
      } else {
        value = (t == T::kX ? row % columns == column : column % rows == row) ? 1 : 0;
      }
    }
    round_all(p.dtype, tensor);
  }
  return in;
}

Outputs expected(const LossProblem& p, const Inputs& in, int threads) {
  MlpProblem mlp = p.mlp;
  mlp.given |= bit_of(T::kHidden) | bit_of(T::kBefore);
  mlp::Tensors results = mlp::exact(mlp, in.tensors, threads);
  const double terms = at(results, T::kOut).terms;
  loss::Inputs likelihood = likelihood_of(p, std::move(at(results, T::kOut)), in.target);
  likelihood.problem.gradient = true;
  Outputs out = loss::expected(likelihood, threads);
  out.out.row_noise = loss_rounding(p, at(results, T::kHidden), in.tensors[static_cast<std::size_t>(T::kDown)],
                                    likelihood.params, out.dparams);
  // What errors of a row's parameters do to its loss.
  double steepest = 0;
  for (std::int64_t row = 0; row < p.rows; ++row) {
    double sum = 0;
    for (std::int64_t i = 0; i < 3 * p.components; ++i) sum += std::abs(out.dparams.at(0, 0, row, i));
    steepest = std::max(steepest, sum);
  }
  if (p.gradient) out.dparams.row_rounding = gradient_rounding(likelihood, out.dparams, threads);
  out.out.terms += terms * steepest * (p.reduction == Reduction::kSum ? static_cast<double>(p.rows) : 1);
  out.dparams.terms += terms * std::max(steepest, 1.0);
  return out;
}

Outputs plain(const LossProblem& p, const Inputs& in, int threads) {
  mlp::Tensors results = mlp::plain(p.mlp, in.tensors, threads);
  return loss::plain(likelihood_of(p, std::move(at(results, T::kOut)), in.target), threads);
}

Buffers::Buffers(const Case& c, const Inputs& in) : LossCall(TESSERA_LOSS_MLP_GMM_NLL), problem_(c.problem) {
  const LossProblem& p = problem_;
  const auto matrix = [&](Buffer& b, const HostTensor& values) {
    b.shape = values.shape;
    const std::int64_t row = stride_of(c, b.shape[3]), all = b.shape[2] * row;
    b.strides = {all, all, row, 1};
    b.fill(p.dtype, 2, values, false);
  };
  const auto vector = [&](Buffer& b, DType dtype, std::int64_t size, const HostTensor& values, bool written) {
    b.shape = {1, 1, 1, size};
    b.strides = {size, size, size, 1};
    b.fill(dtype, 1, values, written);
  };
  const auto of = [&](T t) -> const HostTensor& { return in.tensors[static_cast<std::size_t>(t)]; };
  const HostTensor none;
  matrix(x_, of(T::kX));
  matrix(up_, of(T::kUp));
  matrix(down_, of(T::kDown));
  vector(target_, p.target_dtype, p.rows, in.target, false);
  vector(out_, DType::kFloat32, p.reduction == Reduction::kNone ? p.rows : 1, none, true);
  if (p.gradient) {
    dparams_.shape = {1, p.rows, p.components, 3};
    const std::int64_t row = stride_of(c, 3 * p.components);
    dparams_.strides = {p.rows * row, row, 3, 1};
    dparams_.fill(p.dtype, 3, none, true);
  }
  args_.x = x_.view();
  args_.up = up_.view();
  args_.down = down_.view();
  args_.target = target_.view();
  args_.out = out_.view();
  args_.dparams = dparams_.view();
  args_.reduction = static_cast<tessera_reduction>(p.reduction);
  args_.activation = static_cast<tessera_activation>(p.mlp.activation);
}

std::vector<Buffer*> Buffers::buffers() { return used_of({&x_, &up_, &down_, &target_, &out_, &dparams_}); }

std::vector<Case> suite(std::string_view name) {
  constexpr Shape kOdd{130, 40, 72, 10}, kHeads{32000, 512, 13650, 10};
  std::vector<Case> out;
  if (name == "quick") {
    for (const DType dtype : kAllTypes) {
      for (const bool gradient : {false, true}) out.push_back(make(dtype, kOdd, {.gradient = gradient}));
    }
  } else if (name == "full") {
    for (const DType dtype : kAllTypes) {
      out.push_back(make(dtype, kOdd, {.gradient = false, .reduction = Reduction::kSum, .own_target = true}));
      out.push_back(make(dtype, kOdd, {.unaligned = true}));
      out.push_back(
          make(dtype, {300, 128, 368, 7}, {.gradient = false, .reduction = Reduction::kNone, .activation = kGeluErf}));
      out.push_back(make(dtype, {1, 8, 8, 1}, {.gradient = false, .own_target = true}));
      out.push_back(make(dtype, {70, 16, 24, 11}, {.reduction = Reduction::kNone}));  // more columns than 32
      out.push_back(make(dtype, {0, 8, 8, 2}, {.reduction = Reduction::kSum}));
      // Every CTA has several row tiles.
      out.push_back(
          make(dtype, {33700, 64, 136, 2}, {.gradient = false, .reduction = Reduction::kNone, .activation = kRelu}));
    }
    // All of x's columns, and enough rows for the kernel that keeps them in shared memory.
    out.push_back(make(DType::kBFloat16, {12000, 512, 200, 10}, {.gradient = false, .reduction = Reduction::kNone}));
  } else if (name == "hostile") {
    for (const DType dtype : kAllTypes) {
      for (const Distribution d :
           {Distribution::kFar, Distribution::kNarrow, Distribution::kWide, Distribution::kOneSided}) {
        for (const bool gradient : {false, true}) {
          out.push_back(
              make(dtype, {200, 64, 64, 10}, {.gradient = gradient, .reduction = Reduction::kNone, .distribution = d}));
        }
      }
    }
  } else if (name == "sanitize") {
    out.push_back(make(DType::kBFloat16, kOdd, {.gradient = false}));
  } else if (name == "bench") {
    out.push_back(make(DType::kBFloat16, {500, 128, 1000, 10}, {}));
  } else if (name == "bench-gpu") {
    out.push_back(make(DType::kBFloat16, kHeads, {.gradient = false}));
    out.push_back(make(DType::kBFloat16, kHeads, {}));
  }
  for (Case& c : out) c.tags.emplace_back("mlp_gmm_nll");
  return out;
}

std::unique_ptr<verify::Case> mlp_gmm_nll_case(const Case& c) { return std::make_unique<MlpGmmNllCase>(c); }

}  // namespace tessera::verify::mlp_gmm_nll
