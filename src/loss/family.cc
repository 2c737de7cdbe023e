#include "loss/family.h"

#include <bit>

#include "base/format.h"

// Every kernel of the family; each has a host file of that name. One line adds a kernel.
#define TESSERA_LOSS_KERNELS(each) each(gmm_nll) each(cpu)

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

std::string LossFamily::describe(const Problem& p) {
  return format("{} {} rows={} K={} target {} {}{}", name_of(p.op), name_of(p.dtype), p.rows, p.components,
                name_of(p.target_dtype), name_of(p.reduction), p.gradient ? " gradient" : "");
}

engine::Fields LossFamily::fields(const Problem& p) {
  engine::Fields fields = {{"dtype", std::string(name_of(p.dtype))},
                           {"rows", p.rows},
                           {"components", p.components},
                           {"reduction", std::string(name_of(p.reduction))}};
  if (p.target_dtype != p.dtype) fields.push_back({"target_dtype", std::string(name_of(p.target_dtype))});
  if (p.gradient) fields.push_back({"gradient", true});
  return fields;
}

bool LossFamily::covers(const Problem& planned, const Problem& given) { return planned == given; }

std::string LossFamily::difference(const Problem& planned, const Problem& given) {
  std::string text;
  const auto compare = [&](const char* what, const auto& was, const auto& is) {
    if (was != is) text += format("{}{} is {}, not {}", text.empty() ? "" : "; ", what, is, was);
  };
  compare("dtype", std::string(name_of(planned.dtype)), std::string(name_of(given.dtype)));
  compare("target's dtype", std::string(name_of(planned.target_dtype)), std::string(name_of(given.target_dtype)));
  compare("rows", planned.rows, given.rows);
  compare("K", planned.components, given.components);
  compare("reduction", std::string(name_of(planned.reduction)), std::string(name_of(given.reduction)));
  compare("dparams given", planned.gradient, given.gradient);
  return text;
}

// E.g. "loss_gmm_nll bf16 K10 rows2^15".
std::string LossFamily::tuning_class(const Problem& p, int) {
  return format("{} {} K{} rows2^{}{}", name_of(p.op), name_of(p.dtype), p.components,
                std::bit_width(static_cast<std::uint64_t>(p.rows)), p.gradient ? " gradient" : "");
}

std::vector<jit::KernelInstance> LossFamily::shared_steps(const engine::Device&) { return {}; }

}  // namespace tessera
