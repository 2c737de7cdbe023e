// A GEMM case, run and judged: what verify::Case asks of a family.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "gemm/family.h"
#include "verify/device.h"
#include "verify/gemm/buffers.h"
#include "verify/random.h"

namespace tessera::verify::gemm {
namespace {

// Rows of out, in all groups, and those of them that belong to none.
std::int64_t all_rows(const GemmProblem& p) { return p.m * layers_of(p).out; }
std::int64_t written_rows(const Case& c) {
  return c.problem.grouping == kRaggedRows ? offsets_of(c).back() : all_rows(c.problem);
}

// All rows that are written, or `count` of them: the first, the last, and others at random.
std::vector<std::int64_t> rows_of(const Case& c) {
  const std::int64_t m = written_rows(c);
  std::vector<std::int64_t> rows;
  if (c.sample == 0 || c.sample >= m) {
    rows.resize(static_cast<std::size_t>(m));
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }
  const RandomStream random(c.seed, 7);
  rows = {0, m - 1};
  for (std::int64_t i = 2; i < c.sample; ++i) {
    rows.push_back(static_cast<std::int64_t>(random.bits(i) % static_cast<std::uint64_t>(m)));
  }
  std::sort(rows.begin(), rows.end());
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

class ProductTrial final : public TrialOf<Case, Inputs, Outputs, Buffers> {
 public:
  explicit ProductTrial(const Case& c) : TrialOf(c, make_inputs(c)), rows_(rows_of(c)) {}

 private:
  void compute(int threads) override {
    exact_ = product(inputs_, rows_, threads);
    plain_ = plain_product(inputs_, rows_, threads);
  }
  void compare(const Buffers& buffers, Judgement& judgement) override {
    const Outputs got = buffers.results(rows_);
    const GemmProblem& p = case_.problem;
    judgement.add("out", verify::judge(got.out, exact_.out, plain_.out, p.out_dtype, case_.floor));
    std::vector<std::int64_t> others(static_cast<std::size_t>(all_rows(p) - written_rows(case_)));
    std::iota(others.begin(), others.end(), written_rows(case_));
    const Outputs rest = buffers.results(others);
    for (const HostTensor* t : {&rest.out, &rest.preactivation}) {
      const bool kept = std::all_of(t->data.begin(), t->data.end(), [](double x) { return std::isnan(x); });
      judgement.add_exact(kept ? "" : "out: a row that belongs to no group was written");
    }
    if (p.preactivation) {
      judgement.add("preactivation",
                    verify::judge(got.preactivation, exact_.preactivation, plain_.preactivation, p.dtype, case_.floor));
    }
  }

  std::vector<std::int64_t> rows_;
};

class GemmCase final : public CaseOf<GemmFamily, gemm::Case> {
 public:
  using CaseOf::CaseOf;

  bool is_sampled() const override { return case_.sample > 0; }
  std::unique_ptr<Trial> trial() const override { return std::make_unique<ProductTrial>(seeded()); }

  // Which Configs fit depends on all three sizes, so the problem itself is checked, by samples.
  std::unique_ptr<verify::Case> quick_check() const override {
    constexpr double kWhole = 1e8;  // multiply-adds
    constexpr std::int64_t kSample = 24;
    gemm::Case c = seeded();
    const GemmProblem& p = c.problem;
    const bool large = static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) > kWhole;
    if (large && p.op == GemmOp::kGrouped) return gemm_case(fewer_groups(c));
    if (large) c.sample = kSample;
    return gemm_case(c);
  }

  Result<std::unique_ptr<Call>> timed_call(Device&) const override {
    return std::unique_ptr<Call>(std::make_unique<Buffers>(case_, make_shapes(case_)));
  }

 private:
  // The oracle's copies of all groups' weights would take gigabytes: as many columns, which the Configs depend on, but
  // fewer of everything else.
  static gemm::Case fewer_groups(gemm::Case c) {
    GemmProblem& p = c.problem;
    constexpr std::int64_t kGroups = 3, kRows = 300;
    if (p.groups > kGroups) {
      if (p.grouping == kRaggedRows) p.m = p.m / p.groups * kGroups;
      if (p.grouping == kRaggedSums) p.k = p.k / p.groups * kGroups;
      p.groups = kGroups;
    }
    p.m = std::min(p.m, kRows * (p.grouping == kRaggedRows ? kGroups : 1));
    p.k = std::min(p.k, kRows * (p.grouping == kRaggedSums ? kGroups : 1));
    if (p.a_aligned) p.m = p.m / 8 * 8, p.k = p.k / 8 * 8;
    c.routing = Routing::kRandom;
    c.sample = 24;
    c.name = gemm::describe(c);
    return c;
  }
};

}  // namespace

std::unique_ptr<verify::Case> gemm_case(const Case& c) { return std::make_unique<GemmCase>(c); }

}  // namespace tessera::verify::gemm
