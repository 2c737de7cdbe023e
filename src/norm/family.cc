#include "norm/family.h"

#include <bit>

#include "base/format.h"

// Every kernel of the family; each has a host file of that name. One line adds a kernel.
#define TESSERA_NORM_KERNELS(each) each(forward) each(backward) each(rotary) each(cpu)

namespace tessera {
namespace norm {

#define TESSERA_DECLARE(name) Implementation name();
TESSERA_NORM_KERNELS(TESSERA_DECLARE)
#undef TESSERA_DECLARE

}  // namespace norm

const std::vector<norm::Implementation>& NormFamily::implementations() {
#define TESSERA_LIST(name) norm::name(),
  static const std::vector<norm::Implementation> list = {TESSERA_NORM_KERNELS(TESSERA_LIST)};
#undef TESSERA_LIST
  return list;
}

namespace {

// "layer residual weight": what there is beside rows and columns.
std::string options_text(const NormProblem& p) {
  std::string text;
  if (p.op == NormOp::kRotary) {
    text = format(" R={} {} tables {}", p.rotated, p.interleaved ? "interleaved" : "half", name_of(p.table_dtype));
    if (p.positions) text += " positions";
    if (p.inverse) text += " inverse";
  } else {
    text = p.centered ? " layer" : " rms";
    if (p.residual) text += " residual";
    if (p.weight) text += " weight";
    if (p.bias) text += " bias";
    if (p.statistics) text += " statistics";
    if (p.parameters) text += " parameters";
  }
  return text + (p.aligned ? "" : " unaligned");
}

}  // namespace

std::string NormFamily::describe(const Problem& p) {
  if (p.op == NormOp::kRotary) {
    return format("{} {} B={} S={} H={} D={}{}", name_of(p.op), name_of(p.dtype), p.batch, p.seq, p.heads, p.columns,
                  options_text(p));
  }
  return format("{} {} rows={} N={}{}", name_of(p.op), name_of(p.dtype), p.rows, p.columns, options_text(p));
}

engine::Fields NormFamily::fields(const Problem& p) {
  engine::Fields fields = {{"dtype", std::string(name_of(p.dtype))}};
  if (p.op == NormOp::kRotary) {
    for (const auto& [name, value] : {std::pair{"batch", p.batch}, std::pair{"seq", p.seq}, std::pair{"heads", p.heads},
                                      std::pair{"dim", p.columns}, std::pair{"rotated", p.rotated}}) {
      fields.push_back({name, value});
    }
  } else {
    fields.push_back({"rows", p.rows});
    fields.push_back({"columns", p.columns});
    fields.push_back({"norm", std::string(p.centered ? "layer" : "rms")});
  }
  // Fields that few problems have are named only if this one has them.
  const auto add = [&](const char* name, bool present) {
    if (present) fields.push_back({name, true});
  };
  add("residual", p.residual);
  add("weight", p.weight);
  add("bias", p.bias);
  add("statistics", p.statistics);
  add("parameters", p.parameters);
  add("interleaved", p.interleaved);
  add("inverse", p.inverse);
  add("positions", p.positions);
  add("unaligned", !p.aligned);
  return fields;
}

bool NormFamily::covers(const Problem& planned, const Problem& given) {
  // A kernel that does not need aligned rows takes both.
  Problem asked = given;
  asked.aligned &= planned.aligned;
  return asked == planned;
}

std::string NormFamily::difference(const Problem& planned, const Problem& given) {
  std::string text;
  const auto compare = [&](const char* what, const auto& was, const auto& is) {
    if (was != is) text += format("{}{} is {}, not {}", text.empty() ? "" : "; ", what, is, was);
  };
  compare("op", std::string(name_of(planned.op)), std::string(name_of(given.op)));
  compare("dtype", std::string(name_of(planned.dtype)), std::string(name_of(given.dtype)));
  compare("rows", planned.rows, given.rows);
  compare("columns", planned.columns, given.columns);
  compare("LayerNorm", planned.centered, given.centered);
  compare("residual given", planned.residual, given.residual);
  compare("weight given", planned.weight, given.weight);
  compare("bias given", planned.bias, given.bias);
  compare("rstd given", planned.statistics, given.statistics);
  compare("dweight or dbias given", planned.parameters, given.parameters);
  compare("B", planned.batch, given.batch);
  compare("S", planned.seq, given.seq);
  compare("H", planned.heads, given.heads);
  compare("rotated dims", planned.rotated, given.rotated);
  compare("the tables' dtype", std::string(name_of(planned.table_dtype)), std::string(name_of(given.table_dtype)));
  compare("interleaved", planned.interleaved, given.interleaved);
  compare("inverse", planned.inverse, given.inverse);
  compare("positions given", planned.positions, given.positions);
  if (planned.aligned && !given.aligned) {
    text += format("{}a row does not start at a multiple of 16 bytes", text.empty() ? "" : "; ");
  }
  return text;
}

// E.g. "norm_forward bf16 rms residual weight n4096 rows2^14": what the threads per row are chosen for.
std::string NormFamily::tuning_class(const Problem& p, int) {
  return format("{} {}{} n{} rows2^{}", name_of(p.op), name_of(p.dtype), options_text(p), p.columns,
                std::bit_width(static_cast<std::uint64_t>(p.rows)));
}

std::vector<jit::KernelInstance> NormFamily::shared_steps(const engine::Device&) { return {}; }

}  // namespace tessera
