// A case of a mixture of experts, run and judged: what verify::Case asks of a family.
#include "base/format.h"
#include "moe/family.h"
#include "verify/device.h"
#include "verify/moe/cases.h"

namespace tessera::verify::moe {
namespace {

using T = MoeTensor;

class MoeTrial final : public TrialOf<Case, Tensors, Tensors, Buffers> {
 public:
  explicit MoeTrial(const Case& c) : TrialOf(c, make_inputs(c, Values::kAll)) {}

 private:
  void compute(int threads) override {
    exact_ = exact(case_.problem, inputs_, threads);
    plain_ = plain(case_.problem, inputs_, threads);
  }
  void compare(const Buffers& buffers, Judgement& judgement) override {
    const MoeProblem& p = case_.problem;
    for (int i = 0; i < kMoeGivenTensors; ++i) {
      const T t = static_cast<T>(i);
      const auto at = static_cast<std::size_t>(i);
      if (!p.has(t) || !is_written(p, t)) continue;
      HostTensor got = buffers.result(t);
      if (is_integer(t)) {
        judgement.add_exact(difference(name_of(t), got, exact_[at]));
        continue;
      }
      // Rows of pairs that are skipped are not written.
      if ((t == T::kBefore || t == T::kBeforeGate || t == T::kXRows) && case_.routing == Routing::kSkipped) continue;
      // fp32 sums in another order, and functions that are good to an ulp or two, need tolerance where the plain
      // computation may be exact by luck.
      const DType dtype = dtype_of(p, t);
      judgement.add(name_of(t), verify::judge(got, exact_[at], plain_[at], dtype, dtype == DType::kFloat32 ? 4 : 2));
    }
  }

  static std::string difference(const char* name, const HostTensor& got, const HostTensor& want) {
    for (std::size_t n = 0; n < want.data.size(); ++n) {
      if (got.data[n] != want.data[n]) return format("{}[{}] is {}, not {}", name, n, got.data[n], want.data[n]);
    }
    return {};
  }
};

class MoeCase final : public CaseOf<MoeFamily, moe::Case> {
 public:
  using CaseOf::CaseOf;

  std::unique_ptr<Trial> trial() const override { return std::make_unique<MoeTrial>(seeded()); }

  // Fewer tokens and hidden columns: those of a large case would take the oracle minutes.
  std::unique_ptr<verify::Case> quick_check() const override {
    constexpr std::int64_t kTokens = 100, kColumns = 128;
    moe::Case c = seeded();
    c.problem.m = std::min(c.problem.m, kTokens);
    c.problem.k = std::min(c.problem.k, kColumns);
    c.problem.hidden = std::min(c.problem.hidden, kColumns);
    complete(c);
    return moe_case(c);
  }

  Result<std::unique_ptr<Call>> timed_call(Device&) const override {
    return std::unique_ptr<Call>(std::make_unique<Buffers>(case_, make_inputs(case_, Values::kRouter)));
  }

  std::vector<std::unique_ptr<verify::Case>> tuning_checks() const override { return {}; }
};

}  // namespace

const tessera_tensor*& field_of(tessera_moe& args, T tensor) {
  constexpr const tessera_tensor* tessera_moe::*kFields[] = {&tessera_moe::x,
                                                             &tessera_moe::logits,
                                                             &tessera_moe::up,
                                                             &tessera_moe::down,
                                                             &tessera_moe::gate,
                                                             &tessera_moe::out,
                                                             &tessera_moe::dout,
                                                             &tessera_moe::experts,
                                                             &tessera_moe::weights,
                                                             &tessera_moe::positions,
                                                             &tessera_moe::offsets,
                                                             &tessera_moe::balance_loss,
                                                             &tessera_moe::dbalance_loss,
                                                             &tessera_moe::before,
                                                             &tessera_moe::before_gate,
                                                             &tessera_moe::x_rows,
                                                             &tessera_moe::dx,
                                                             &tessera_moe::dlogits,
                                                             &tessera_moe::dweights,
                                                             &tessera_moe::dup,
                                                             &tessera_moe::ddown,
                                                             &tessera_moe::dgate};
  return args.*kFields[static_cast<std::size_t>(tensor)];
}

void set_options(const MoeProblem& p, tessera_moe& args) {
  args.activation = static_cast<tessera_activation>(p.activation);
  if (p.scoring != kMoeGiven) args.scoring = static_cast<tessera_moe_scoring>(p.scoring);
  if (p.normalized) args.flags |= TESSERA_MOE_NORMALIZE;
}

Buffers::Buffers(const Case& c, const Tensors& inputs) : problem_(c.problem) {
  for (int i = 0; i < kMoeGivenTensors; ++i) {
    const T t = static_cast<T>(i);
    Buffer& b = *buffers_.emplace_back(std::make_unique<Buffer>(name_of(t)));
    if (!problem_.has(t)) continue;
    const MoeShape shape = shape_of(problem_, t);
    const HostTensor& values = inputs[static_cast<std::size_t>(i)];
    if (is_integer(t)) {
      const std::int64_t count = shape.dims[1] * shape.dims[2];
      std::vector<std::int32_t> integers(static_cast<std::size_t>(std::max<std::int64_t>(count, 1)));
      for (std::size_t n = 0; n < values.data.size(); ++n) integers[n] = static_cast<std::int32_t>(values.data[n]);
      b.fill(integers, 1, shape.rank);
      b.written = is_written(problem_, t);
      if (b.written) b.poison();
    }
    b.shape = {1, shape.dims[0], shape.dims[1], shape.dims[2]};
    b.strides = strides_of(c, t);
    if (!is_integer(t)) b.fill(dtype_of(problem_, t), shape.rank, values, is_written(problem_, t));
    field_of(args_, t) = b.view();
  }
  set_options(problem_, args_);
}

std::vector<Buffer*> Buffers::buffers() {
  std::vector<Buffer*> used;
  for (const auto& b : buffers_) {
    if (b->used()) used.push_back(b.get());
  }
  return used;
}

tessera_status Buffers::plan(tessera_plan** plan) { return tessera_moe_plan_create(op(), &args_, plan); }

tessera_status Buffers::run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) {
  return tessera_moe_plan_run(plan, &args_, workspace, bytes, stream);
}

HostTensor Buffers::result(T tensor) const {
  const Buffer& b = *buffers_[static_cast<std::size_t>(tensor)];
  HostTensor t(b.shape[0], b.shape[1], b.shape[2], b.shape[3]);
  if (!is_integer(tensor)) {
    b.read(t);
    return t;
  }
  const auto* integers = reinterpret_cast<const std::int32_t*>(b.storage.data());
  for (std::size_t n = 0; n < t.data.size(); ++n) t.data[n] = integers[n];
  return t;
}

std::unique_ptr<verify::Case> moe_case(const Case& c) { return std::make_unique<MoeCase>(c); }

}  // namespace tessera::verify::moe
