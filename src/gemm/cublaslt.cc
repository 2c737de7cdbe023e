// A product by cuBLASLt, if it is found (src/cuda/cublaslt.h). It offers nothing by itself: only an entry of the tuning table,
// made by a search that measured and checked it, makes it the choice, and only then is the library opened.
#include "cuda/cublaslt.h"

#include <algorithm>

#include "base/format.h"
#include "gemm/family.h"
#include "gemm/gpu.h"

namespace tessera::gemm {
namespace {

using cuda::LtAlgorithm;
using cuda::LtProduct;
using engine::Device;

constexpr int kAlgorithms = 4;  // that the tuner tries

unsigned alignment(bool aligned, DType dtype) { return aligned ? 16 : static_cast<unsigned>(size_of(dtype)); }

// Strides are the caller's, and are known when it runs; algorithms are chosen for rows without gaps but for the alignment.
LtProduct product_of(const GemmProblem& p) {
  const auto stride = [&](std::int64_t columns, bool aligned, DType dtype) {
    const auto chunk = static_cast<std::int64_t>(16 / size_of(dtype));
    return aligned ? (columns + chunk - 1) / chunk * chunk : columns;
  };
  LtProduct q;
  q.dtype = p.dtype;
  q.out_dtype = p.out_dtype;
  q.m = p.m, q.n = p.n, q.k = p.k;
  q.a_transposed = p.a_transposed;
  q.b_transposed = p.b_transposed;
  q.a_stride = stride(p.a_transposed ? p.m : p.k, p.a_aligned, p.dtype);
  q.b_stride = stride(p.b_transposed ? p.n : p.k, p.b_aligned, p.dtype);
  const bool out_aligned = p.out_aligned && p.epilogue_aligned;
  q.out_stride = q.c_stride = stride(p.n, out_aligned, p.out_dtype);
  q.a_alignment = alignment(p.a_aligned, p.dtype);
  q.b_alignment = alignment(p.b_aligned, p.dtype);
  q.out_alignment = alignment(out_aligned, p.out_dtype);
  q.activation = p.activation == kRelu       ? LtProduct::Activation::kRelu
                 : p.activation == kGeluTanh ? LtProduct::Activation::kGeluTanh
                                             : LtProduct::Activation::kNone;
  q.bias = p.bias;
  q.residual = p.residual;
  return q;
}

engine::Config named(int algorithm) {
  const auto version = cuda::cublaslt_version();
  return {{"main", {{"algorithm", static_cast<std::int64_t>(algorithm)}, {"cublaslt", version.ok() ? *version : ""}}}};
}

std::vector<LtAlgorithm> algorithms_of(const GemmProblem& p, const Device& device) {
  const auto found = cuda::lt_algorithms(device.index, product_of(p), kAlgorithms);
  return found.ok() ? *found : std::vector<LtAlgorithm>();
}

std::optional<std::string> refuses(const GemmProblem& p, const Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  if (p.grouping != kUngrouped) return "computes one product";
  if (auto reason = refuses_recipe_features(p)) return reason;
  if (p.gated || p.gradient || p.preactivation) return "has no gate, no derivative and no preactivation";
  if (p.activation == kSilu || p.activation == kGeluErf) return "has no SiLU and no exact GELU";
  if (p.residual && p.activation != kIdentity) return "adds the residual before the activation";
  if (p.bias && p.out_dtype != p.dtype) return "has a bias of the result's type only";
  if (p.m == 0 || p.n == 0 || p.k == 0) return "there is nothing to multiply";
  if (!p.tensor_maps) return "needs positive strides";
  if (device.index < 0) return "is asked on a GPU that runs its own code only";
  return std::nullopt;
}

std::vector<engine::Offer> offers(const GemmProblem&, const Device&) { return {}; }

Status enqueue(const LtProduct& planned, const LtAlgorithm& algorithm, int device, const GemmArgs& args,
               const engine::Launch& launch) {
  LtProduct q = planned;
  const auto overlap = [](std::int64_t rows, std::int64_t columns, std::int64_t stride) {
    return rows > 1 && stride < columns;
  };
  const bool a_transposed = planned.a_transposed, b_transposed = planned.b_transposed;
  if (overlap(a_transposed ? q.k : q.m, a_transposed ? q.m : q.k, args.a.row_stride) ||
      overlap(b_transposed ? q.k : q.n, b_transposed ? q.n : q.k, args.b.row_stride) ||
      (q.residual && overlap(q.m, q.n, args.residual.row_stride))) {
    return Status(TESSERA_UNSUPPORTED, "gemm_cublaslt, tuned for this product, does not take rows that overlap");
  }
  q.a_stride = args.a.row_stride;
  q.b_stride = args.b.row_stride;
  q.out_stride = args.out.row_stride;
  q.c_stride = args.residual.row_stride;
  return cuda::lt_enqueue(device, q, {args.a.data, args.b.data, args.bias.data, args.residual.data, args.out.data},
                          algorithm, launch.workspace, launch.stream);
}

std::optional<Recipe> recipe(const GemmProblem& p, const Device& device, const engine::Config& config) {
  const std::vector<LtAlgorithm> found = algorithms_of(p, device);
  for (int i = 0; i < static_cast<int>(found.size()); ++i) {
    if (named(i) != config) continue;
    const LtAlgorithm& algorithm = found[static_cast<std::size_t>(i)];
    Recipe recipe;
    recipe.problem = p;
    recipe.steps = {{"main", std::nullopt}};
    recipe.workspace = algorithm.workspace;
    recipe.enqueue = [q = product_of(p), algorithm, index = device.index](const GemmArgs& args,
                                                                          const engine::Launch& launch) {
      return enqueue(q, algorithm, index, args, launch);
    };
    return recipe;
  }
  return std::nullopt;
}

std::vector<engine::Config> searches(const GemmProblem& p, const Device& device) {
  std::vector<engine::Config> list;
  const auto count = static_cast<int>(algorithms_of(p, device).size());
  for (int i = 0; i < count; ++i) list.push_back(named(i));
  return list;
}

}  // namespace

Implementation cublaslt() {
  return {"gemm_cublaslt", GemmFamily::bit_of(GemmOp::kDense), {}, refuses, offers, recipe, searches, nullptr};
}

}  // namespace tessera::gemm
