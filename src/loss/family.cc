#include "loss/family.h"

#include <bit>

#include "base/format.h"
#include "loss/cross_entropy.h"
#include "mlp/family.h"

// Every kernel of the family; each has a host file of that name. One line adds a kernel.
#define TESSERA_LOSS_KERNELS(each) \
  each(gmm_nll) each(linear_cross_entropy) each(mlp_gmm_nll_sm90) each(mlp_gmm_nll) each(cpu)

namespace tessera {
namespace loss {

#define TESSERA_DECLARE(name) Implementation name();
TESSERA_LOSS_KERNELS(TESSERA_DECLARE)
#undef TESSERA_DECLARE

}  // namespace loss

const std::vector<loss::Implementation>& LossFamily::implementations() {
#define TESSERA_LIST(name) loss::name(),
  static const std::vector<loss::Implementation> list = {TESSERA_LOSS_KERNELS(TESSERA_LIST)};
#undef TESSERA_LIST
  return list;
}

namespace {

bool is_gmm(const LossProblem& p) { return p.op != LossOp::kLinearCrossEntropy; }

// "dhidden dweight dout unaligned: hidden", with a space before it.
std::string options_text(const LossProblem& p) {
  std::string text, unaligned;
  if (p.dhidden) text += " dhidden";
  if (p.dweight) text += " dweight";
  if (p.weighted) text += " dout";
  const auto add = [&](const char* name, bool aligned) {
    if (!aligned) unaligned += format("{}{}", unaligned.empty() ? "" : ", ", name);
  };
  add("hidden", p.hidden_aligned);
  add("weight", p.weight_aligned);
  add("dhidden", p.dhidden_aligned);
  add("dweight", p.dweight_aligned);
  if (!unaligned.empty()) text += format(" unaligned: {}", unaligned);
  return text;
}

}  // namespace

std::string LossFamily::describe(const Problem& p) {
  if (!is_gmm(p)) {
    return format("{} {} rows={} C={} V={} {}{}", name_of(p.op), name_of(p.dtype), p.rows, p.width, p.classes,
                  name_of(p.reduction), options_text(p));
  }
  const std::string likelihood =
      format("{} {} rows={} K={} target {} {}{}", name_of(p.op), name_of(p.dtype), p.rows, p.components,
             name_of(p.target_dtype), name_of(p.reduction), p.gradient ? " gradient" : "");
  return p.op == LossOp::kGmmNll ? likelihood : format("{} of {}", likelihood, MlpFamily::describe(p.mlp));
}

engine::Fields LossFamily::fields(const Problem& p) {
  engine::Fields fields = {{"dtype", std::string(name_of(p.dtype))}, {"rows", p.rows}};
  if (is_gmm(p)) {
    fields.push_back({"components", p.components});
  } else {
    fields.push_back({"width", p.width});
    fields.push_back({"classes", p.classes});
  }
  fields.push_back({"reduction", std::string(name_of(p.reduction))});
  if (is_gmm(p) && p.target_dtype != p.dtype) {
    fields.push_back({"target_dtype", std::string(name_of(p.target_dtype))});
  }
  if (p.gradient) fields.push_back({"gradient", true});
  if (p.op == LossOp::kMlpGmmNll) {
    fields.push_back({"width", p.mlp.k});
    fields.push_back({"hidden", p.mlp.hidden});
  }
  if (p.dhidden) fields.push_back({"dhidden", true});
  if (p.dweight) fields.push_back({"dweight", true});
  if (p.weighted) fields.push_back({"weighted", true});
  return fields;
}

bool LossFamily::covers(const Problem& planned, const Problem& given) {
  // What was planned as unaligned may be aligned.
  Problem asked = given;
  asked.hidden_aligned &= planned.hidden_aligned;
  asked.weight_aligned &= planned.weight_aligned;
  asked.dhidden_aligned &= planned.dhidden_aligned;
  asked.dweight_aligned &= planned.dweight_aligned;
  asked.tensor_maps &= planned.tensor_maps;
  if (MlpFamily::covers(planned.mlp, given.mlp)) asked.mlp = planned.mlp;
  return asked == planned;
}

std::string LossFamily::difference(const Problem& planned, const Problem& given) {
  std::string text;
  const auto compare = [&](const char* what, const auto& was, const auto& is) {
    if (was != is) text += format("{}{} is {}, not {}", text.empty() ? "" : "; ", what, is, was);
  };
  const auto needs = [&](const char* name, bool was, bool is) {
    if (was && !is) {
      text += format("{}{} has rows that do not start at multiples of 16 bytes", text.empty() ? "" : "; ", name);
    }
  };
  compare("op", std::string(name_of(planned.op)), std::string(name_of(given.op)));
  compare("dtype", std::string(name_of(planned.dtype)), std::string(name_of(given.dtype)));
  compare("target's dtype", std::string(name_of(planned.target_dtype)), std::string(name_of(given.target_dtype)));
  compare("rows", planned.rows, given.rows);
  compare("K", planned.components, given.components);
  compare("C", planned.width, given.width);
  compare("V", planned.classes, given.classes);
  compare("reduction", std::string(name_of(planned.reduction)), std::string(name_of(given.reduction)));
  compare("dparams given", planned.gradient, given.gradient);
  compare("dhidden given", planned.dhidden, given.dhidden);
  compare("dweight given", planned.dweight, given.dweight);
  compare("dout given", planned.weighted, given.weighted);
  needs("hidden", planned.hidden_aligned, given.hidden_aligned);
  needs("weight", planned.weight_aligned, given.weight_aligned);
  needs("dhidden", planned.dhidden_aligned, given.dhidden_aligned);
  needs("dweight", planned.dweight_aligned, given.dweight_aligned);
  if (planned.tensor_maps && !given.tensor_maps) {
    text += format("{}a stride is 0 or too large", text.empty() ? "" : "; ");
  }
  if (const std::string mlp = MlpFamily::difference(planned.mlp, given.mlp); !mlp.empty()) {
    text += format("{}{}", text.empty() ? "" : "; ", mlp);
  }
  return text;
}

// E.g. "loss_gmm_nll bf16 K10 rows2^15".
std::string LossFamily::tuning_class(const Problem& p, int) {
  if (p.op != LossOp::kGmmNll) return describe(p);
  return format("{} {} K{} rows2^{}{}", name_of(p.op), name_of(p.dtype), p.components,
                std::bit_width(static_cast<std::uint64_t>(p.rows)), p.gradient ? " gradient" : "");
}

std::vector<jit::KernelInstance> LossFamily::shared_steps(const engine::Device& device) {
  return loss::cross_entropy_instances(device);
}

}  // namespace tessera
