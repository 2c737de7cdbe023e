// A norm case, run and judged: what verify::Case asks of a family.
#include <algorithm>

#include "norm/family.h"
#include "verify/device.h"
#include "verify/norm/cases.h"

namespace tessera::verify::norm {

Buffers::Buffers(const Case& c, const Inputs& in) : problem_(c.problem) {
  const NormProblem& p = problem_;
  const auto set = [&](Buffer& b, const HostTensor& values, DType dtype, int rank, bool written) {
    b.shape = values.shape;
    const std::int64_t row = rank == 1 ? b.shape[3] : row_stride(c, b.shape[3]);
    b.strides = {b.shape[1] * b.shape[2] * row, b.shape[2] * row, row, 1};
    b.fill(dtype, rank, values, written);
  };
  const auto result = [&](Buffer& b, const std::array<std::int64_t, 4>& shape, DType dtype, int rank) {
    HostTensor shaped;
    shaped.shape = shape;
    set(b, shaped, dtype, rank, true);
  };
  const std::array<std::int64_t, 4> vector = {1, 1, 1, p.columns}, statistic = {1, 1, 1, p.rows};
  const int rank = p.op == NormOp::kRotary ? 4 : 2;
  set(x_, in.x, p.dtype, rank, false);
  if (p.weight) set(weight_, in.weight, p.dtype, 1, false);
  if (p.bias) set(bias_, in.bias, p.dtype, 1, false);
  switch (p.op) {
    case NormOp::kForward:
      result(out_, in.x.shape, p.dtype, 2);
      if (p.residual) {
        set(residual_, in.residual, p.dtype, 2, false);
        result(sum_, in.x.shape, p.dtype, 2);
      }
      if (p.statistics) result(rstd_, statistic, DType::kFloat32, 1);
      if (p.statistics && p.centered) result(mean_, statistic, DType::kFloat32, 1);
      break;
    case NormOp::kBackward:
      set(dout_, in.dout, p.dtype, 2, false);
      set(rstd_, in.rstd, DType::kFloat32, 1, false);
      if (p.centered) set(mean_, in.mean, DType::kFloat32, 1, false);
      if (p.residual) set(dsum_, in.dsum, p.dtype, 2, false);
      result(dx_, in.x.shape, p.dtype, 2);
      if (p.parameters) result(dweight_, vector, p.dtype, 1);
      if (p.parameters && p.centered) result(dbias_, vector, p.dtype, 1);
      break;
    case NormOp::kRotary:
      result(out_, in.x.shape, p.dtype, 4);
      set(cos_, in.cos, p.table_dtype, 2, false);
      set(sin_, in.sin, p.table_dtype, 2, false);
      if (p.positions) positions_.fill(in.positions, p.batch, 2);
      break;
  }
  args_.x = x_.view();
  args_.out = out_.view();
  args_.weight = weight_.view();
  args_.bias = bias_.view();
  args_.residual = residual_.view();
  args_.sum = sum_.view();
  args_.rstd = rstd_.view();
  args_.mean = mean_.view();
  args_.dout = dout_.view();
  args_.dsum = dsum_.view();
  args_.dx = dx_.view();
  args_.dweight = dweight_.view();
  args_.dbias = dbias_.view();
  args_.cos = cos_.view();
  args_.sin = sin_.view();
  args_.positions = positions_.view();
  args_.eps = static_cast<float>(in.eps);
  if (p.centered) args_.flags |= TESSERA_NORM_CENTERED;
  if (p.interleaved) args_.flags |= TESSERA_NORM_INTERLEAVED;
  if (p.inverse) args_.flags |= TESSERA_NORM_INVERSE;
}

std::vector<Buffer*> Buffers::buffers() {
  return used_of({&x_, &out_, &weight_, &bias_, &residual_, &sum_, &rstd_, &mean_, &dout_, &dsum_, &dx_, &dweight_,
                  &dbias_, &cos_, &sin_, &positions_});
}

tessera_status Buffers::plan(tessera_plan** plan) { return tessera_norm_plan_create(op(), &args_, plan); }

tessera_status Buffers::run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) {
  return tessera_norm_plan_run(plan, &args_, workspace, bytes, stream);
}

Outputs Buffers::results() const {
  const auto read = [](const Buffer& b) {
    HostTensor t;
    if (!b.used() || !b.written) return t;
    t = HostTensor(b.shape[0], b.shape[1], b.shape[2], b.shape[3]);
    b.read(t);
    return t;
  };
  return {read(out_), read(sum_), read(rstd_), read(mean_), read(dx_), read(dweight_), read(dbias_)};
}

namespace {

class NormTrial final : public TrialOf<Case, Inputs, Outputs, Buffers> {
 public:
  explicit NormTrial(const Case& c) : TrialOf(c, make_inputs(c)) {}

 private:
  void compute(int threads) override {
    exact_ = expected(inputs_, threads);
    plain_ = plain(inputs_, threads);
  }
  void compare(const Buffers& buffers, Judgement& judgement) override {
    const Outputs got = buffers.results();
    const auto add = [&](const char* name, HostTensor Outputs::*which, DType dtype) {
      if ((got.*which).shape[3] == 0) return;
      judgement.add(name, verify::judge(got.*which, exact_.*which, plain_.*which, dtype, case_.floor));
    };
    const DType dtype = case_.problem.dtype;
    add("out", &Outputs::out, dtype);
    add("sum", &Outputs::sum, dtype);
    add("rstd", &Outputs::rstd, DType::kFloat32);
    add("mean", &Outputs::mean, DType::kFloat32);
    add("dx", &Outputs::dx, dtype);
    add("dweight", &Outputs::dweight, dtype);
    add("dbias", &Outputs::dbias, dtype);
  }
};

class NormCase final : public CaseOf<NormFamily, norm::Case> {
 public:
  using CaseOf::CaseOf;

  Bound bound() const override { return Bound::kMemory; }
  std::unique_ptr<Trial> trial() const override { return std::make_unique<NormTrial>(seeded()); }

  // A Config depends on the width of a row alone, so a large problem is checked with fewer rows.
  std::unique_ptr<verify::Case> quick_check() const override {
    constexpr std::int64_t kElements = 1 << 22;
    norm::Case c = seeded();
    NormProblem& p = c.problem;
    if (p.op == NormOp::kRotary) {
      p.seq = std::min(p.seq,
                       std::max<std::int64_t>(kElements / std::max<std::int64_t>(p.batch * p.heads * p.columns, 1), 2));
      p.rows = p.batch * p.seq * p.heads;
    } else {
      p.rows = std::min(p.rows, std::max<std::int64_t>(kElements / p.columns, 2));
    }
    return norm_case(c);
  }

  Result<std::unique_ptr<Call>> timed_call(verify::Device&) const override {
    return std::unique_ptr<Call>(std::make_unique<Buffers>(case_, make_shapes(case_)));
  }
};

}  // namespace

std::unique_ptr<verify::Case> norm_case(const Case& c) { return std::make_unique<NormCase>(c); }

}  // namespace tessera::verify::norm
