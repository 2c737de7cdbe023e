// Adds the sums that the CTAs of norm/backward.cuh wrote, in a fixed order. Entry point: norm_parameter_gradients, below.
//
// A CTA has 32 columns, of the weight or (blockIdx.y = 1) of the bias. Its warps add every groups-th row, eight loads at a
// time; the first warp adds the warps' sums. The rows were just written and are in L2.
#pragma once

#include "norm/parameter_gradients_config.h"
#include "ptx/convert.cuh"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <NormParameterGradientsConfig config>
__forceinline__ void norm_parameter_gradients(const NormParameterGradientsParams& p) {
  __shared__ float sums[config.groups][32];
  const int lane = static_cast<int>(threadIdx.x) % 32, group = static_cast<int>(threadIdx.x) / 32;
  const int column = static_cast<int>(blockIdx.x) * 32 + lane;
  void* out = blockIdx.y == 0 ? p.dweight : p.dbias;
  pdl_wait_and_launch_dependents();
  if (out == nullptr) return;
  float sum = 0;
  if (column < p.columns) {
    const float* from = p.partial + static_cast<Index>(blockIdx.y) * p.columns + column;
#pragma unroll 8
    for (int part = group; part < p.parts; part += config.groups) sum += from[part * p.stride];
  }
  sums[group][lane] = sum;
  __syncthreads();
  if (group > 0 || column >= p.columns) return;
#pragma unroll
  for (int i = 1; i < config.groups; ++i) sum += sums[i][lane];
  if constexpr (config.dtype == DType::kFloat32) {
    static_cast<float*>(out)[column] = sum;
  } else {
    static_cast<Bits16*>(out)[column] = from_float<config.dtype>(sum);
  }
}

}  // namespace tessera
