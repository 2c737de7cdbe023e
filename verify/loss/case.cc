// A case of a loss, run and judged: what verify::Case asks of a family.
#include <algorithm>

#include "loss/family.h"
#include "verify/device.h"
#include "verify/loss/cases.h"

namespace tessera::verify::loss {

Buffers::Buffers(const Case& c, const Inputs& in) : LossCall(TESSERA_LOSS_GMM_NLL), problem_(c.problem) {
  const LossProblem& p = problem_;
  const auto set = [&](Buffer& b, const HostTensor& values, DType dtype, int rank, bool written) {
    b.shape = values.shape;
    const std::int64_t component = rank == 3 && c.padded ? 5 : b.shape[3];
    const std::int64_t row = b.shape[2] * component + (rank == 3 && c.padded ? 2 : 0);
    b.strides = {b.shape[1] * row, row, component, 1};
    b.fill(dtype, rank, values, written);
  };
  HostTensor result;
  set(params_, in.params, p.dtype, 3, false);
  set(target_, in.target, p.target_dtype, 1, false);
  result.shape = {1, 1, 1, p.reduction == Reduction::kNone ? p.rows : 1};
  set(out_, result, DType::kFloat32, 1, true);
  result.shape = in.params.shape;
  if (p.gradient) set(dparams_, result, p.dtype, 3, true);
  args_.params = params_.view();
  args_.target = target_.view();
  args_.out = out_.view();
  args_.dparams = dparams_.view();
  args_.reduction = static_cast<tessera_reduction>(p.reduction);
}

std::vector<Buffer*> Buffers::buffers() { return used_of({&params_, &target_, &out_, &dparams_}); }

Outputs results_of(const LossProblem& p, const Buffer& out, const Buffer& dparams) {
  Outputs outputs;
  outputs.out = HostTensor(1, 1, 1, out.shape[3]);
  out.read(outputs.out);
  if (p.gradient) {
    outputs.dparams = HostTensor(1, 1, p.rows, 3 * p.components);
    dparams.read(outputs.dparams);
  }
  return outputs;
}

namespace {

class LossTrial final : public TrialOf<Case, Inputs, Outputs, Buffers> {
 public:
  explicit LossTrial(const Case& c) : TrialOf(c, make_inputs(c)) {}

 private:
  void compute(int threads) override {
    exact_ = expected(inputs_, threads);
    plain_ = plain(inputs_, threads);
  }
  void compare(const Buffers& buffers, Judgement& judgement) override {
    const Outputs got = buffers.results();
    judgement.add("out", verify::judge(got.out, exact_.out, plain_.out, DType::kFloat32, 4));
    if (case_.problem.gradient) {
      judgement.add("dparams",
                    verify::judge(got.dparams, exact_.dparams, plain_.dparams, case_.problem.dtype, case_.floor));
    }
  }
};

class LossCase final : public CaseOf<LossFamily, loss::Case> {
 public:
  using CaseOf::CaseOf;

  Bound bound() const override { return Bound::kMemory; }
  std::unique_ptr<Trial> trial() const override { return std::make_unique<LossTrial>(seeded()); }
  std::unique_ptr<verify::Case> quick_check() const override { return loss_case(seeded()); }
  Result<std::unique_ptr<Call>> timed_call(verify::Device&) const override {
    return std::unique_ptr<Call>(std::make_unique<Buffers>(case_, make_inputs(case_)));
  }
};

}  // namespace

std::unique_ptr<verify::Case> loss_case(const Case& c) { return std::make_unique<LossCase>(c); }

}  // namespace tessera::verify::loss
