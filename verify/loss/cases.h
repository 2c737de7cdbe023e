// Cases of the loss family: a problem, its inputs by seed and distribution, and how its tensors lie in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "loss/problem.h"
#include "verify/loss/call.h"
#include "verify/loss/oracle.h"

namespace tessera::verify::loss {

enum class Distribution : std::uint8_t {
  kNormal,
  kFar,       // targets 10,000 sigma away from every component
  kNarrow,    // log sigma of -80: z^2 is beyond fp32
  kWide,      // log sigma of 80
  kOneSided,  // logits in the hundreds: one component is all of the mixture
};
const char* name_of(Distribution distribution);

struct Case {
  std::string name;  // says everything that sets the case apart; unique in a suite
  LossProblem problem;
  Distribution distribution = Distribution::kNormal;
  bool padded = false;  // gaps between components and between rows
  std::uint64_t seed = 1;
  double floor = 1;  // of the accuracy rule, in epsilons: see verify::judge
  std::vector<std::string> tags;

  double flops() const;
  double bytes() const;
  double unfused_bytes() const;
};

// Completes name and floor.
void complete(Case& c);

std::vector<Case> suite(std::string_view name);
const std::vector<std::string>& suite_names();

// Values from the case's seed, rounded to their types; the same on every platform.
Inputs make_inputs(const Case& c);

// What an op wrote, read from host memory.
Outputs results_of(const LossProblem& problem, const Buffer& out, const Buffer& dparams);

// A case's tensors as the C ABI takes them.
class Buffers final : public LossCall {
 public:
  Buffers(const Case& c, const Inputs& inputs);

  std::vector<Buffer*> buffers() override;
  Outputs results() const { return results_of(problem_, out_, dparams_); }

 private:
  LossProblem problem_;
  Buffer params_{"params"}, target_{"target"}, out_{"out"}, dparams_{"dparams"};
};

std::unique_ptr<verify::Case> loss_case(const Case& c);

}  // namespace tessera::verify::loss

namespace tessera::verify {

// Of all ops of the family.
std::unique_ptr<Case> random_loss(std::uint64_t number, std::uint64_t kind);

}  // namespace tessera::verify
