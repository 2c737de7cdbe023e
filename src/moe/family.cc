#include "moe/family.h"

#include "base/format.h"
#include "moe/steps.h"

// Every kernel of the family; each has a host file of that name. One line adds a kernel.
#define TESSERA_MOE_KERNELS(each) each(chained)

namespace tessera {
namespace moe {

#define TESSERA_DECLARE(name) Implementation name();
TESSERA_MOE_KERNELS(TESSERA_DECLARE)
#undef TESSERA_DECLARE

}  // namespace moe

const std::vector<moe::Implementation>& MoeFamily::implementations() {
#define TESSERA_LIST(name) moe::name(),
  static const std::vector<moe::Implementation> list = {TESSERA_MOE_KERNELS(TESSERA_LIST)};
#undef TESSERA_LIST
  return list;
}

const char* name_of(MoeTensor tensor) {
  constexpr const char* kNames[] = {
      "x",       "logits",    "up",       "down",         "gate",          "out",         "dout",         "experts",
      "weights", "positions", "offsets",  "balance_loss", "dbalance_loss", "before",      "before_gate",  "x_rows",
      "dx",      "dlogits",   "dweights", "dup",          "ddown",         "dgate",       "dout_rows",    "out_rows",
      "dx_rows", "hidden",    "dhidden",  "dbefore",      "dbefore_gate",  "row_weights", "row_dweights", "counts",
      "shares"};
  static_assert(sizeof(kNames) / sizeof(kNames[0]) == kMoeTensors);
  return kNames[static_cast<std::size_t>(tensor)];
}

MoeShape shape_of(const MoeProblem& p, MoeTensor tensor) {
  using T = MoeTensor;
  switch (tensor) {
    case T::kX:
    case T::kOut:
    case T::kDout:
    case T::kDx:
      return {2, {1, p.m, p.k}};
    case T::kLogits:
    case T::kDlogits:
      return {2, {1, p.m, p.experts}};
    case T::kUp:
    case T::kGate:
    case T::kDup:
    case T::kDgate:
      return {3, {p.experts, p.hidden, p.k}};
    case T::kDown:
    case T::kDdown:
      return {3, {p.experts, p.k, p.hidden}};
    case T::kExperts:
    case T::kWeights:
    case T::kPositions:
    case T::kDweights:
      return {2, {1, p.m, p.top_k}};
    case T::kOffsets:
      return {1, {1, 1, p.experts + 1}};
    case T::kBalanceLoss:
    case T::kDbalanceLoss:
      return {1, {1, 1, 1}};
    case T::kXRows:
    case T::kDoutRows:
    case T::kOutRows:
    case T::kDxRows:
      return {2, {1, p.pairs(), p.k}};
    case T::kRowWeights:
      return {1, {1, 1, p.pairs()}};
    case T::kRowDweights:  // by parts of the columns, if products make them
      return {2, {1, p.pairs(), 1}};
    case T::kCounts:
    case T::kShares:
      return {2, {1, moe::kMostChunks, p.experts}};
    default:
      return {2, {1, p.pairs(), p.hidden}};
  }
}

namespace {

const char* scoring_name(int scoring) {
  return scoring == kMoeSoftmax ? "softmax" : scoring == kMoeSigmoid ? "sigmoid" : "given";
}

template <class Wanted>
std::string names_of(Wanted wanted) {
  std::string text;
  for (int i = 0; i < kMoeGivenTensors; ++i) {
    const auto t = static_cast<MoeTensor>(i);
    if (wanted(t)) text += format("{}{}", text.empty() ? "" : " ", name_of(t));
  }
  return text;
}

// Of those that a problem may do without.
std::string given_text(const MoeProblem& p) {
  return names_of([&](MoeTensor t) {
    const bool optional = t == MoeTensor::kGate || t >= MoeTensor::kBalanceLoss;
    return optional && p.has(t);
  });
}
std::string unaligned_text(const MoeProblem& p) {
  return names_of([&](MoeTensor t) { return p.has(t) && (p.aligned & bit_of(t)) == 0; });
}

}  // namespace

std::string MoeFamily::describe(const Problem& p) {
  std::string text = format("{} {} M={} {} -> {} experts={} top_k={} {}{} {}", name_of(p.op), name_of(p.dtype), p.m,
                            p.k, p.hidden, p.experts, p.top_k, scoring_name(p.scoring),
                            p.normalized ? " normalized" : "", activation_name(p.activation));
  if (p.scoring != kMoeGiven && p.logits_dtype != p.dtype) text += format(" {} logits", name_of(p.logits_dtype));
  if (const std::string given = given_text(p); !given.empty()) text += " " + given;
  if (const std::string unaligned = unaligned_text(p); !unaligned.empty()) text += format(" unaligned: {}", unaligned);
  return text;
}

engine::Fields MoeFamily::fields(const Problem& p) {
  engine::Fields fields = {{"dtype", std::string(name_of(p.dtype))},
                           {"logits_dtype", std::string(name_of(p.logits_dtype))},
                           {"m", p.m},
                           {"k", p.k},
                           {"hidden", p.hidden},
                           {"experts", p.experts},
                           {"top_k", p.top_k},
                           {"scoring", std::string(scoring_name(p.scoring))},
                           {"normalized", p.normalized},
                           {"activation", std::string(activation_name(p.activation))}};
  if (const std::string given = given_text(p); !given.empty()) fields.push_back({"given", given});
  if (const std::string unaligned = unaligned_text(p); !unaligned.empty()) fields.push_back({"unaligned", unaligned});
  return fields;
}

bool MoeFamily::covers(const Problem& planned, const Problem& given) {
  // What was planned as unaligned may be aligned.
  Problem asked = given;
  asked.aligned &= planned.aligned;
  asked.tensor_maps &= planned.tensor_maps;
  return asked == planned;
}

std::string MoeFamily::difference(const Problem& planned, const Problem& given) {
  std::string text;
  const auto compare = [&](const char* what, const auto& was, const auto& is) {
    if (was != is) text += format("{}{} is {}, not {}", text.empty() ? "" : "; ", what, is, was);
  };
  compare("dtype", std::string(name_of(planned.dtype)), std::string(name_of(given.dtype)));
  compare("the dtype of logits", std::string(name_of(planned.logits_dtype)), std::string(name_of(given.logits_dtype)));
  compare("M", planned.m, given.m);
  compare("K", planned.k, given.k);
  compare("H", planned.hidden, given.hidden);
  compare("E", planned.experts, given.experts);
  compare("top_k", planned.top_k, given.top_k);
  compare("scoring", std::string(scoring_name(planned.scoring)), std::string(scoring_name(given.scoring)));
  compare("TESSERA_MOE_NORMALIZE", planned.normalized, given.normalized);
  compare("activation", std::string(activation_name(planned.activation)),
          std::string(activation_name(given.activation)));
  for (int i = 0; i < kMoeGivenTensors; ++i) {
    const auto t = static_cast<MoeTensor>(i);
    compare(format("{} given", name_of(t)).c_str(), planned.has(t), given.has(t));
    if (planned.has(t) && (planned.aligned & ~given.aligned & tessera::bit_of(t)) != 0) {
      text += format("{}{} has rows that do not start at multiples of 16 bytes", text.empty() ? "" : "; ", name_of(t));
    }
  }
  if (planned.tensor_maps && !given.tensor_maps) {
    text += format("{}a stride is 0 or too large", text.empty() ? "" : "; ");
  }
  return text;
}

std::string MoeFamily::tuning_class(const Problem& p, int) { return describe(p); }

std::vector<jit::KernelInstance> MoeFamily::shared_steps(const engine::Device& device) {
  std::vector<jit::KernelInstance> list;
  MoeProblem p;
  p.dtype = device.compute < 80 ? DType::kFloat16 : DType::kBFloat16;
  p.k = p.hidden = 64;
  p.experts = kMoeMostExperts;
  p.scoring = kMoeSigmoid;
  const auto add = [&] {
    for (const moe::Step step : {moe::Step::kRoute, moe::Step::kPermute, moe::Step::kCombine, moe::Step::kElements,
                                 moe::Step::kRouteBackward}) {
      list.push_back(moe::instance_of(step, p));
    }
  };
  add();
  p.op = MoeOp::kBackward;
  p.k = p.hidden = 45;
  p.experts = 64;
  p.scoring = kMoeSoftmax;
  p.logits_dtype = p.dtype;
  p.activation = kGeluErf;
  p.given = tessera::bit_of(MoeTensor::kGate);
  add();
  p.scoring = kMoeGiven;
  list.push_back(moe::instance_of(moe::Step::kRoute, p));
  list.push_back(moe::instance_of(moe::Step::kRouteBackward, p));
  return list;
}

}  // namespace tessera
