// Losses as a family of the engine (engine/implementation.h says what each member is).
#pragma once

#include <string>
#include <vector>

#include "engine/implementation.h"
#include "loss/problem.h"

namespace tessera {

struct LossFamily {
  using Problem = LossProblem;
  using Args = LossArgs;
  static constexpr const char* kName = "loss";

  static const std::vector<engine::Implementation<LossFamily>>& implementations();
  static unsigned op_bit(const Problem& problem) { return bit_of(problem.op); }
  static const char* op_name(const Problem& problem) { return name_of(problem.op); }
  static std::string describe(const Problem& problem);
  static engine::Fields fields(const Problem& problem);
  static bool covers(const Problem& planned, const Problem& given);
  static std::string difference(const Problem& planned, const Problem& given);
  static std::string tuning_class(const Problem& problem, int multiprocessors);
  static std::vector<jit::KernelInstance> shared_steps(const engine::Device& device);

  static constexpr unsigned bit_of(LossOp op) { return 1u << static_cast<unsigned>(op); }
};

namespace loss {

using Implementation = engine::Implementation<LossFamily>;
using Recipe = engine::Recipe<LossFamily>;

}  // namespace loss
}  // namespace tessera
