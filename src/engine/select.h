// Problem x Device -> the Configs that serve it, best first, and why each other kernel does not. Pure: no I/O, no device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "engine/explain.h"
#include "engine/implementation.h"

namespace tessera::engine {

// What the tuner found to be the fastest for such a problem, by measuring.
struct Tuned {
  std::string kernel;
  Config config;
  double microseconds = 0;
  double default_microseconds = 0;  // of the selector's own choice, in the same run
};

template <class Family>
struct Candidate {
  const Implementation<Family>* implementation;
  Offer offer;
  bool tuned = false;
};

template <class Family>
struct Selection {
  std::vector<Candidate<Family>> candidates;  // best first
  std::vector<Refusal> refusals;
};

template <class Family>
const Implementation<Family>* find_implementation(const std::string& name) {
  for (const Implementation<Family>& one : Family::implementations()) {
    if (name == one.name) return &one;
  }
  return nullptr;
}

// tuned: comes first if its kernel takes the problem and its Config fits; else it is ignored. May be null.
template <class Family>
Selection<Family> select(const typename Family::Problem& problem, const Device& device, const Tuned* tuned = nullptr) {
  Selection<Family> selection;
  const auto& all = Family::implementations();
  for (const Implementation<Family>& one : all) {
    if ((one.ops & Family::op_bit(problem)) == 0) continue;
    if (auto reason = one.refuses(problem, device)) {
      selection.refusals.push_back({one.name, *std::move(reason)});
      continue;
    }
    for (Offer& offer : one.offers(problem, device)) selection.candidates.push_back({&one, std::move(offer)});
    if (tuned == nullptr || tuned->kernel != one.name) continue;
    const auto recipe = one.recipe(problem, device, tuned->config);
    if (!recipe) continue;
    // It replaces the kernel's own offer of the same Config.
    std::erase_if(selection.candidates, [&](const Candidate<Family>& c) {
      return c.implementation == &one && c.offer.config == tuned->config;
    });
    selection.candidates.push_back({&one,
                                    {tuned->config, recipe->workspace, tuned->microseconds,
                                     format("tuned on this GPU, default {:.1f} us", tuned->default_microseconds)},
                                    true});
  }
  std::stable_sort(selection.candidates.begin(), selection.candidates.end(),
                   [](const Candidate<Family>& a, const Candidate<Family>& b) {
                     return a.tuned != b.tuned ? a.tuned : a.offer.microseconds < b.offer.microseconds;
                   });
  return selection;
}

template <class Family>
Explanation explain(const typename Family::Problem& problem, const Device& device, const Selection<Family>& selection) {
  Explanation e;
  e.family = Family::kName;
  e.op = Family::op_name(problem);
  e.problem = Family::describe(problem);
  e.fields = Family::fields(problem);
  e.device = device.name;
  for (const Candidate<Family>& c : selection.candidates) {
    e.options.push_back(
        {c.implementation->name, c.offer.config, c.offer.workspace, c.offer.microseconds, c.offer.why, c.tuned});
  }
  e.refusals = selection.refusals;
  return e;
}

// One point of a search: a Config of a kernel.
struct Choice {
  std::string kernel;
  Config config;
};

struct SearchSpace {
  std::vector<Choice> choices;  // those that the selector offers come first, its own choice before all
  int offered = 0;
};

// Every Config that may be tried for a problem. Empty if no kernel serves it.
template <class Family>
SearchSpace search_space(const typename Family::Problem& problem, const Device& device) {
  SearchSpace space;
  std::set<std::pair<std::string, std::string>> known;
  const auto add = [&](const Implementation<Family>& one, const Config& config) {
    if (known.emplace(one.name, text_of(config)).second) space.choices.push_back({one.name, config});
  };
  for (const Candidate<Family>& c : select<Family>(problem, device).candidates) add(*c.implementation, c.offer.config);
  space.offered = static_cast<int>(space.choices.size());
  for (const Implementation<Family>& one : Family::implementations()) {
    if ((one.ops & Family::op_bit(problem)) == 0 || one.searches == nullptr || one.refuses(problem, device)) continue;
    for (const Config& config : one.searches(problem, device)) add(one, config);
  }
  return space;
}

// A Config as numbers, for a search that changes one or two of them: the kernel's first, then the fields in order.
std::vector<int> genes_of(const Choice& choice);

// What the compile gate compiles of a family for an architecture: every instance of every Config that its kernels offer
// for their representative problems, and the steps that recipes share.
template <class Family>
std::vector<jit::KernelInstance> gate_instances(const Device& device) {
  std::vector<jit::KernelInstance> list = Family::shared_steps(device);
  std::set<std::pair<std::string, std::string>> known;
  for (const jit::KernelInstance& instance : list) known.emplace(instance.header, instance.config);
  for (const Implementation<Family>& one : Family::implementations()) {
    if (one.representatives == nullptr) continue;
    for (const auto& problem : one.representatives(device)) {
      if (one.refuses(problem, device)) continue;
      for (const Offer& offer : one.offers(problem, device)) {
        const auto recipe = one.recipe(problem, device, offer.config);
        if (!recipe) continue;
        for (const Step& step : recipe->steps) {
          if (!step.kernel || !known.emplace(step.kernel->header, step.kernel->config).second) continue;
          list.push_back(*step.kernel);
        }
      }
    }
  }
  return list;
}

}  // namespace tessera::engine
