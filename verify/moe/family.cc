// Mixtures of experts as verify sees them, and problems by flags of the command line.
#include "moe/family.h"

#include <map>

#include "base/format.h"
#include "base/tensor.h"
#include "moe/check.h"
#include "verify/family.h"
#include "verify/gemm/flags.h"
#include "verify/moe/cases.h"

namespace tessera::verify {
namespace moe {
namespace {

using T = MoeTensor;

const std::map<std::string, int> kScorings{{"softmax", kMoeSoftmax}, {"sigmoid", kMoeSigmoid}, {"given", kMoeGiven}};

std::vector<Flag> flags() {
  return {
      {"--m", "N", "Tokens", "8192", {}},
      {"--k", "N", "Columns of x", "4096", {}},
      {"--hidden", "N", "Columns between the layers", "14336", {}},
      {"--experts", "N", "Experts", "8", {}},
      {"--top-k", "N", "Experts of a token", "2", {}},
      {"--dtype", "TYPE", "fp32, fp16 or bf16", "bf16", {"fp32", "fp16", "bf16"}},
      {"--activation",
       "F",
       "none, relu, silu, gelu_tanh or gelu_erf",
       "silu",
       {"none", "relu", "silu", "gelu_tanh", "gelu_erf"}},
      {"--scoring",
       "F",
       "softmax or sigmoid of logits; given: experts and weights are the caller's",
       "softmax",
       {"softmax", "sigmoid", "given"}},
      {"--normalize", "", "A token's weights are divided by their sum", "", {}},
      {"--gate", "", "A gated pair", "", {}},
      {"--kept", "", "What the backward needs is kept, and not computed again", "", {}},
      {"--balance", "", "With the balance loss", "", {}},
      {"--backward", "", "The gradients", "", {}},
  };
}

Result<Case> case_from(const FlagValues& values) {
  Case c;
  MoeProblem& p = c.problem;
  p.m = 8192, p.k = 4096, p.hidden = 14336, p.experts = 8, p.top_k = 2;
  p.dtype = DType::kBFloat16;
  const auto given = [&](const char* flag) { return values.count(flag) > 0; };
  const Status read = read_sizes(
      values, {{"--m", &p.m}, {"--k", &p.k}, {"--hidden", &p.hidden}, {"--experts", &p.experts}, {"--top-k", &p.top_k}},
      0, 31);
  if (!read.ok()) return read;
  if (given("--dtype")) p.dtype = kDTypes.at(values.at("--dtype").front());
  if (given("--activation")) p.activation = gemm::kActivationNames.at(values.at("--activation").front());
  if (given("--scoring")) p.scoring = kScorings.at(values.at("--scoring").front());
  p.op = given("--backward") ? MoeOp::kBackward : MoeOp::kForward;
  const bool forward = p.op == MoeOp::kForward, gated = given("--gate"), routes = p.scoring != kMoeGiven;
  p.normalized = given("--normalize") && routes;
  p.logits_dtype = routes ? p.dtype : DType::kFloat32;
  const auto give = [&](bool wanted, std::initializer_list<T> tensors) {
    for (const T t : tensors) p.given |= wanted ? bit_of(t) : 0;
  };
  give(true, {T::kX, T::kUp, T::kDown, forward ? T::kOut : T::kDout});
  give(true, {T::kExperts, T::kWeights, T::kPositions, T::kOffsets});
  give(routes, {T::kLogits});
  give(gated, {T::kGate});
  give(given("--kept"), {T::kBefore});
  give(given("--kept") && gated, {T::kBeforeGate});
  give(given("--kept"), {T::kXRows});
  give(given("--balance"), {forward ? T::kBalanceLoss : T::kDbalanceLoss});
  give(!forward, {T::kDx, T::kDup, T::kDdown, routes ? T::kDlogits : T::kDweights});
  give(!forward && gated, {T::kDgate});
  complete(c);
  return c;
}

// Tensors without data: explain looks at shapes only.
struct Shapes {
  std::array<MoeShape, kMoeGivenTensors> shapes;
  std::array<std::array<std::int64_t, 4>, kMoeGivenTensors> strides;
  std::array<tessera_tensor, kMoeGivenTensors> tensors{};
  tessera_moe args = TESSERA_MOE_INIT;

  Shapes(const Case& c, tessera_device device) {
    for (int i = 0; i < kMoeGivenTensors; ++i) {
      const T t = static_cast<T>(i);
      if (!c.problem.has(t)) continue;
      const auto at = static_cast<std::size_t>(i);
      shapes[at] = shape_of(c.problem, t);
      strides[at] = strides_of(c, t);
      tensors[at].device = device;
      tensors[at].ndim = shapes[at].rank;
      tensors[at].dtype = is_integer(t) ? tessera_dtype{TESSERA_INT, 32, 1} : c_dtype(dtype_of(c.problem, t));
      tensors[at].shape = shapes[at].dims.data() + 3 - shapes[at].rank;
      tensors[at].strides = strides[at].data() + 4 - shapes[at].rank;
      field_of(args, t) = &tensors[at];
    }
    set_options(c.problem, args);
  }
};

Result<std::unique_ptr<verify::Case>> described(const FlagValues& values) {
  auto c = case_from(values);
  if (!c.ok()) return c.status();
  const Shapes shapes(*c, {TESSERA_CPU, 0});
  // The contract's own check decides whether there is such a problem.
  const auto checked = tessera::moe::check(static_cast<tessera_moe_op>(c->problem.op), &shapes.args, Look::kShapes);
  if (!checked.ok()) return checked.status();
  return moe_case(*c);
}

Result<std::string> explain(const FlagValues& values, tessera_device device, const char* arch,
                            tessera_explain_format format) {
  const auto c = case_from(values);
  if (!c.ok()) return c.status();
  const Shapes shapes(*c, place_of(device, arch));
  const auto op = static_cast<tessera_moe_op>(c->problem.op);
  return text_from([&](char* text, std::size_t capacity, std::size_t* needed) {
    return tessera_moe_explain(op, &shapes.args, arch, format, text, capacity, needed);
  });
}

}  // namespace
}  // namespace moe

const Family& moe_family() {
  static const Family family = {
      MoeFamily::kName,
      "--experts 64 --top-k 8 --k 2048 --hidden 1408 --gate --normalize\n"
      "--m 8192 --k 4096 --hidden 14336 --gate --backward --kept --arch sm_80,sm_90a",
      moe::suite_names,
      [](std::string_view name) { return as_cases(moe::suite(name), moe::moe_case); },
      moe::flags,
      moe::described,
      moe::explain,
      engine::gate_instances<MoeFamily>,
      moe::random_moe,
  };
  return family;
}

}  // namespace tessera::verify
