// Cases of the likelihood of mixtures whose parameters are the result of an MLP: a problem, its inputs by seed and
// distribution, the oracle, and how tensors lie in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "verify/loss/cases.h"
#include "verify/mlp/cases.h"

namespace tessera::verify::mlp_gmm_nll {

struct Case {
  std::string name;  // says everything that sets the case apart; unique in a suite
  LossProblem problem;
  // Of the parameters. If it is not normal, rows of x and up have a single 1 each and there is no activation, so that the
  // parameters are values of down, exactly.
  loss::Distribution distribution = loss::Distribution::kNormal;
  bool unaligned = false;  // 3 elements after every row, of dparams, too; else rows start at multiples of 8
  std::uint64_t seed = 1;
  std::vector<std::string> tags;

  double flops() const;
  double bytes() const;
  double unfused_bytes() const;
};

// Completes the name and what the problem says about the MLP, from dtype, rows, components, mlp.k and mlp.hidden.
void complete(Case& c);

std::vector<Case> suite(std::string_view name);

// Values are rounded to their types already.
struct Inputs {
  mlp::Tensors tensors;  // x, up and down
  HostTensor target;     // [1, 1, 1, rows]
};
Inputs make_inputs(const Case& c);

// The oracles of mlp and of the likelihood in fp64, one after the other; and the plain same-precision computations, between
// which the parameters are rounded.
loss::Outputs expected(const LossProblem& problem, const Inputs& inputs, int threads = 0);
loss::Outputs plain(const LossProblem& problem, const Inputs& inputs, int threads = 0);

// A case's tensors as the C ABI takes them. Inputs without values are filled with repeating random ones.
class Buffers final : public LossCall {
 public:
  Buffers(const Case& c, const Inputs& inputs);

  std::vector<Buffer*> buffers() override;
  loss::Outputs results() const { return loss::results_of(problem_, out_, dparams_); }

 private:
  LossProblem problem_;
  Buffer x_{"x"}, up_{"up"}, down_{"down"}, target_{"target"}, out_{"out"}, dparams_{"dparams"};
};

std::unique_ptr<verify::Case> mlp_gmm_nll_case(const Case& c);

}  // namespace tessera::verify::mlp_gmm_nll
