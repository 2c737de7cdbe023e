// What the GPU kernels' host files share: refusals, the epilogue's part of Config and Params, partial sums.
#pragma once

#include <algorithm>
#include <optional>
#include <string>

#include "base/arithmetic.h"
#include "engine/device.h"
#include "gemm/problem.h"

namespace tessera::gemm {

using engine::Device;

// What every GPU kernel requires of a problem.
std::optional<std::string> gpu_refuses(const GemmProblem& problem, const Device& device);

// Refuses what only recipes ask for, for kernels that do not implement it.
inline std::optional<std::string> refuses_recipe_features(const GemmProblem& p) {
  if (p.sums_two) return "computes no sum of two products";
  if (p.gated_gradient) return "has no gradient of a gated pair";
  if (p.gated && p.preactivation) return "stores no preactivations of a gated product";
  return std::nullopt;
}

// The fields of a Config that are the problem's.
template <class Config>
void set_epilogue(const GemmProblem& p, Config& config) {
  config.dtype = p.dtype;
  config.out_dtype = p.out_dtype;
  config.activation = p.activation;
  config.bias = p.bias;
  config.gated = p.gated;
  config.gradient = p.gradient;
  if constexpr (requires { config.gated_gradient; }) {
    config.gated_gradient = p.gated_gradient;
    config.weighted = p.weighted;
  }
  config.preactivation = p.preactivation;
  config.residual = p.residual;
  config.pairs = p.n % 2 == 0 && p.epilogue_aligned && p.out_aligned;
}

GemmEpilogueParams epilogue_params(const GemmArgs& args);
inline GemmMatrix matrix_of(const GemmView& view) { return {view.data, view.row_stride, view.group_stride}; }

// Partial sums of a split product: [splits, M, stride] fp32, rows at multiples of 16 bytes.
inline std::int64_t partial_stride(const GemmProblem& p) { return ceil_div(p.n, 4) * 4; }
std::size_t partial_bytes(const GemmProblem& problem, int splits);

// A workspace is cut into parts of multiples of 256 bytes.
inline std::size_t rounded_part(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// Microseconds to move bytes, beside a launch: what a shared step costs.
double step_time(double bytes);

// "silu_bias": the epilogue in an instance's name, with an underscore before it; empty if there is none.
std::string epilogue_suffix(const GemmEpilogueConfig& config);

// "_ragged_rows": the grouping in an instance's name.
const char* grouping_suffix(int grouping);

// By which K is divided on average.
inline std::int64_t groups_of_terms(const GemmProblem& p) {
  return p.grouping == kRaggedSums ? std::max<std::int64_t>(p.groups, 1) : 1;
}

// A representative problem for the compile gate, in the most common type on the device.
GemmProblem representative(const Device& device, std::int64_t m, std::int64_t n, std::int64_t k);

}  // namespace tessera::gemm
