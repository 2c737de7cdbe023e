// The negative log-likelihood of Gaussian mixtures, and its gradient in the same pass. A row has K components of (logit,
// mu, log sigma). Entry point: loss_gmm_nll, below.
//
//   z = (target - mu) / sigma        a = logit - z^2 / 2 - log sigma
//   loss = LSE(logit) - LSE(a) + log(2 pi) / 2
//   dlogit = softmax(logit) - r      dmu = -r z / sigma      dlog sigma = r (1 - z^2)      r = softmax(a)
//
// 1 / sigma is at most e^87, |z| at most 2^60, and gradients at most the largest number of their type, so finite inputs
// give finite results.
//
// `lanes` lanes share a row, so that a warp reads consecutive addresses, and each holds its components in registers. A
// row's maxima and sums are exchanged by shuffles. Losses are summed in a fixed order: by each thread over its rows, by the
// CTA over its threads, and by loss/sum_partials.cuh over CTAs.
#pragma once

#include "loss/gmm_nll_config.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <DType dtype>
__forceinline__ float load_loss_element(const void* data, Index at, bool wanted) {
  if constexpr (dtype == DType::kFloat32) {
    return load_read_only(static_cast<const float*>(data) + at, wanted);
  } else {
    return to_float<dtype>(load_read_only(static_cast<const Bits16*>(data) + at, wanted));
  }
}

// x within +-most; NaN stays NaN.
__forceinline__ float limited(float x, float most) { return x > most ? most : x < -most ? -most : x; }

// Limits the value to the type's finite numbers.
template <DType dtype>
__forceinline__ void store_loss_element(void* data, Index at, float value) {
  constexpr float kLargest = dtype == DType::kFloat32   ? 3.4028234663852886e38f
                             : dtype == DType::kFloat16 ? 65504.0f
                                                        : 3.3895313892515355e38f;
  value = limited(value, kLargest);
  if constexpr (dtype == DType::kFloat32) {
    static_cast<float*>(data)[at] = value;
  } else {
    static_cast<Bits16*>(data)[at] = from_float<dtype>(value);
  }
}

template <int kLanes>
__forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
  return x;
}
template <int kLanes>
__forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

template <LossGmmNllConfig config>
__forceinline__ void loss_gmm_nll(const LossGmmNllParams& p) {
  constexpr int kRows = kLossGmmNllThreads / config.lanes;  // per CTA, at a time
  constexpr float kMostPrecision = 87.0f;                   // -log sigma
  constexpr float kMostZ = 1152921504606846976.0f;          // 2^60
  constexpr float kLargest = 3.4028234663852886e38f;
  constexpr float kHalfLog2Pi = 0.9189385332046727f;
  const int lane = static_cast<int>(threadIdx.x) % config.lanes;
  pdl_wait_and_launch_dependents();

  float sum = 0;
  for (Index first = static_cast<Index>(blockIdx.x) * kRows; first < p.rows;
       first += static_cast<Index>(gridDim.x) * kRows) {
    const Index row = first + static_cast<int>(threadIdx.x) / config.lanes;
    const bool wanted = row < p.rows;
    const float target = load_loss_element<config.target_dtype>(p.target, row * p.target_stride, wanted);
    float logit[config.components], mu[config.components], log_sigma[config.components];
#pragma unroll
    for (int i = 0; i < config.components; ++i) {
      const int k = lane + i * config.lanes;
      const Index at = row * p.row_stride + k * p.component_stride;
      const bool here = wanted && k < p.components;
      logit[i] = load_loss_element<config.dtype>(p.params, at, here);
      mu[i] = load_loss_element<config.dtype>(p.params, at + 1, here);
      log_sigma[i] = load_loss_element<config.dtype>(p.params, at + 2, here);
    }

    float z[config.components], precision[config.components], a[config.components];
    float logit_max = -kLargest, a_max = -kLargest;
#pragma unroll
    for (int i = 0; i < config.components; ++i) {
      precision[i] = expf(-log_sigma[i] > kMostPrecision ? kMostPrecision : -log_sigma[i]);
      z[i] = limited(limited(target - mu[i], kLargest) * precision[i], kMostZ);
      a[i] = logit[i] - 0.5f * z[i] * z[i] - log_sigma[i];
      if (lane + i * config.lanes >= p.components) continue;
      logit_max = fmaxf(logit_max, logit[i]);
      a_max = fmaxf(a_max, a[i]);
    }
    logit_max = lanes_max<config.lanes>(logit_max);
    a_max = lanes_max<config.lanes>(a_max);
    float logit_sum = 0, a_sum = 0;
#pragma unroll
    for (int i = 0; i < config.components; ++i) {
      const bool here = lane + i * config.lanes < p.components;
      logit[i] = here ? expf(logit[i] - logit_max) : 0.0f;
      a[i] = here ? expf(a[i] - a_max) : 0.0f;
      logit_sum += logit[i];
      a_sum += a[i];
    }
    logit_sum = lanes_sum<config.lanes>(logit_sum);
    a_sum = lanes_sum<config.lanes>(a_sum);

    const float loss = (logit_max - a_max) + (logf(logit_sum) - logf(a_sum)) + kHalfLog2Pi;
    if (lane == 0 && wanted) {
      if constexpr (config.reduced) {
        sum += loss * p.scale;
      } else {
        p.out[row] = loss;
      }
    }
    if constexpr (config.gradient) {
      const float per_logit = 1.0f / logit_sum, per_a = 1.0f / a_sum;
#pragma unroll
      for (int i = 0; i < config.components; ++i) {
        const int k = lane + i * config.lanes;
        if (!wanted || k >= p.components) continue;
        const float r = a[i] * per_a;
        const Index at = row * p.drow_stride + k * p.dcomponent_stride;
        store_loss_element<config.dtype>(p.dparams, at, logit[i] * per_logit - r);
        store_loss_element<config.dtype>(p.dparams, at + 1, -(r * z[i]) * precision[i]);
        store_loss_element<config.dtype>(p.dparams, at + 2, r * (1.0f - z[i] * z[i]));
      }
    }
  }

  if constexpr (config.reduced) {
    constexpr int kWarps = kLossGmmNllThreads / 32;
    __shared__ float sums[kWarps];
    sum = lanes_sum<32>(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
#pragma unroll
    for (int i = 1; i < kWarps; ++i) sum += sums[i];
    p.out[blockIdx.x] = sum;
  }
}

}  // namespace tessera
