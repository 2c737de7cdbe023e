// A case: one problem with its inputs, of any family. Tests, `tessera verify`, `bench`, `tune` and `cases` see no more of
// a family than this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/plan.h"
#include "verify/buffer.h"
#include "verify/judge.h"

namespace tessera::verify {

class Device;

// A case's tensors and the C functions of its family that take them.
class Call {
 public:
  virtual ~Call() = default;
  virtual std::vector<Buffer*> buffers() = 0;  // those in use
  virtual tessera_status plan(tessera_plan** plan) = 0;
  virtual tessera_status run(const tessera_plan* plan, void* workspace, std::size_t bytes, void* stream) = 0;
};

// How results compare with the oracle's: the worst of all that were judged.
struct Judgement {
  double worst_ratio = 0;  // error divided by what the rule allows
  std::string worst_tensor;
  std::string failure;  // the first; empty: all passed
  // By tensor: how much further its largest error may grow.
  std::map<std::string, double> spare;

  void add(const char* tensor, const Verdict& verdict);
  // Of what must be right to the bit: empty, or what is not.
  void add_exact(const std::string& difference);
};

// A case with its inputs, to be run and judged once, or once per Config.
class Trial {
 public:
  virtual ~Trial() = default;
  // Tensors with the inputs in host memory, outputs poisoned. device, threads: if another op, or the oracle, has to make
  // some of the inputs first.
  virtual Result<std::unique_ptr<Call>> call(Device& device, int threads) = 0;
  // Computes what the oracle expects, if that is not done yet and needs no device. threads 0: all.
  virtual void expect(int threads) = 0;
  // The outputs of a call, in host memory.
  virtual void judge(const Call& call, int threads, Judgement& judgement) = 0;
};

// A trial whose inputs and results the oracle makes from the case alone. Buffers: a Call, made from the case and its inputs.
template <class Stored, class Inputs, class Outputs, class Buffers>
class TrialOf : public Trial {
 public:
  TrialOf(const Stored& c, Inputs inputs) : case_(c), inputs_(std::move(inputs)) {}

  Result<std::unique_ptr<Call>> call(Device&, int) override {
    return std::unique_ptr<Call>(std::make_unique<Buffers>(case_, inputs_));
  }
  void expect(int threads) override {
    if (!done_) compute(threads);
    done_ = true;
  }
  void judge(const Call& call, int threads, Judgement& judgement) override {
    expect(threads);
    compare(static_cast<const Buffers&>(call), judgement);
  }

 protected:
  virtual void compute(int threads) = 0;  // exact_ and plain_
  virtual void compare(const Buffers& buffers, Judgement& judgement) = 0;

  Stored case_;
  Inputs inputs_;
  Outputs exact_, plain_;

 private:
  bool done_ = false;
};

enum class Bound : std::uint8_t { kCompute, kMemory };

class Case {
 public:
  virtual ~Case() = default;

  std::string name;  // says everything that sets the case apart; unique in a suite
  std::uint64_t seed = 1;
  std::vector<std::string> tags;  // "table", "small", ...: what a table groups by

  virtual const char* family() const = 0;
  virtual std::string op() const = 0;
  virtual engine::Fields fields() const = 0;
  virtual DType dtype() const = 0;

  virtual double flops() const = 0;          // useful operations
  virtual double bytes() const = 0;          // compulsory traffic: every tensor read or written once
  virtual double unfused_bytes() const = 0;  // of the textbook computation, intermediate results included
  virtual Bound bound() const { return Bound::kCompute; }
  virtual bool is_sampled() const { return false; }  // too long for the oracle: some rows are checked

  // Whether the call breaks the contract in a way that is seen before anything runs on this device. It must then return
  // invalid_argument and write nothing.
  virtual bool is_invalid(const Device&) const { return false; }
  // Whether all runs must give the same bits.
  virtual bool equal_runs_promised(const Device&) const { return true; }
  virtual std::unique_ptr<Trial> trial() const = 0;
  // The same problem, checked by samples if it is large: for a check before it is timed or tuned.
  virtual std::unique_ptr<Case> quick_check() const = 0;
  // Tensors for timing only: their values repeat, since new values for a large case take seconds to make.
  virtual Result<std::unique_ptr<Call>> timed_call(Device& device) const = 0;

  // Which kernel serves it on a device that need not be present.
  virtual engine::Explanation explain(const engine::Device& device) const = 0;

  // For the tuner.
  virtual engine::SearchSpace search_space(const engine::Device& device) const = 0;
  virtual bool fits(const engine::Choice& choice, const engine::Device& device) const = 0;
  // What a choice that fits compiles to; nothing if it is a library's.
  virtual std::vector<jit::KernelInstance> kernels_of(const engine::Choice& choice,
                                                      const engine::Device& device) const = 0;
  virtual engine::TuningKey tuning_key(int multiprocessors) const = 0;
  virtual std::string describe() const = 0;
  // Small problems that the Configs of this one fit as well, to check them on before they are timed.
  virtual std::vector<std::unique_ptr<Case>> tuning_checks() const {
    std::vector<std::unique_ptr<Case>> list;
    list.push_back(quick_check());
    return list;
  }
};

// A family's own struct for a case (gemm::Case, ...) as a Case: what its problem answers, and what it counts itself.
template <class Family, class Stored>
class CaseOf : public Case {
 public:
  explicit CaseOf(const Stored& c) : case_(c) {
    name = c.name;
    seed = c.seed;
    tags = c.tags;
  }

  const char* family() const override { return Family::kName; }
  std::string op() const override { return Family::op_name(problem()); }
  engine::Fields fields() const override { return Family::fields(problem()); }
  DType dtype() const override { return problem().dtype; }
  double flops() const override { return case_.flops(); }
  double bytes() const override { return case_.bytes(); }
  double unfused_bytes() const override { return case_.unfused_bytes(); }
  std::string describe() const override { return Family::describe(problem()); }
  engine::Explanation explain(const engine::Device& device) const override {
    return engine::explain<Family>(problem(), device, engine::select<Family>(problem(), device));
  }
  engine::SearchSpace search_space(const engine::Device& device) const override {
    return engine::search_space<Family>(problem(), device);
  }
  bool fits(const engine::Choice& choice, const engine::Device& device) const override {
    return recipe_of(choice, device).has_value();
  }
  std::vector<jit::KernelInstance> kernels_of(const engine::Choice& choice,
                                              const engine::Device& device) const override {
    std::vector<jit::KernelInstance> list;
    if (const auto recipe = recipe_of(choice, device)) {
      for (const engine::Step& step : recipe->steps) {
        if (step.kernel) list.push_back(*step.kernel);
      }
    }
    return list;
  }
  engine::TuningKey tuning_key(int multiprocessors) const override {
    return engine::tuning_key<Family>(problem(), multiprocessors);
  }

 protected:
  const typename Family::Problem& problem() const { return case_.problem; }
  std::optional<engine::Recipe<Family>> recipe_of(const engine::Choice& choice, const engine::Device& device) const {
    const auto* implementation = engine::find_implementation<Family>(choice.kernel);
    return implementation == nullptr ? std::nullopt : implementation->recipe(problem(), device, choice.config);
  }
  // With the seed that was set since.
  Stored seeded() const {
    Stored c = case_;
    c.seed = seed;
    return c;
  }

  Stored case_;
};

// A shape may come up twice on the way through a suite's loops; the list has it once.
template <class Stored>
std::vector<Stored> once_each(std::vector<Stored> list) {
  std::vector<Stored> out;
  std::set<std::string> seen;
  for (Stored& c : list) {
    if (seen.insert(c.name).second) out.push_back(std::move(c));
  }
  return out;
}

}  // namespace tessera::verify
