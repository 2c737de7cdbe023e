// MLP as verify sees it, and problems by flags of the command line.
#include "mlp/family.h"

#include "base/format.h"
#include "base/tensor.h"
#include "mlp/check.h"
#include "verify/family.h"
#include "verify/gemm/flags.h"
#include "verify/mlp/buffers.h"

namespace tessera::verify {
namespace mlp {
namespace {

using T = MlpTensor;

std::vector<Flag> flags() {
  return {
      {"--m", "N", "Rows", "8192", {}},
      {"--k", "N", "Columns of x", "4096", {}},
      {"--hidden", "N", "Columns between the layers", "11008", {}},
      {"--n", "N", "Columns of the result; default: --k", "", {}},
      {"--dtype", "TYPE", "fp32, fp16 or bf16", "bf16", {"fp32", "fp16", "bf16"}},
      {"--activation",
       "F",
       "relu, silu, gelu_tanh or gelu_erf",
       "silu",
       {"none", "relu", "silu", "gelu_tanh", "gelu_erf"}},
      {"--gate", "", "A gated pair", "", {}},
      {"--bias", "", "With biases", "", {}},
      {"--kept", "", "What the backward needs is kept, and not computed again", "", {}},
      {"--backward", "", "The gradients", "", {}},
  };
}

Result<Case> case_from(const FlagValues& values) {
  Case c;
  c.layout = Layout::kFreeHidden;
  MlpProblem& p = c.problem;
  p.m = 8192, p.k = 4096, p.hidden = 11008;
  p.dtype = DType::kBFloat16;
  const auto given = [&](const char* flag) { return values.count(flag) > 0; };
  const Status read = read_sizes(values, {{"--m", &p.m}, {"--k", &p.k}, {"--hidden", &p.hidden}, {"--n", &p.n}}, 0, 40);
  if (!read.ok()) return read;
  if (!given("--n")) p.n = p.k;
  if (given("--dtype")) p.dtype = kDTypes.at(values.at("--dtype").front());
  if (given("--activation")) p.activation = gemm::kActivationNames.at(values.at("--activation").front());
  p.op = given("--backward") ? MlpOp::kBackward : MlpOp::kForward;
  const bool forward = p.op == MlpOp::kForward, gated = given("--gate"), biased = given("--bias");
  const auto give = [&](bool wanted, std::initializer_list<T> tensors) {
    for (const T t : tensors) p.given |= wanted ? bit_of(t) : 0;
  };
  give(true, {T::kX, T::kUp, T::kDown, forward ? T::kOut : T::kDout});
  give(gated, {T::kGate});
  give(biased, {T::kUpBias});
  give(biased && gated, {T::kGateBias});
  give(biased && forward, {T::kDownBias});
  give(given("--kept"), {T::kBefore, gated ? T::kBeforeGate : T::kHidden});
  give(!forward, {T::kDx, T::kDup, T::kDdown});
  give(!forward && gated, {T::kDgate});
  set_alignment(c);
  c.name = describe(c);
  return c;
}

// Tensors without data: explain looks at shapes only.
struct Shapes {
  std::array<std::array<std::int64_t, 2>, kMlpTensors> shapes, strides;
  std::array<tessera_tensor, kMlpTensors> tensors{};
  tessera_mlp args = TESSERA_MLP_INIT;

  Shapes(const Case& c, tessera_device device) {
    for (int i = 0; i < kMlpTensors; ++i) {
      const T t = static_cast<T>(i);
      if (!c.problem.has(t)) continue;
      const auto at = static_cast<std::size_t>(i);
      const Dims dims = dims_of(c.problem, t);
      shapes[at] = {dims.rows, dims.columns};
      strides[at] = {row_stride(c, t), 1};
      const int skipped = is_vector(t) ? 1 : 0;
      tensors[at].device = device;
      tensors[at].ndim = 2 - skipped;
      tensors[at].dtype = c_dtype(c.problem.dtype);
      tensors[at].shape = shapes[at].data() + skipped;
      tensors[at].strides = strides[at].data() + skipped;
      field_of(args, t) = &tensors[at];
    }
    args.activation = static_cast<tessera_activation>(c.problem.activation);
    if (c.problem.hidden_padded) args.flags |= TESSERA_MLP_HIDDEN_PADDED;
  }
};

Result<std::unique_ptr<verify::Case>> described(const FlagValues& values) {
  auto c = case_from(values);
  if (!c.ok()) return c.status();
  const Shapes shapes(*c, {TESSERA_CPU, 0});
  // The contract's own check decides whether there is such a problem.
  const auto checked = tessera::mlp::check(static_cast<tessera_mlp_op>(c->problem.op), &shapes.args, Look::kShapes);
  if (!checked.ok()) return checked.status();
  return mlp_case(*c);
}

Result<std::string> explain(const FlagValues& values, tessera_device device, const char* arch,
                            tessera_explain_format format) {
  const auto c = case_from(values);
  if (!c.ok()) return c.status();
  const Shapes shapes(*c, place_of(device, arch));
  const auto op = static_cast<tessera_mlp_op>(c->problem.op);
  return text_from([&](char* text, std::size_t capacity, std::size_t* needed) {
    return tessera_mlp_explain(op, &shapes.args, arch, format, text, capacity, needed);
  });
}

}  // namespace
}  // namespace mlp

const Family& mlp_family() {
  static const Family family = {
      MlpFamily::kName,
      "--m 36096 --k 512 --hidden 1365\n"
      "--m 8192 --k 4096 --hidden 11008 --gate --backward --kept --arch sm_80,sm_90a",
      mlp::suite_names,
      [](std::string_view name) { return as_cases(mlp::suite(name), mlp::mlp_case); },
      mlp::flags,
      mlp::described,
      mlp::explain,
      engine::gate_instances<MlpFamily>,
  };
  return family;
}

}  // namespace tessera::verify
