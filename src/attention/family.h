// Attention as a family of the engine (engine/implementation.h says what each member is).
#pragma once

#include <string>
#include <vector>

#include "attention/problem.h"
#include "engine/implementation.h"

namespace tessera {

namespace attention {
class KeptCall;
}

struct AttentionFamily {
  using Problem = AttentionProblem;
  using Args = AttentionArgs;
  using KeptCall = attention::KeptCall;
  static constexpr const char* kName = "attention";

  static const std::vector<engine::Implementation<AttentionFamily>>& implementations();
  static unsigned op_bit(const Problem& problem) { return bit_of(problem.op); }
  static const char* op_name(const Problem& problem) { return name_of(problem.op); }
  static std::string describe(const Problem& problem);
  static engine::Fields fields(const Problem& problem);
  // A packed batch may be run with other lengths than it was planned with, as long as none is longer.
  static bool covers(const Problem& planned, const Problem& given);
  static std::string difference(const Problem& planned, const Problem& given);
  static std::string tuning_class(const Problem& problem, int multiprocessors);
  static std::vector<jit::KernelInstance> shared_steps(const engine::Device& device);

  static constexpr unsigned bit_of(AttentionOp op) { return 1u << static_cast<unsigned>(op); }
};

namespace attention {

using Implementation = engine::Implementation<AttentionFamily>;
using Recipe = engine::Recipe<AttentionFamily>;

}  // namespace attention
}  // namespace tessera
