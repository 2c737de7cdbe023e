// What a kernel's host file tells the engine: which problems it refuses, which Configs it offers, and the recipe of
// each Config. One line in a family's list makes it known; selection, explain, the tuner and the compile gate read
// everything from here.
//
// A family is a struct of types and functions:
//
//   struct Family {
//     using Problem = ...;  // what is asked, a plain value; of what is in device memory it holds only bounds
//     using Args = ...;     // the tensors of one call
//     static constexpr const char* kName;
//     static const std::vector<Implementation<Family>>& implementations();
//     static unsigned op_bit(const Problem&);                      // which of Implementation::ops it asks for
//     static const char* op_name(const Problem&);
//     static std::string describe(const Problem&);                 // for people, on one line
//     static Fields fields(const Problem&);
//     static bool covers(const Problem& planned, const Problem& given);  // may a plan for one be run for the other?
//     static std::string difference(const Problem& planned, const Problem& given);  // why not, for people
//     static std::string tuning_class(const Problem&, int multiprocessors);  // problems that share a tuned Config
//     static std::vector<jit::KernelInstance> shared_steps(const Device&);   // for the gate: steps that recipes share
//   };
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "cuda/kernel.h"
#include "engine/config.h"
#include "engine/device.h"
#include "jit/jit.h"

namespace tessera::engine {

// A Config as a candidate: what it needs and how long it is expected to take.
struct Offer {
  Config config;
  std::size_t workspace = 0;  // bytes
  double microseconds = 0;    // predicted, comparable across the kernels of a family
  std::string why;
};

struct Step {
  std::string name;                           // "preprocess", "main"
  std::optional<jit::KernelInstance> kernel;  // nothing: a library call or a CPU function
};

// What a run of a recipe is given.
struct Launch {
  const std::vector<const cuda::Kernel*>& kernels;  // loaded, of the steps that have one, in order
  void* workspace;                                  // aligned to 256 bytes
  cuda::CUstream stream;
};

// Named steps over one workspace. enqueue chooses and allocates nothing.
template <class Family>
struct Recipe {
  using Problem = typename Family::Problem;
  using Args = typename Family::Args;

  Problem problem;  // that it is for, without properties that this kernel does not need: see Family::covers
  std::vector<Step> steps;
  std::size_t workspace = 0;
  std::function<Status(const Args&, const Launch&)> enqueue;
};

template <class Family>
struct Implementation {
  using Problem = typename Family::Problem;

  const char* name;
  unsigned ops;                      // bits of the ops it computes; kernels of other ops are not listed as refusals
  std::vector<std::string> headers;  // of all its steps' GPU code, below kernels/; empty: it has none

  // Why it cannot serve a problem; nothing if it can.
  std::optional<std::string> (*refuses)(const Problem&, const Device&);
  // At least one for a problem that it does not refuse.
  std::vector<Offer> (*offers)(const Problem&, const Device&);
  // Nothing for a Config that does not fit the problem or the device, such as one of another version.
  std::optional<Recipe<Family>> (*recipe)(const Problem&, const Device&, const Config&);
  // Configs that the tuner may try beside those that are offered; null: there are none.
  std::vector<Config> (*searches)(const Problem&, const Device&);
  // Problems whose offers the compile gate compiles, to stand for all; null for a kernel without GPU code.
  std::vector<Problem> (*representatives)(const Device&);
};

}  // namespace tessera::engine
