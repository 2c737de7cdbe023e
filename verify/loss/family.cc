// Losses as verify sees them, and problems by flags of the command line.
#include "verify/family.h"

#include <map>

#include "api/plan.h"
#include "base/format.h"
#include "loss/check.h"
#include "loss/family.h"
#include "verify/loss/cases.h"
#include "verify/loss/linear_cross_entropy.h"
#include "verify/loss/mlp_gmm_nll.h"

namespace tessera::verify {
namespace loss {
namespace {

const std::map<std::string, Reduction> kReductions{
    {"none", Reduction::kNone}, {"mean", Reduction::kMean}, {"sum", Reduction::kSum}};

std::vector<Flag> flags() {
  return {
      {"--rows", "N", "Rows", "32000", {}},
      {"--k", "N", "Components of a mixture", "10", {}},
      {"--classes", "N", "Linear cross-entropy: rows of the weight", "", {}},
      {"--hidden", "N", "An MLP gives the mixtures: its hidden columns", "", {}},
      {"--width", "N", "Columns of the linear layer's or the MLP's input", "4096 or 512", {}},
      {"--dtype", "TYPE", "fp32, fp16 or bf16", "bf16", {"fp32", "fp16", "bf16"}},
      {"--reduction", "R", "none, mean or sum", "mean", {"none", "mean", "sum"}},
      {"--gradient", "", "With the gradient", "", {}},
  };
}

Result<LossProblem> problem_from(const FlagValues& values) {
  LossProblem p;
  const auto given = [&](const char* flag) { return values.count(flag) > 0; };
  p.dtype = given("--dtype") ? kDTypes.at(values.at("--dtype").front()) : DType::kBFloat16;
  if (given("--reduction")) p.reduction = kReductions.at(values.at("--reduction").front());
  const bool linear = given("--classes"), mlp = given("--hidden");
  if (linear && mlp) return invalid("--classes and --hidden are given; one of them is accepted");
  if (linear) p.op = LossOp::kLinearCrossEntropy;
  if (mlp) p.op = LossOp::kMlpGmmNll;
  p.gradient = given("--gradient") && !linear;
  p.dhidden = p.dweight = given("--gradient") && linear;
  p.rows = linear ? 8192 : 32000;
  p.components = linear ? 0 : 10;
  p.width = linear ? 4096 : 0;
  p.mlp.k = mlp ? 512 : 0;
  if (given("--width") && !linear && !mlp) return invalid("--width is given without --classes or --hidden");
  if (given("--k") && linear) return invalid("--k is given with --classes");
  const Status read = read_sizes(values,
                                 {{"--rows", &p.rows},
                                  {"--k", &p.components},
                                  {"--classes", &p.classes},
                                  {"--hidden", &p.mlp.hidden},
                                  {"--width", mlp ? &p.mlp.k : &p.width}},
                                 1, 32);
  if (!read.ok()) return read;
  if (!mlp) return p;
  mlp_gmm_nll::Case c;
  c.problem = p;
  complete(c);
  return c.problem;
}

Result<std::unique_ptr<verify::Case>> described(const FlagValues& values) {
  const auto problem = problem_from(values);
  if (!problem.ok()) return problem.status();
  if (problem->op == LossOp::kLinearCrossEntropy) {
    linear_cross_entropy::Case c;
    c.problem = *problem;
    complete(c);
    return linear_cross_entropy_case(c);
  }
  if (problem->op == LossOp::kMlpGmmNll) {
    mlp_gmm_nll::Case c;
    c.problem = *problem;
    complete(c);
    return mlp_gmm_nll_case(c);
  }
  Case c;
  c.problem = *problem;
  complete(c);
  return loss_case(c);
}

Result<std::string> explain(const FlagValues& values, tessera_device device, const char* arch,
                            tessera_explain_format format) {
  const auto problem = problem_from(values);
  if (!problem.ok()) return problem.status();
  tessera::loss::CheckedLoss checked;
  checked.device = device;
  checked.args.problem = *problem;
  const auto explanation = api::explanation_of<LossFamily>(checked, arch);
  if (!explanation.ok()) return explanation.status();
  return format == TESSERA_EXPLAIN_JSON ? json_text_of(*explanation) : text_of(*explanation);
}

}  // namespace
}  // namespace loss

namespace {

std::vector<std::unique_ptr<Case>> suite_of(std::string_view name) {
  auto list = as_cases(loss::suite(name), loss::loss_case);
  for (const auto& c : linear_cross_entropy::suite(name)) list.push_back(linear_cross_entropy_case(c));
  for (const auto& c : mlp_gmm_nll::suite(name)) list.push_back(mlp_gmm_nll_case(c));
  return list;
}

}  // namespace

const Family& loss_family() {
  static const Family family = {
      LossFamily::kName,
      "--rows 32000 --k 10 --gradient\n"
      "--rows 100000 --k 100 --reduction none --arch sm_80,sm_90a\n"
      "--rows 8192 --width 4096 --classes 131072 --gradient --arch sm_90a\n"
      "--rows 32000 --width 512 --hidden 13650 --k 10 --arch sm_90a",
      loss::suite_names,
      suite_of,
      loss::flags,
      loss::described,
      loss::explain,
      engine::gate_instances<LossFamily>,
      random_loss,
  };
  return family;
}

}  // namespace tessera::verify
