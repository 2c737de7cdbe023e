#include "gemm/gpu.h"

#include <climits>

#include "base/format.h"

namespace tessera::gemm {

std::optional<std::string> gpu_refuses(const GemmProblem& p, const Device& device) {
  constexpr std::int64_t kEnd = INT_MAX - 1024;  // room for a tile beyond the edge
  if (device.is_cpu()) return "runs on GPUs; the tensors are on the CPU";
  if (p.dtype == DType::kFloat32) return "takes fp16 and bf16, not fp32";
  if (p.dtype == DType::kBFloat16 && device.compute < 80) return "bf16 needs sm_80 or newer";
  if (p.m > kEnd || p.n > kEnd || p.k > kEnd || p.groups > kEnd) return "M, N, K and groups are below 2^31 - 1024";
  return std::nullopt;
}

GemmEpilogueParams epilogue_params(const GemmArgs& args) {
  return {args.bias.data,        args.gate_bias.data,           args.bias.group_stride,   args.gate_bias.group_stride,
          matrix_of(args.saved), matrix_of(args.preactivation), matrix_of(args.residual), matrix_of(args.out)};
}

std::size_t partial_bytes(const GemmProblem& p, int splits) {
  return static_cast<std::size_t>(saturating_product(p.m, partial_stride(p), std::int64_t{splits} * 4));
}

double step_time(double bytes) {
  constexpr double kLaunch = 2.0, kBytesPerMicrosecond = 2.5e6;
  return kLaunch + bytes / kBytesPerMicrosecond;
}

std::string epilogue_suffix(const GemmEpilogueConfig& c) {
  std::string text;
  if (c.bias) text += "_bias";
  if (c.activation != kIdentity || c.gated || c.gradient || c.gated_gradient) {
    text += format("_{}", activation_name(c.activation));
  }
  if (c.gradient) text += "_gradient";
  if (c.gated_gradient) text += "_gated_gradient";
  if (c.weighted) text += "_weighted";
  if (c.gated) text += "_gated";
  if (c.preactivation) text += "_preactivation";
  if (c.residual) text += "_residual";
  return text;
}

const char* grouping_suffix(int grouping) {
  return grouping == kBatched      ? "_batched"
         : grouping == kRaggedRows ? "_ragged_rows"
         : grouping == kRaggedSums ? "_ragged_sums"
                                   : "";
}

GemmProblem representative(const Device& device, std::int64_t m, std::int64_t n, std::int64_t k) {
  GemmProblem p;
  p.dtype = p.out_dtype = device.compute < 80 ? DType::kFloat16 : DType::kBFloat16;
  p.m = m;
  p.n = n;
  p.k = k;
  return p;
}

}  // namespace tessera::gemm
