// Losses as verify sees them, and problems by flags of the command line.
#include "verify/family.h"

#include <charconv>
#include <map>

#include "api/plan.h"
#include "base/format.h"
#include "loss/check.h"
#include "loss/family.h"
#include "verify/loss/cases.h"

namespace tessera::verify {
namespace loss {
namespace {

const std::map<std::string, DType> kTypes{
    {"fp32", DType::kFloat32}, {"fp16", DType::kFloat16}, {"bf16", DType::kBFloat16}};
const std::map<std::string, Reduction> kReductions{
    {"none", Reduction::kNone}, {"mean", Reduction::kMean}, {"sum", Reduction::kSum}};

std::vector<Flag> flags() {
  return {
      {"--rows", "N", "Rows", "32000", {}},
      {"--k", "N", "Components of a mixture", "10", {}},
      {"--dtype", "TYPE", "fp32, fp16 or bf16", "bf16", {"fp32", "fp16", "bf16"}},
      {"--reduction", "R", "none, mean or sum", "mean", {"none", "mean", "sum"}},
      {"--gradient", "", "With the gradient", "", {}},
  };
}

Result<Case> case_from(const FlagValues& values) {
  Case c;
  LossProblem& p = c.problem;
  const auto given = [&](const char* flag) { return values.count(flag) > 0; };
  p.dtype = given("--dtype") ? kTypes.at(values.at("--dtype").front()) : DType::kBFloat16;
  if (given("--reduction")) p.reduction = kReductions.at(values.at("--reduction").front());
  p.gradient = given("--gradient");
  p.rows = 32000;
  p.components = 10;
  for (const auto& [flag, to] : {std::pair{"--rows", &p.rows}, std::pair{"--k", &p.components}}) {
    if (!given(flag)) continue;
    const std::string& text = values.at(flag).front();
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, *to);
    if (error != std::errc() || stop != end) return invalid(format("{} is '{}', which is no number", flag, text));
    if (*to < 1 || *to > std::int64_t{1} << 32) return invalid(format("{} is {}; 1 to 2^32 is accepted", flag, *to));
  }
  complete(c);
  return c;
}

Result<std::unique_ptr<verify::Case>> described(const FlagValues& values) {
  const auto c = case_from(values);
  if (!c.ok()) return c.status();
  return loss_case(*c);
}

Result<std::string> explain(const FlagValues& values, tessera_device device, const char* arch,
                            tessera_explain_format format) {
  const auto c = case_from(values);
  if (!c.ok()) return c.status();
  tessera::loss::CheckedLoss checked;
  checked.device = device;
  checked.args.problem = c->problem;
  const auto explanation = api::explanation_of<LossFamily>(checked, arch);
  if (!explanation.ok()) return explanation.status();
  return format == TESSERA_EXPLAIN_JSON ? json_text_of(*explanation) : text_of(*explanation);
}

}  // namespace
}  // namespace loss

namespace {

std::vector<std::unique_ptr<Case>> suite_of(std::string_view name) {
  std::vector<std::unique_ptr<Case>> list;
  for (const loss::Case& c : loss::suite(name)) list.push_back(loss::loss_case(c));
  return list;
}

std::vector<StepCase> steps() { return {}; }

}  // namespace

const Family& loss_family() {
  static const Family family = {
      LossFamily::kName,
      "--rows 32000 --k 10 --gradient\n"
      "--rows 100000 --k 100 --reduction none --arch sm_80,sm_90a",
      loss::suite_names,
      suite_of,
      loss::flags,
      loss::described,
      loss::explain,
      engine::gate_instances<LossFamily>,
      steps,
  };
  return family;
}

}  // namespace tessera::verify
