#include "verify/gemm/flags.h"

#include <deque>

#include "base/format.h"
#include "base/tensor.h"
#include "gemm/check.h"
#include "gemm/family.h"
#include "tessera/gemm.h"
#include "verify/gemm/cases.h"

namespace tessera::verify::gemm {
namespace {

Result<Case> case_from(const FlagValues& values) {
  Case c;
  GemmProblem& p = c.problem;
  p.m = p.n = p.k = 4096;
  p.dtype = DType::kBFloat16;
  const auto given = [&](const char* flag) { return values.count(flag) > 0; };
  const Status read = read_sizes(values, {{"--m", &p.m}, {"--n", &p.n}, {"--k", &p.k}, {"--groups", &p.groups}}, 0, 40);
  if (!read.ok()) return read;
  if (given("--dtype")) p.dtype = kDTypes.at(values.at("--dtype").front());
  p.out_dtype = given("--out") ? kDTypes.at(values.at("--out").front()) : p.dtype;
  if (given("--activation")) p.activation = kActivationNames.at(values.at("--activation").front());
  p.a_transposed = given("--ta");
  p.b_transposed = given("--tb");
  p.bias = given("--bias");
  p.gated = given("--gate");
  p.gradient = given("--gradient");
  p.preactivation = given("--preactivation");
  p.residual = given("--residual");
  if (given("--groups")) {
    if (p.groups == 0) return invalid("--groups is 0; 1 to 2^40 is accepted");
    p.op = GemmOp::kGrouped;
    const std::string ragged = given("--ragged") ? values.at("--ragged").front() : "";
    p.grouping = ragged == "rows" ? kRaggedRows : ragged == "sums" ? kRaggedSums : kBatched;
  } else if (given("--ragged")) {
    return invalid("--ragged is given without --groups");
  }
  if (given("--padded")) c.layout = Layout::kPadded;
  if (given("--free-padding")) c.layout = Layout::kFreePadding;
  set_alignment(c);
  c.name = describe(c);
  return c;
}

// Tensors without data: explain looks at shapes only.
class Shapes {
 public:
  Shapes(const Case& c, tessera_device device) : case_(c), device_(device) {}
  // A vector, a matrix, or, if layers > 0, as many matrices.
  const tessera_tensor* add(bool wanted, DType dtype, std::vector<std::int64_t> shape, std::int64_t layers = 0) {
    if (!wanted) return nullptr;
    if (shape.size() == 1) {
      strides_.push_back({1});
    } else {
      const MatrixStrides strides = strides_of(case_, layers, shape[0], shape[1]);
      strides_.push_back(layers > 0 ? std::vector{strides.layer, strides.row, std::int64_t{1}}
                                    : std::vector{strides.row, std::int64_t{1}});
      if (layers > 0) shape.insert(shape.begin(), layers);
    }
    return add(c_dtype(dtype), std::move(shape));
  }
  const tessera_tensor* add_offsets(std::int64_t groups) {
    strides_.push_back({1});
    return add({TESSERA_INT, 32, 1}, {groups + 1});
  }

 private:
  const tessera_tensor* add(tessera_dtype dtype, std::vector<std::int64_t> shape) {
    shapes_.push_back(std::move(shape));
    tessera_tensor t{};
    t.device = device_;
    t.ndim = static_cast<std::int32_t>(shapes_.back().size());
    t.dtype = dtype;
    t.shape = shapes_.back().data();
    t.strides = strides_.back().data();
    tensors_.push_back(t);
    return &tensors_.back();
  }

  const Case& case_;
  tessera_device device_;
  std::deque<std::vector<std::int64_t>> shapes_, strides_;
  std::deque<tessera_tensor> tensors_;
};

tessera_gemm arguments(const Case& c, Shapes& shapes) {
  const GemmProblem& p = c.problem;
  using Dims = std::vector<std::int64_t>;
  const Dims b = p.b_transposed ? Dims{p.k, p.n} : Dims{p.n, p.k};
  const std::int64_t of_a = p.grouping == kBatched ? p.groups : 0;
  const std::int64_t of_b = p.grouping == kBatched || p.grouping == kRaggedRows ? p.groups : 0;
  const std::int64_t of_out = out_has_layers(p.grouping) ? p.groups : 0;
  const Dims vector = p.op == GemmOp::kGrouped ? Dims{p.groups, p.n} : Dims{p.n};
  tessera_gemm args = TESSERA_GEMM_INIT;
  args.a = shapes.add(true, p.dtype, p.a_transposed ? Dims{p.k, p.m} : Dims{p.m, p.k}, of_a);
  args.b = shapes.add(true, p.dtype, b, of_b);
  args.out = shapes.add(true, p.out_dtype, {p.m, p.n}, of_out);
  args.bias = shapes.add(p.bias, p.dtype, vector);
  args.gate = shapes.add(p.gated, p.dtype, b, of_b);
  args.gate_bias = shapes.add(p.gated && p.bias, p.dtype, vector);
  args.saved = shapes.add(p.gradient, p.dtype, {p.m, p.n}, of_out);
  args.preactivation = shapes.add(p.preactivation, p.dtype, {p.m, p.n}, of_out);
  args.residual = shapes.add(p.residual, p.out_dtype, {p.m, p.n}, of_out);
  if (p.grouping == kRaggedRows || p.grouping == kRaggedSums) args.offsets = shapes.add_offsets(p.groups);
  args.activation = static_cast<tessera_activation>(p.activation);
  args.flags = flags_of(c);
  return args;
}

}  // namespace

std::vector<Flag> flags() {
  const std::vector<std::string> types = {"fp32", "fp16", "bf16"};
  return {
      {"--m", "N", "Rows of A and of the result", "4096", {}},
      {"--n", "N", "Columns of the result", "4096", {}},
      {"--k", "N", "The length of the sums", "4096", {}},
      {"--groups", "N", "Products, each with its own B", "", {}},
      {"--ragged", "DIM", "rows or sums: what groups have different numbers of", "", {"rows", "sums"}},
      {"--dtype", "TYPE", "fp32, fp16 or bf16", "bf16", types},
      {"--out", "TYPE", "Of the result; default: --dtype", "", types},
      {"--ta", "", "A is stored as [K, M]", "", {}},
      {"--tb", "", "B is stored as [K, N], not as [N, K]", "", {}},
      {"--activation",
       "F",
       "relu, silu, gelu_tanh or gelu_erf",
       "none",
       {"none", "relu", "silu", "gelu_tanh", "gelu_erf"}},
      {"--bias", "", "With a bias", "", {}},
      {"--gate", "", "Times the activation of a second product", "", {}},
      {"--gradient", "", "Times the activation's derivative", "", {}},
      {"--preactivation", "", "With the preactivation as an output", "", {}},
      {"--residual", "", "Plus a residual", "", {}},
      {"--padded", "", "Rows at multiples of 16 bytes, whatever their length", "", {}},
      {"--free-padding", "", "Rows at multiples of 64 elements; padding of the result may be overwritten", "", {}},
  };
}

Result<std::unique_ptr<verify::Case>> described(const FlagValues& values) {
  auto c = case_from(values);
  if (!c.ok()) return c.status();
  Shapes shapes(*c, {TESSERA_CPU, 0});
  const tessera_gemm args = arguments(*c, shapes);
  // The contract's own check decides whether there is such a problem.
  const auto checked = tessera::gemm::check(static_cast<tessera_gemm_op>(c->problem.op), &args, Look::kShapes);
  if (!checked.ok()) return checked.status();
  return gemm_case(*c);
}

Result<std::string> explain(const FlagValues& values, tessera_device device, const char* arch,
                            tessera_explain_format format) {
  const auto c = case_from(values);
  if (!c.ok()) return c.status();
  Shapes shapes(*c, place_of(device, arch));
  const tessera_gemm args = arguments(*c, shapes);
  const auto op = static_cast<tessera_gemm_op>(c->problem.op);
  return text_from([&](char* text, std::size_t capacity, std::size_t* needed) {
    return tessera_gemm_explain(op, &args, arch, format, text, capacity, needed);
  });
}

}  // namespace tessera::verify::gemm
