#include "gemm/family.h"

#include <bit>

#include "base/arithmetic.h"
#include "base/format.h"
#include "gemm/pad_rows.h"
#include "gemm/split_reduce.h"

// Every kernel of the family; each has a host file of that name. One line adds a kernel.
#define TESSERA_GEMM_KERNELS(each) each(dense) each(dense_sm90) each(cublaslt) each(cpu)

namespace tessera {
namespace gemm {

#define TESSERA_DECLARE(name) Implementation name();
TESSERA_GEMM_KERNELS(TESSERA_DECLARE)
#undef TESSERA_DECLARE

}  // namespace gemm

const char* activation_name(int activation) {
  switch (activation) {
    case kRelu:
      return "relu";
    case kSilu:
      return "silu";
    case kGeluTanh:
      return "gelu_tanh";
    case kGeluErf:
      return "gelu_erf";
    default:
      return "none";
  }
}

const std::vector<gemm::Implementation>& GemmFamily::implementations() {
#define TESSERA_LIST(name) gemm::name(),
  static const std::vector<gemm::Implementation> list = {TESSERA_GEMM_KERNELS(TESSERA_LIST)};
#undef TESSERA_LIST
  return list;
}

namespace {

// "bias silu residual": the epilogue, empty if there is none.
std::string epilogue_text(const GemmProblem& p) {
  std::string text;
  if (p.bias) text += " bias";
  if (p.activation != kIdentity || p.gated || p.gradient || p.gated_gradient) {
    text += format(" {}{}", activation_name(p.activation), p.gradient || p.gated_gradient ? "'" : "");
  }
  if (p.gated || p.gated_gradient) text += " gated";
  if (p.weighted) text += " weighted";
  if (p.preactivation) text += " preactivation";
  if (p.residual) text += " residual";
  return text;
}

const char* grouping_name(const GemmProblem& p) {
  return p.grouping == kRaggedRows   ? "ragged rows"
         : p.grouping == kRaggedSums ? "ragged sums"
         : p.a_shared                ? "shared a"
                                     : "batched";
}

std::string unaligned_text(const GemmProblem& p) {
  std::string text;
  const auto add = [&](const char* name, bool aligned) {
    if (!aligned) text += format("{}{}", text.empty() ? "" : ", ", name);
  };
  add("a", p.a_aligned);
  add("b", p.b_aligned);
  add("out", p.out_aligned);
  add("epilogue", p.epilogue_aligned);
  return text;
}

}  // namespace

std::string GemmFamily::describe(const Problem& p) {
  std::string text = format("{} {} M={} N={} K={}", name_of(p.op), name_of(p.dtype), p.m, p.n, p.k);
  if (p.op == GemmOp::kGrouped) text += format(" groups={} {}", p.groups, grouping_name(p));
  if (p.out_dtype != p.dtype) text += format(" out {}", name_of(p.out_dtype));
  if (p.a_transposed) text += " A^T";
  if (p.b_transposed) text += " B^T";
  if (p.sums_two) text += " two products";
  text += epilogue_text(p);
  if (p.out_padded) text += " padded out";
  if (const std::string unaligned = unaligned_text(p); !unaligned.empty()) text += format(" unaligned: {}", unaligned);
  return text;
}

engine::Fields GemmFamily::fields(const Problem& p) {
  engine::Fields fields = {{"dtype", std::string(name_of(p.dtype))}, {"m", p.m}, {"n", p.n}, {"k", p.k}};
  // Fields that few problems have are named only if this one has them.
  const auto add = [&](const char* name, bool present, const auto& value) {
    if (present) fields.push_back({name, value});
  };
  add("out_dtype", p.out_dtype != p.dtype, std::string(name_of(p.out_dtype)));
  add("groups", p.op == GemmOp::kGrouped, p.groups);
  add("grouping", p.op == GemmOp::kGrouped, std::string(grouping_name(p)));
  add("a_transposed", p.a_transposed, true);
  add("b_transposed", p.b_transposed, true);
  add("activation", p.activation != kIdentity, std::string(activation_name(p.activation)));
  add("bias", p.bias, true);
  add("gated", p.gated, true);
  add("gradient", p.gradient, true);
  add("gated_gradient", p.gated_gradient, true);
  add("weighted", p.weighted, true);
  add("sums_two", p.sums_two, true);
  add("preactivation", p.preactivation, true);
  add("residual", p.residual, true);
  add("out_padded", p.out_padded, true);
  add("unaligned", !unaligned_text(p).empty(), unaligned_text(p));
  return fields;
}

bool GemmFamily::covers(const Problem& planned, const Problem& given) {
  // A kernel that does not need a property takes tensors with and without it.
  Problem asked = given;
  asked.a_aligned &= planned.a_aligned;
  asked.b_aligned &= planned.b_aligned;
  asked.out_aligned &= planned.out_aligned;
  asked.epilogue_aligned &= planned.epilogue_aligned;
  asked.tensor_maps &= planned.tensor_maps;
  asked.out_padded &= planned.out_padded;
  return asked == planned;
}

std::string GemmFamily::difference(const Problem& planned, const Problem& given) {
  std::string text;
  const auto compare = [&](const char* what, const auto& was, const auto& is) {
    if (was != is) text += format("{}{} is {}, not {}", text.empty() ? "" : "; ", what, is, was);
  };
  const auto needs = [&](const char* what, bool was, bool is) {
    if (was && !is) text += format("{}{}", text.empty() ? "" : "; ", what);
  };
  compare("dtype", std::string(name_of(planned.dtype)), std::string(name_of(given.dtype)));
  compare("out's dtype", std::string(name_of(planned.out_dtype)), std::string(name_of(given.out_dtype)));
  compare("M", planned.m, given.m);
  compare("N", planned.n, given.n);
  compare("K", planned.k, given.k);
  compare("groups", planned.groups, given.groups);
  compare("grouping", std::string(grouping_name(planned)), std::string(grouping_name(given)));
  compare("out padded", planned.out_padded, given.out_padded);
  compare("A transposed", planned.a_transposed, given.a_transposed);
  compare("B transposed", planned.b_transposed, given.b_transposed);
  compare("activation", std::string(activation_name(planned.activation)),
          std::string(activation_name(given.activation)));
  compare("bias given", planned.bias, given.bias);
  compare("gate given", planned.gated, given.gated);
  compare("saved given", planned.gradient, given.gradient);
  compare("preactivation given", planned.preactivation, given.preactivation);
  compare("residual given", planned.residual, given.residual);
  compare("gradient of a gated pair", planned.gated_gradient, given.gated_gradient);
  compare("rows with weights", planned.weighted, given.weighted);
  compare("two products", planned.sums_two, given.sums_two);
  needs("a has rows that do not start at multiples of 16 bytes", planned.a_aligned, given.a_aligned);
  needs("b or gate has rows that do not start at multiples of 16 bytes", planned.b_aligned, given.b_aligned);
  needs("out has rows that do not start at multiples of 16 bytes", planned.out_aligned, given.out_aligned);
  needs("a tensor of the epilogue has rows that do not start at multiples of 16 bytes", planned.epilogue_aligned,
        given.epilogue_aligned);
  needs("a stride is 0 or too large", planned.tensor_maps, given.tensor_maps);
  return text;
}

namespace {

// The exponent of the nearest power of two, by ratio.
int bucket(std::int64_t size) {
  if (size <= 1) return 0;
  const int floor = std::bit_width(static_cast<std::uint64_t>(size)) - 1;
  const double power = static_cast<double>(std::int64_t{1} << floor);
  return floor + (static_cast<double>(size) > power * 1.41421356 ? 1 : 0);
}

}  // namespace

// E.g. "gemm_dense bf16 bf16 tn bias silu m2^15 n1376 k2^9 many". m and k: the nearest power of two; n by itself, since
// the width of a tile is chosen for it. many: there are at least as many tiles of 128 x 256 as multiprocessors.
std::string GemmFamily::tuning_class(const Problem& p, int multiprocessors) {
  constexpr std::int64_t kRows = 128, kColumns = 256;
  const std::int64_t layers = out_has_layers(p.grouping) ? p.groups : 1;
  const std::int64_t tiles = saturating_product(ceil_div(p.m, kRows), ceil_div(p.n, kColumns), layers);
  const std::string unaligned = unaligned_text(p);
  const std::string groups =
      p.op == GemmOp::kGrouped ? format(" {} g2^{}", grouping_name(p), bucket(p.groups)) : std::string();
  return format("{}{} {} {} {}{}{}{} m2^{} n{} k2^{} {}{}", name_of(p.op), groups, name_of(p.dtype),
                name_of(p.out_dtype), p.a_transposed ? 't' : 'n', p.b_transposed ? 't' : 'n',
                p.sums_two ? " two products" : "", epilogue_text(p) + (p.out_padded ? " padded" : ""), bucket(p.m), p.n,
                bucket(p.k), tiles >= multiprocessors ? "many" : "few",
                unaligned.empty() ? "" : " unaligned " + unaligned);
}

std::vector<jit::KernelInstance> GemmFamily::shared_steps(const engine::Device& device) {
  GemmProblem p;
  p.dtype = p.out_dtype = device.compute < 80 ? DType::kFloat16 : DType::kBFloat16;
  p.n = 8;
  p.bias = p.preactivation = p.residual = true;
  p.activation = kGeluErf;
  std::vector<jit::KernelInstance> steps = {gemm::instance_of(gemm::reduce_config(p, false)),
                                            gemm::instance_of(gemm::pad_config())};
  if (device.compute >= 90) {
    steps.push_back(gemm::instance_of(gemm::reduce_config(p, true)));
    steps.push_back(gemm::instance_of(gemm::reduce_config(p, false, true)));
  }
  return steps;
}

}  // namespace tessera
