#include "mlp/family.h"

#include "base/format.h"
#include "mlp/gated.h"

// Every kernel of the family; each has a host file of that name. One line adds a kernel.
#define TESSERA_MLP_KERNELS(each) each(chained) each(narrow_sm90)

namespace tessera {
namespace mlp {

#define TESSERA_DECLARE(name) Implementation name();
TESSERA_MLP_KERNELS(TESSERA_DECLARE)
#undef TESSERA_DECLARE

}  // namespace mlp

const std::vector<mlp::Implementation>& MlpFamily::implementations() {
#define TESSERA_LIST(name) mlp::name(),
  static const std::vector<mlp::Implementation> list = {TESSERA_MLP_KERNELS(TESSERA_LIST)};
#undef TESSERA_LIST
  return list;
}

namespace {

struct Named {
  MlpTensor tensor;
  const char* name;
};
// The tensors that a problem may do without.
constexpr Named kOptional[] = {{MlpTensor::kGate, "gate"},
                               {MlpTensor::kUpBias, "up_bias"},
                               {MlpTensor::kGateBias, "gate_bias"},
                               {MlpTensor::kDownBias, "down_bias"},
                               {MlpTensor::kResidual, "residual"},
                               {MlpTensor::kBefore, "before"},
                               {MlpTensor::kBeforeGate, "before_gate"},
                               {MlpTensor::kHidden, "hidden"},
                               {MlpTensor::kDx, "dx"},
                               {MlpTensor::kDup, "dup"},
                               {MlpTensor::kDdown, "ddown"},
                               {MlpTensor::kDgate, "dgate"},
                               {MlpTensor::kDbefore, "dbefore"},
                               {MlpTensor::kDbeforeGate, "dbefore_gate"}};
constexpr Named kNeeded[] = {{MlpTensor::kX, "x"},
                             {MlpTensor::kUp, "up"},
                             {MlpTensor::kDown, "down"},
                             {MlpTensor::kOut, "out"},
                             {MlpTensor::kDout, "dout"}};

std::string given_text(const MlpProblem& p) {
  std::string text;
  for (const Named& one : kOptional) {
    if (p.has(one.tensor)) text += format("{}{}", text.empty() ? "" : " ", one.name);
  }
  return text;
}

std::string unaligned_text(const MlpProblem& p) {
  std::string text;
  const auto add = [&](const Named& one) {
    if (p.has(one.tensor) && (p.aligned & tessera::bit_of(one.tensor)) == 0) {
      text += format("{}{}", text.empty() ? "" : ", ", one.name);
    }
  };
  for (const Named& one : kNeeded) add(one);
  for (const Named& one : kOptional) add(one);
  return text;
}

}  // namespace

std::string MlpFamily::describe(const Problem& p) {
  std::string text = format("{} {} M={} {} -> {} -> {} {}", name_of(p.op), name_of(p.dtype), p.m, p.k, p.hidden, p.n,
                            activation_name(p.activation));
  if (const std::string given = given_text(p); !given.empty()) text += " " + given;
  if (p.hidden_padded) text += " padded";
  if (const std::string unaligned = unaligned_text(p); !unaligned.empty()) text += format(" unaligned: {}", unaligned);
  return text;
}

engine::Fields MlpFamily::fields(const Problem& p) {
  engine::Fields fields = {{"dtype", std::string(name_of(p.dtype))},
                           {"m", p.m},
                           {"k", p.k},
                           {"hidden", p.hidden},
                           {"n", p.n},
                           {"activation", std::string(activation_name(p.activation))}};
  if (const std::string given = given_text(p); !given.empty()) fields.push_back({"given", given});
  if (p.hidden_padded) fields.push_back({"hidden_padded", true});
  if (const std::string unaligned = unaligned_text(p); !unaligned.empty()) fields.push_back({"unaligned", unaligned});
  return fields;
}

bool MlpFamily::covers(const Problem& planned, const Problem& given) {
  // What was planned as unaligned may be aligned.
  Problem asked = given;
  asked.aligned &= planned.aligned;
  asked.tensor_maps &= planned.tensor_maps;
  return asked == planned;
}

std::string MlpFamily::difference(const Problem& planned, const Problem& given) {
  std::string text;
  const auto compare = [&](const char* what, const auto& was, const auto& is) {
    if (was != is) text += format("{}{} is {}, not {}", text.empty() ? "" : "; ", what, is, was);
  };
  compare("dtype", std::string(name_of(planned.dtype)), std::string(name_of(given.dtype)));
  compare("M", planned.m, given.m);
  compare("K", planned.k, given.k);
  compare("H", planned.hidden, given.hidden);
  compare("N", planned.n, given.n);
  compare("hidden padded", planned.hidden_padded, given.hidden_padded);
  compare("activation", std::string(activation_name(planned.activation)),
          std::string(activation_name(given.activation)));
  for (const Named& one : kOptional)
    compare(format("{} given", one.name).c_str(), planned.has(one.tensor), given.has(one.tensor));
  const std::uint32_t lost = planned.given & planned.aligned & ~given.aligned;
  const auto needs = [&](const Named& one) {
    if ((lost & tessera::bit_of(one.tensor)) == 0) return;
    text += format("{}{} has rows that do not start at multiples of 16 bytes", text.empty() ? "" : "; ", one.name);
  };
  for (const Named& one : kNeeded) needs(one);
  for (const Named& one : kOptional) needs(one);
  if (planned.tensor_maps && !given.tensor_maps) {
    text += format("{}a stride is 0 or too large", text.empty() ? "" : "; ");
  }
  return text;
}

std::string MlpFamily::tuning_class(const Problem& p, int) { return describe(p); }

std::vector<jit::KernelInstance> MlpFamily::shared_steps(const engine::Device& device) {
  MlpProblem p;
  p.op = MlpOp::kBackward;
  p.dtype = device.compute < 80 ? DType::kFloat16 : DType::kBFloat16;
  p.activation = kGeluErf;
  return {mlp::instance_of(mlp::gated_config(p, true)), mlp::instance_of(mlp::gated_config(p, false))};
}

}  // namespace tessera
