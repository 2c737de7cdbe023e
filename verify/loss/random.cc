// A small problem from a number: what `tessera fuzz` tries.
#include <iterator>

#include "verify/loss/cases.h"
#include "verify/loss/linear_cross_entropy.h"
#include "verify/random.h"

namespace tessera::verify {

std::unique_ptr<Case> random_loss(std::uint64_t number) {
  const RandomStream stream(number, 0x6c6f7373);
  std::int64_t next = 0;
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(stream.bits(next++) % n); };
  const auto one_in = [&](std::uint64_t n) { return below(n) == 0; };
  const auto length = [&](std::int64_t most) {
    constexpr std::int64_t kEdges[] = {0, 1, 7, 8, 31, 32, 33, 64, 127, 128, 129};
    return one_in(3) ? kEdges[below(std::size(kEdges))] : 1 + below(static_cast<std::uint64_t>(most));
  };
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  constexpr Reduction kReductions[] = {Reduction::kNone, Reduction::kMean, Reduction::kSum};
  LossProblem p;
  p.dtype = kTypes[below(3)];
  p.reduction = kReductions[below(3)];
  if (one_in(2)) {
    using loss::Distribution;
    constexpr Distribution kHostile[] = {Distribution::kFar, Distribution::kNarrow, Distribution::kWide,
                                         Distribution::kOneSided};
    loss::Case c;
    p.rows = length(2000);
    p.components = 1 + (one_in(4) ? below(512) : below(40));
    p.gradient = !one_in(3);
    p.target_dtype = one_in(2) ? p.dtype : DType::kFloat32;
    c.problem = p;
    c.padded = one_in(2);
    if (one_in(4)) c.distribution = kHostile[below(4)];
    c.seed = number;
    complete(c);
    return loss_case(c);
  }
  using linear_cross_entropy::Ignored;
  linear_cross_entropy::Case c;
  p.op = LossOp::kLinearCrossEntropy;
  p.rows = length(150);
  p.width = length(150);
  p.classes = 1 + below(one_in(8) ? 5000 : 400);
  p.dhidden = !one_in(3);
  p.dweight = !one_in(3);
  p.weighted = one_in(3) && (p.dhidden || p.dweight);
  c.problem = p;
  c.ignored = one_in(8) ? Ignored::kAll : one_in(2) ? Ignored::kSome : Ignored::kNone;
  c.unaligned = one_in(3);
  c.seed = number;
  complete(c);
  return linear_cross_entropy_case(c);
}

}  // namespace tessera::verify
