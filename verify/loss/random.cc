// A small problem from a number: what `tessera fuzz` tries.
#include <algorithm>

#include "verify/loss/cases.h"
#include "verify/loss/linear_cross_entropy.h"
#include "verify/loss/mlp_gmm_nll.h"
#include "verify/random.h"

namespace tessera::verify {

std::unique_ptr<Case> random_loss(std::uint64_t number, std::uint64_t kind_number) {
  Draw kind(kind_number, 0x6b696e64), draw(number, 0x6c6f7373);
  const auto length = [&](std::int64_t most) {
    constexpr std::int64_t kEdges[] = {0, 1, 7, 8, 31, 32, 33, 64, 127, 128, 129};
    return draw.one_in(3) ? draw.pick(kEdges) : 1 + draw.below(most);
  };
  constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  constexpr Reduction kReductions[] = {Reduction::kNone, Reduction::kMean, Reduction::kSum};
  LossProblem p;
  p.dtype = kind.pick(kTypes);
  p.reduction = kind.pick(kReductions);
  using loss::Distribution;
  constexpr Distribution kHostile[] = {Distribution::kFar, Distribution::kNarrow, Distribution::kWide,
                                       Distribution::kOneSided};
  if (kind.one_in(4)) {
    mlp_gmm_nll::Case c;
    p.rows = std::max<std::int64_t>(length(300), p.reduction == Reduction::kMean ? 1 : 0);
    p.components = 1 + kind.below(kind.one_in(4) ? 30 : 10);
    p.gradient = !kind.one_in(3);
    p.target_dtype = kind.one_in(2) ? p.dtype : DType::kFloat32;
    p.mlp.k = 1 + draw.below(150);
    p.mlp.hidden = 1 + draw.below(200);
    c.unaligned = kind.one_in(3);
    if (draw.one_in(4)) c.distribution = draw.pick(kHostile);
    if (c.distribution == Distribution::kNarrow) p.rows = std::min<std::int64_t>(p.rows, 200);  // the sum fits fp32
    c.problem = p;
    c.seed = number;
    complete(c);
    return mlp_gmm_nll_case(c);
  }
  if (kind.one_in(2)) {
    loss::Case c;
    p.rows = length(2000);
    p.components = 1 + (kind.one_in(4) ? kind.below(512) : kind.below(40));
    p.gradient = !kind.one_in(3);
    p.target_dtype = kind.one_in(2) ? p.dtype : DType::kFloat32;
    c.padded = draw.one_in(2);
    if (draw.one_in(4)) c.distribution = draw.pick(kHostile);
    if (p.reduction == Reduction::kMean) p.rows = std::max<std::int64_t>(p.rows, 1);            // no rows have no mean
    if (c.distribution == Distribution::kNarrow) p.rows = std::min<std::int64_t>(p.rows, 200);  // the sum fits fp32
    c.problem = p;
    c.seed = number;
    complete(c);
    return loss_case(c);
  }
  using linear_cross_entropy::Ignored;
  linear_cross_entropy::Case c;
  p.op = LossOp::kLinearCrossEntropy;
  p.rows = length(150);
  p.width = length(150);
  p.classes = 1 + draw.below(draw.one_in(8) ? 5000 : 400);
  p.dhidden = !kind.one_in(3);
  p.dweight = !kind.one_in(3);
  p.weighted = kind.one_in(3) && (p.dhidden || p.dweight);
  c.problem = p;
  c.ignored = draw.one_in(8) ? Ignored::kAll : draw.one_in(2) ? Ignored::kSome : Ignored::kNone;
  c.unaligned = kind.one_in(3);
  c.seed = number;
  complete(c);
  return linear_cross_entropy_case(c);
}

}  // namespace tessera::verify
