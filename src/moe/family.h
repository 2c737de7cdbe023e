// Mixtures of experts as a family of the engine (engine/implementation.h says what each member is). It uses gemm and mlp.
#pragma once

#include <string>
#include <vector>

#include "engine/implementation.h"
#include "moe/problem.h"

namespace tessera {

struct MoeFamily {
  using Problem = MoeProblem;
  using Args = MoeArgs;
  static constexpr const char* kName = "moe";

  static const std::vector<engine::Implementation<MoeFamily>>& implementations();
  static unsigned op_bit(const Problem& problem) { return bit_of(problem.op); }
  static const char* op_name(const Problem& problem) { return name_of(problem.op); }
  static std::string describe(const Problem& problem);
  static engine::Fields fields(const Problem& problem);
  static bool covers(const Problem& planned, const Problem& given);
  static std::string difference(const Problem& planned, const Problem& given);
  static std::string tuning_class(const Problem& problem, int multiprocessors);
  static std::vector<jit::KernelInstance> shared_steps(const engine::Device& device);

  static constexpr unsigned bit_of(MoeOp op) { return 1u << static_cast<unsigned>(op); }
};

namespace moe {

using Implementation = engine::Implementation<MoeFamily>;
using Recipe = engine::Recipe<MoeFamily>;

}  // namespace moe
}  // namespace tessera
