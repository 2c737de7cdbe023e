// GEMM as a family of the engine (engine/implementation.h says what each member is).
#pragma once

#include <string>
#include <vector>

#include "engine/implementation.h"
#include "gemm/problem.h"

namespace tessera {

struct GemmFamily {
  using Problem = GemmProblem;
  using Args = GemmArgs;
  static constexpr const char* kName = "gemm";

  static const std::vector<engine::Implementation<GemmFamily>>& implementations();
  static unsigned op_bit(const Problem& problem) { return bit_of(problem.op); }
  static const char* op_name(const Problem& problem) { return name_of(problem.op); }
  static std::string describe(const Problem& problem);
  static engine::Fields fields(const Problem& problem);
  static bool covers(const Problem& planned, const Problem& given);
  static std::string difference(const Problem& planned, const Problem& given);
  static std::string tuning_class(const Problem& problem, int multiprocessors);
  static std::vector<jit::KernelInstance> shared_steps(const engine::Device& device);

  static constexpr unsigned bit_of(GemmOp op) { return 1u << static_cast<unsigned>(op); }
};

namespace gemm {

using Implementation = engine::Implementation<GemmFamily>;
using Recipe = engine::Recipe<GemmFamily>;

}  // namespace gemm
}  // namespace tessera
