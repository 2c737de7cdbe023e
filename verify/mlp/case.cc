// An MLP case, run and judged: what verify::Case asks of a family.
#include "mlp/family.h"
#include "verify/device.h"
#include "verify/mlp/buffers.h"

namespace tessera::verify::mlp {
namespace {

using T = MlpTensor;

class MlpTrial final : public TrialOf<Case, Tensors, Tensors, Buffers> {
 public:
  explicit MlpTrial(const Case& c) : TrialOf(c, make_inputs(c)) {}

 private:
  void compute(int threads) override {
    exact_ = exact(case_.problem, inputs_, threads);
    plain_ = plain(case_.problem, inputs_, threads);
  }
  void compare(const Buffers& buffers, Judgement& judgement) override {
    const MlpProblem& p = case_.problem;
    // fp32 sums in another order, and functions that are good to an ulp or two, need tolerance where the plain
    // computation may be exact by luck.
    const double floor = p.dtype == DType::kFloat32 ? 4 : 2;
    for (int i = 0; i < kMlpTensors; ++i) {
      const T t = static_cast<T>(i);
      const auto at = static_cast<std::size_t>(i);
      if (!p.has(t) || !is_written(p, t)) continue;
      const HostTensor got = buffers.result(t);
      judgement.add(name_of(t), verify::judge(got, exact_[at], plain_[at], p.dtype, floor));
    }
  }
};

class MlpCase final : public CaseOf<MlpFamily, mlp::Case> {
 public:
  using CaseOf::CaseOf;

  std::unique_ptr<Trial> trial() const override { return std::make_unique<MlpTrial>(seeded()); }

  // Fewer rows: those of a large case would take the oracle minutes.
  std::unique_ptr<verify::Case> quick_check() const override {
    constexpr std::int64_t kRows = 200;
    mlp::Case c = seeded();
    c.problem.m = std::min(c.problem.m, kRows);
    c.name = mlp::describe(c);
    return mlp_case(c);
  }

  Result<std::unique_ptr<Call>> timed_call(Device&) const override {
    return std::unique_ptr<Call>(std::make_unique<Buffers>(case_, make_shapes(case_)));
  }

  std::vector<std::unique_ptr<verify::Case>> tuning_checks() const override { return {}; }
};

}  // namespace

const tessera_tensor*& field_of(tessera_mlp& args, T tensor) {
  constexpr const tessera_tensor* tessera_mlp::*kFields[] = {
      &tessera_mlp::x,         &tessera_mlp::up,       &tessera_mlp::down,        &tessera_mlp::out,
      &tessera_mlp::dout,      &tessera_mlp::gate,     &tessera_mlp::up_bias,     &tessera_mlp::gate_bias,
      &tessera_mlp::down_bias, &tessera_mlp::residual, &tessera_mlp::before,      &tessera_mlp::before_gate,
      &tessera_mlp::hidden,    &tessera_mlp::dx,       &tessera_mlp::dup,         &tessera_mlp::ddown,
      &tessera_mlp::dgate,     &tessera_mlp::dbefore,  &tessera_mlp::dbefore_gate};
  return args.*kFields[static_cast<std::size_t>(tensor)];
}

Buffers::Buffers(const Case& c, const Tensors& inputs) : problem_(c.problem) {
  for (int i = 0; i < kMlpTensors; ++i) {
    const T t = static_cast<T>(i);
    Buffer& b = buffers_.emplace_back(name_of(t));
    if (!problem_.has(t)) continue;
    const Dims dims = dims_of(problem_, t);
    b.shape = {1, 1, dims.rows, dims.columns};
    const std::int64_t row = row_stride(c, t), all = dims.rows * row;
    b.strides = {all, all, row, 1};
    b.fill(problem_.dtype, is_vector(t) ? 1 : 2, inputs[static_cast<std::size_t>(i)], is_written(problem_, t));
    b.free_padding = problem_.hidden_padded && is_between_layers(t);
    field_of(args_, t) = b.view();
  }
  args_.activation = static_cast<tessera_activation>(problem_.activation);
  if (problem_.hidden_padded) args_.flags |= TESSERA_MLP_HIDDEN_PADDED;
}

std::vector<Buffer*> Buffers::buffers() {
  std::vector<Buffer*> used;
  for (Buffer& b : buffers_) {
    if (b.used()) used.push_back(&b);
  }
  return used;
}

tessera_status Buffers::plan(tessera_plan** plan) { return tessera_mlp_plan_create(op(), &args_, plan); }

tessera_status Buffers::run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) {
  return tessera_mlp_plan_run(plan, &args_, workspace, bytes, stream);
}

HostTensor Buffers::result(T tensor) const {
  const Dims dims = dims_of(problem_, tensor);
  HostTensor t(1, 1, dims.rows, dims.columns);
  buffers_[static_cast<std::size_t>(tensor)].read(t);
  return t;
}

std::unique_ptr<verify::Case> mlp_case(const Case& c) { return std::make_unique<MlpCase>(c); }

}  // namespace tessera::verify::mlp
