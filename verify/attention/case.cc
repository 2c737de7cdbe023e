// An attention case, run and judged: what verify::Case asks of a family.
#include <algorithm>
#include <utility>

#include "attention/family.h"
#include "verify/attention/buffers.h"
#include "verify/attention/family.h"
#include "verify/attention/sampled.h"
#include "verify/check.h"

namespace tessera::verify {
namespace {

using cases::Buffers;
using oracle::Outputs;

bool is_backward(const cases::Case& c) { return c.problem.op == AttentionOp::kBackward; }

// The forward whose o and lse a backward reads.
cases::Case forward_of(const cases::Case& backward) {
  cases::Case c = backward;
  c.problem.op = AttentionOp::kForward;
  c.problem.with_lse = true;
  c.problem.with_dlse = false;
  c.problem.deterministic = false;
  return c;
}

// Tensors of the results' shapes, with nothing in them.
Outputs blank_outputs(const AttentionProblem& p, const oracle::Inputs& in) {
  Outputs out;
  out.o = HostTensor(in.q.shape[0], in.q.shape[1], p.heads_q, p.dim_v);
  out.lse = HostTensor(in.q.shape[0], p.heads_q, in.q.shape[1], 1);
  if (p.op != AttentionOp::kBackward) return out;
  out.dq = HostTensor(in.q.shape[0], in.q.shape[1], p.heads_q, p.dim_qk);
  out.dk = HostTensor(in.k.shape[0], in.k.shape[1], p.heads_kv, p.dim_qk);
  out.dv = HostTensor(in.v.shape[0], in.v.shape[1], p.heads_kv, p.dim_v);
  return out;
}

void judge_outputs(const cases::Case& c, const Outputs& got, const Outputs& exact, const Outputs& plain,
                   Judgement& judgement) {
  const auto one = [&](const char* name, HostTensor Outputs::*tensor, DType dtype, double floor) {
    judgement.add(name, judge(got.*tensor, exact.*tensor, plain.*tensor, dtype, floor));
  };
  const DType type = c.problem.dtype;
  if (is_backward(c)) {
    one("dq", &Outputs::dq, type, c.floor);
    one("dk", &Outputs::dk, type, c.floor);
    one("dv", &Outputs::dv, type, c.floor);
    return;
  }
  one("out", &Outputs::o, type, c.floor);
  // Tensor cores keep 13 or 14 bits of a sum of e4m3 products and truncate, 12 fewer than fp32 has and rounds.
  const double of_lse = c.problem.fp8 || c.problem.rounds_to_fp8 ? 4096 : 1;
  if (c.problem.with_lse) one("lse", &Outputs::lse, DType::kFloat32, c.floor * of_lse);
}

// One sequence of a decode case as a case of its own.
struct OneSequence {
  cases::Case c;
  oracle::Inputs inputs;
};

OneSequence one_sequence(const cases::Case& c, const oracle::Inputs& in, std::int64_t b) {
  OneSequence one{c, in};
  AttentionProblem& p = one.c.problem;
  const bool own_row = !p.paged && c.cache_batch_idx.empty();  // of the cache
  p.batch = 1;
  if (own_row) p.cache_rows = 1;
  one.inputs.problem = p;
  const auto entry = [b](std::vector<std::int32_t>& list) {
    if (!list.empty()) list = {list[static_cast<std::size_t>(b)]};
  };
  for (auto* list :
       {&one.c.cache_lengths, &one.c.cache_batch_idx, &one.c.leftpad, &one.c.rotary_lengths, &one.inputs.cache_seqlens,
        &one.inputs.cache_batch_idx, &one.inputs.leftpad_k, &one.inputs.rotary_seqlens}) {
    entry(*list);
  }
  const auto part = [b](auto& list, std::int64_t size) {
    list = {list.begin() + b * size, list.begin() + (b + 1) * size};
  };
  const auto row = [&](HostTensor& t) {
    if (t.empty()) return;
    t.shape[0] = 1;
    part(t.data, t.offset(1, 0, 0));
  };
  for (HostTensor* t : {&one.inputs.q, &one.inputs.k_new, &one.inputs.v_new}) row(*t);
  if (own_row) {
    for (HostTensor* t : {&one.inputs.k, &one.inputs.v, &one.inputs.k_e4m3, &one.inputs.v_e4m3}) row(*t);
  }
  if (c.scales_per_batch || (own_row && has_key_scales(p))) {
    for (HostTensor* t : {&one.inputs.k_scale, &one.inputs.v_scale}) {
      t->shape[1] = 1;
      part(t->data, t->offset(0, 1, 0));
    }
  }
  if (p.paged) part(one.inputs.page_table, p.max_pages_per_seq);
  if (c.slopes_per_batch) part(one.inputs.alibi_slopes, p.heads_q);
  return one;
}

// Every element is judged. A backward gets the oracle's own o and lse.
class WholeTrial final : public Trial {
 public:
  explicit WholeTrial(const cases::Case& c) : case_(c), inputs_(cases::make_inputs(c)) {}

  Result<std::unique_ptr<Call>> call(Device& device, int threads) override {
    if (is_backward(case_)) expect_exact(threads);
    if (case_.compare_alone) {
      if (Status s = run_alone(device); !s.ok()) return Status(s.code(), "a sequence alone: " + s.message());
    }
    return std::unique_ptr<Call>(std::make_unique<Buffers>(case_, inputs_, is_backward(case_) ? &exact_ : nullptr));
  }

  void expect(int threads) override {
    expect_exact(threads);
    if (!plain_done_) plain_ = oracle::plain_attention(inputs_, threads);
    plain_done_ = true;
  }

  void judge(const Call& call, int threads, Judgement& judgement) override {
    expect(threads);
    const auto& buffers = static_cast<const Buffers&>(call);
    judge_outputs(case_, buffers.results(exact_), exact_, plain_, judgement);
    if (case_.problem.op == AttentionOp::kDecode) judgement.add_exact(buffers.cache_damage(exact_));
    if (case_.compare_alone) judgement.add_exact(difference_from_alone(buffers.results(exact_)));
  }

 private:
  Status run_alone(Device& device) {
    alone_.clear();
    for (std::int64_t b = 0; b < case_.problem.batch; ++b) {
      const OneSequence one = one_sequence(case_, inputs_, b);
      Buffers buffers(one.c, one.inputs, nullptr);
      if (Status s = run_once(buffers, device); !s.ok()) return s;
      alone_.push_back(buffers.results(blank_outputs(one.c.problem, one.inputs)));
    }
    return {};
  }

  std::string difference_from_alone(const Outputs& together) const {
    for (std::size_t b = 0; b < alone_.size(); ++b) {
      for (const auto& [name, tensor] : {std::pair{"out", &Outputs::o}, {"lse", &Outputs::lse}}) {
        const std::vector<double>& alone = (alone_[b].*tensor).data;
        const auto begin = (together.*tensor).data.begin() + static_cast<std::ptrdiff_t>(b * alone.size());
        if (tensor == &Outputs::lse && !case_.problem.with_lse) continue;
        if (std::equal(alone.begin(), alone.end(), begin)) continue;
        return std::string(name) + ": sequence " + std::to_string(b) + " differs from what it is alone";
      }
    }
    return {};
  }

  void expect_exact(int threads) {
    if (!exact_done_) exact_ = oracle::attention(inputs_, threads);
    exact_done_ = true;
  }

  cases::Case case_;
  oracle::Inputs inputs_;
  Outputs exact_, plain_;
  std::vector<Outputs> alone_;  // each sequence's, if case_.compare_alone
  bool exact_done_ = false, plain_done_ = false;
};

// Some rows and keys are judged. A backward gets o and lse from the library's own forward, which cases of its own judge.
class SampledTrial final : public Trial {
 public:
  explicit SampledTrial(const cases::Case& c)
      : case_(c),
        inputs_(cases::make_inputs(c)),
        sample_(oracle::make_sample(c.problem, c.sample, c.seed)),
        blank_(blank_outputs(c.problem, inputs_)) {}

  Result<std::unique_ptr<Call>> call(Device& device, int) override {
    if (is_backward(case_) && saved_.o.empty()) {
      const cases::Case forward = forward_of(case_);
      Buffers buffers(forward, inputs_, nullptr);
      if (const Status s = run_once(buffers, device); !s.ok()) {
        return Status(s.code(), "its forward: " + s.message());
      }
      saved_ = buffers.results(blank_outputs(forward.problem, inputs_));
    }
    return std::unique_ptr<Call>(std::make_unique<Buffers>(case_, inputs_, is_backward(case_) ? &saved_ : nullptr));
  }

  void expect(int threads) override {
    if (done_ || (is_backward(case_) && saved_.o.empty())) return;
    exact_ = oracle::sampled_attention(inputs_, sample_, saved_.o, saved_.lse, threads);
    plain_ = oracle::sampled_plain_attention(inputs_, sample_, saved_.o, saved_.lse, threads);
    done_ = true;
  }

  void judge(const Call& call, int threads, Judgement& judgement) override {
    expect(threads);
    const Outputs whole = static_cast<const Buffers&>(call).results(blank_);
    judge_outputs(case_, oracle::take_sample(case_.problem, sample_, whole), exact_, plain_, judgement);
  }

 private:
  cases::Case case_;
  oracle::Inputs inputs_;
  oracle::Sample sample_;
  Outputs blank_, saved_, exact_, plain_;
  bool done_ = false;
};

// A case's inputs, shapes alone, with the tensors that are timed.
class TimedCall final : public Call {
 public:
  explicit TimedCall(const cases::Case& c)
      : case_(c), inputs_(cases::make_shapes(case_)), buffers_(case_, inputs_, nullptr) {}

  // The backward needs o and lse; the library's own are good enough, since only time is measured.
  Status save_forward(Device& device) {
    const cases::Case forward = forward_of(case_);
    Buffers buffers(forward, inputs_, nullptr);
    if (Status s = run_once(buffers, device); !s.ok()) return s;
    buffers_.take_saved(buffers);
    return {};
  }

  std::vector<Buffer*> buffers() override { return buffers_.buffers(); }
  tessera_status plan(tessera_plan** plan) override { return buffers_.plan(plan); }
  tessera_status run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) override {
    return buffers_.run(plan, workspace, bytes, stream);
  }

 private:
  cases::Case case_;
  oracle::Inputs inputs_;
  Buffers buffers_;
};

class AttentionCase final : public CaseOf<AttentionFamily, cases::Case> {
 public:
  using CaseOf::CaseOf;

  Bound bound() const override { return case_.problem.op == AttentionOp::kDecode ? Bound::kMemory : Bound::kCompute; }
  bool is_sampled() const override { return case_.sample > 0; }

  bool is_invalid(const Device& device) const override { return case_.refused && device.is_cpu(); }
  bool equal_runs_promised(const Device& device) const override {
    return !is_backward(case_) || case_.problem.deterministic || device.is_cpu();
  }

  std::unique_ptr<Trial> trial() const override {
    if (case_.sample > 0) return std::make_unique<SampledTrial>(seeded());
    return std::make_unique<WholeTrial>(seeded());
  }

  std::unique_ptr<Case> quick_check() const override {
    constexpr std::int64_t kWhole = 256, kSample = 16;
    cases::Case c = seeded();
    const AttentionProblem& p = c.problem;
    if (p.op != AttentionOp::kDecode && !p.varlen && p.seq_k > kWhole) c.sample = kSample;
    return attention_case(c);
  }

  Result<std::unique_ptr<Call>> timed_call(Device& device) const override {
    auto call = std::make_unique<TimedCall>(case_);
    if (is_backward(case_)) {
      if (Status s = call->save_forward(device); !s.ok()) return s;
    }
    return std::unique_ptr<Call>(std::move(call));
  }

  std::vector<std::unique_ptr<Case>> tuning_checks() const override {
    return as_cases(cases::tuning_checks(case_), attention_case);
  }
};

}  // namespace

std::unique_ptr<Case> attention_case(const cases::Case& c) { return std::make_unique<AttentionCase>(c); }

}  // namespace tessera::verify
