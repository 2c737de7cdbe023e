// Cases of linear cross-entropy: a problem, its inputs by seed and distribution, the oracle, and how tensors lie in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "loss/problem.h"
#include "verify/loss/call.h"

namespace tessera::verify::linear_cross_entropy {

enum class Ignored : std::uint8_t { kNone, kSome, kAll };

struct Case {
  std::string name;  // says everything that sets the case apart; unique in a suite
  LossProblem problem;
  Ignored ignored = Ignored::kSome;
  bool huge = false;       // logits in the ten thousands, each with one term, so that every way to add them is exact
  bool unaligned = false;  // 3 elements after every row
  std::uint64_t seed = 1;
  std::vector<std::string> tags;

  double flops() const;
  double bytes() const;
  double unfused_bytes() const;
};

// Completes the name and what the problem says about alignment.
void complete(Case& c);

std::vector<Case> suite(std::string_view name);

// Values are rounded to their types already.
struct Inputs {
  HostTensor hidden, weight;  // [1, 1, rows, C], [1, 1, V, C]
  HostTensor dout;            // [1, 1, 1, rows], if given
  std::vector<std::int32_t> target;
};
Inputs make_inputs(const Case& c);

struct Outputs {
  HostTensor out;               // [1, 1, 1, rows or 1]
  HostTensor dhidden, dweight;  // like hidden and weight, if wanted
};
// The oracle, in fp64; and the plain same-precision computation, which rounds logits, dlogits and results to their types.
Outputs expected(const LossProblem& problem, const Inputs& inputs, int threads = 0);
Outputs plain(const LossProblem& problem, const Inputs& inputs, int threads = 0);

// A case's tensors as the C ABI takes them.
class Buffers final : public LossCall {
 public:
  // Matrices without values are filled with repeating random ones.
  Buffers(const Case& c, const Inputs& inputs);

  std::vector<Buffer*> buffers() override;
  Outputs results() const;

 private:
  LossProblem problem_;
  Buffer hidden_{"hidden"}, weight_{"weight"}, target_{"target"}, dout_{"dout"};
  Buffer out_{"out"}, dhidden_{"dhidden"}, dweight_{"dweight"};
};

std::unique_ptr<verify::Case> linear_cross_entropy_case(const Case& c);

}  // namespace tessera::verify::linear_cross_entropy
