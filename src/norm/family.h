// Norms as a family of the engine (engine/implementation.h says what each member is).
#pragma once

#include <string>
#include <vector>

#include "engine/implementation.h"
#include "norm/problem.h"

namespace tessera {

struct NormFamily {
  using Problem = NormProblem;
  using Args = NormArgs;
  static constexpr const char* kName = "norm";

  static const std::vector<engine::Implementation<NormFamily>>& implementations();
  static unsigned op_bit(const Problem& problem) { return bit_of(problem.op); }
  static const char* op_name(const Problem& problem) { return name_of(problem.op); }
  static std::string describe(const Problem& problem);
  static engine::Fields fields(const Problem& problem);
  static bool covers(const Problem& planned, const Problem& given);
  static std::string difference(const Problem& planned, const Problem& given);
  static std::string tuning_class(const Problem& problem, int multiprocessors);
  static std::vector<jit::KernelInstance> shared_steps(const engine::Device& device);

  static constexpr unsigned bit_of(NormOp op) { return 1u << static_cast<unsigned>(op); }
};

namespace norm {

using Implementation = engine::Implementation<NormFamily>;
using Recipe = engine::Recipe<NormFamily>;

}  // namespace norm
}  // namespace tessera
