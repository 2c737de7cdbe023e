// Norms as verify sees them, and problems by flags of the command line.
#include "verify/family.h"

#include "api/plan.h"
#include "base/format.h"
#include "norm/check.h"
#include "norm/family.h"
#include "verify/norm/cases.h"

namespace tessera::verify {
namespace norm {
namespace {

std::vector<Flag> flags() {
  return {
      {"--op", "OP", "forward, backward or rotary", "forward", {"forward", "backward", "rotary"}},
      {"--rows", "N", "Rows; rotary: tokens", "16384", {}},
      {"--n", "N", "Elements of a row; rotary: the head dim", "4096; rotary 128", {}},
      {"--dtype", "TYPE", "fp32, fp16 or bf16", "bf16", {"fp32", "fp16", "bf16"}},
      {"--layer", "", "LayerNorm with a bias, not RMSNorm", "", {}},
      {"--residual", "", "With a residual", "", {}},
      {"--heads", "N", "rotary: heads", "32", {}},
      {"--rotated", "N", "rotary: rotated dims; default: all", "", {}},
      {"--interleaved", "", "rotary: pairs are neighbours", "", {}},
      {"--unaligned", "", "Rows that start at no multiples of 16 bytes", "", {}},
  };
}

Result<Case> case_from(const FlagValues& values) {
  Case c;
  NormProblem& p = c.problem;
  const auto given = [&](const char* flag) { return values.count(flag) > 0; };
  const std::string op = given("--op") ? values.at("--op").front() : "forward";
  p.op = op == "rotary" ? NormOp::kRotary : op == "backward" ? NormOp::kBackward : NormOp::kForward;
  const bool rotary = p.op == NormOp::kRotary;
  for (const char* flag : {"--heads", "--rotated", "--interleaved"}) {
    if (!rotary && given(flag)) return invalid(format("{} is for --op rotary", flag));
  }
  for (const char* flag : {"--layer", "--residual"}) {
    if (rotary && given(flag)) return invalid(format("{} is given with --op rotary, which has none", flag));
  }
  p.dtype = p.table_dtype = given("--dtype") ? kDTypes.at(values.at("--dtype").front()) : DType::kBFloat16;
  p.rows = 16384;
  p.columns = rotary ? 128 : 4096;
  p.heads = rotary ? 32 : 0;
  std::int64_t rotated = -1;
  const Status read = read_sizes(
      values, {{"--rows", &p.rows}, {"--n", &p.columns}, {"--heads", &p.heads}, {"--rotated", &rotated}}, 0, 32);
  if (!read.ok()) return read;
  if (rotary) {
    p.batch = 1;
    p.seq = p.rows;
    p.rows = p.seq * p.heads;
    p.rotated = rotated < 0 ? p.columns / 2 * 2 : rotated;
    p.interleaved = given("--interleaved");
    if (p.rotated % 2 != 0) return invalid(format("--rotated is {}; it must be even", p.rotated));
  } else {
    p.weight = true;
    p.centered = given("--layer");
    p.bias = p.centered && p.op == NormOp::kForward;
    p.residual = given("--residual");
    p.statistics = p.op == NormOp::kForward;
    p.parameters = p.op == NormOp::kBackward;
  }
  if (given("--unaligned")) c.layout = Layout::kUnaligned;
  complete(c);
  return c;
}

Result<std::unique_ptr<verify::Case>> described(const FlagValues& values) {
  const auto c = case_from(values);
  if (!c.ok()) return c.status();
  if (c->problem.columns == 0) return invalid("--n is 0; 1 and more is accepted");
  if (c->problem.rotated > c->problem.columns) {
    return invalid(format("--rotated is {}, but --n is {}", c->problem.rotated, c->problem.columns));
  }
  return norm_case(*c);
}

Result<std::string> explain(const FlagValues& values, tessera_device device, const char* arch,
                            tessera_explain_format format) {
  const auto c = described(values);
  if (!c.ok()) return c.status();
  tessera::norm::CheckedNorm checked;
  checked.device = device;
  checked.args.problem = case_from(values)->problem;
  // Alignment counts on GPUs only.
  if (place_of(device, arch).type == TESSERA_CPU) checked.args.problem.aligned = true;
  const auto explanation = api::explanation_of<NormFamily>(checked, arch);
  if (!explanation.ok()) return explanation.status();
  return format == TESSERA_EXPLAIN_JSON ? json_text_of(*explanation) : text_of(*explanation);
}

}  // namespace
}  // namespace norm

const Family& norm_family() {
  static const Family family = {
      NormFamily::kName,
      "--rows 16384 --n 4096 --residual\n"
      "--op backward --rows 36096 --n 1365 --layer --arch sm_80,sm_90a\n"
      "--op rotary --rows 8192 --heads 32 --n 128 --arch cuda:0",
      norm::suite_names,
      [](std::string_view name) { return as_cases(norm::suite(name), norm::norm_case); },
      norm::flags,
      norm::described,
      norm::explain,
      engine::gate_instances<NormFamily>,
  };
  return family;
}

}  // namespace tessera::verify
