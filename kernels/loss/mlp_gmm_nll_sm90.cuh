// The likelihood of Gaussian mixtures whose parameters are the result of an MLP, as the epilogue of
// mlp/narrow_sm90.cuh: a CTA has all columns of its rows, so the parameters never reach memory. loss/gmm_nll.cuh has the
// formulas. Entry point: loss_mlp_gmm_nll_sm90, below.
//
//   consumer    | ... hidden tiles ... | exchange sums | rows to shared memory | likelihood, two lanes per row | ...
//
// The sums of a consumer's 64 rows lie in wgmma's layout, in which four lanes share a row and a component's three values are
// in two of them. They go through the shared memory of x, as the exchange does.
#pragma once

#include "loss/gmm_nll.cuh"
#include "loss/mlp_gmm_nll_sm90_config.h"
#include "mlp/narrow_sm90.cuh"

namespace tessera {

// A row's loss. In: the parameters of the components lane, lane + kLanes, ... that this lane holds. All lanes of a warp call it.
template <int kLanes, int kComponents>
__forceinline__ float mixture_loss(float (&logit)[kComponents], const float (&mu)[kComponents],
                                   const float (&log_sigma)[kComponents], float target, int lane, int components) {
  constexpr float kMostPrecision = 87.0f;           // -log sigma
  constexpr float kMostZ = 1152921504606846976.0f;  // 2^60
  constexpr float kLargest = 3.4028234663852886e38f;
  constexpr float kHalfLog2Pi = 0.9189385332046727f;
  float a[kComponents];
  float logit_max = -kLargest, a_max = -kLargest;
#pragma unroll
  for (int i = 0; i < kComponents; ++i) {
    const float precision = expf(-log_sigma[i] > kMostPrecision ? kMostPrecision : -log_sigma[i]);
    const float z = limited(limited(target - mu[i], kLargest) * precision, kMostZ);
    a[i] = logit[i] - 0.5f * z * z - log_sigma[i];
    if (lane + i * kLanes >= components) continue;
    logit_max = fmaxf(logit_max, logit[i]);
    a_max = fmaxf(a_max, a[i]);
  }
  logit_max = lanes_max<kLanes>(logit_max);
  a_max = lanes_max<kLanes>(a_max);
  float logit_sum = 0, a_sum = 0;
#pragma unroll
  for (int i = 0; i < kComponents; ++i) {
    const bool here = lane + i * kLanes < components;
    logit[i] = here ? expf(logit[i] - logit_max) : 0.0f;
    a[i] = here ? expf(a[i] - a_max) : 0.0f;
    logit_sum += logit[i];
    a_sum += a[i];
  }
  logit_sum = lanes_sum<kLanes>(logit_sum);
  a_sum = lanes_sum<kLanes>(a_sum);
  return (logit_max - a_max) + (logf(logit_sum) - logf(a_sum)) + kHalfLog2Pi;
}

template <LossMlpGmmNllSm90Config config>
struct LossMlpGmmNllSm90Consumer : MlpNarrowSm90Consumer<mlp_gmm_nll_sm90::mlp_config(config)> {
  using Mlp = MlpNarrowSm90Consumer<mlp_gmm_nll_sm90::mlp_config(config)>;
  static constexpr int kLanes = mlp_gmm_nll_sm90::kLanes;
  static constexpr int kPerLane = mlp_gmm_nll_sm90::kPerLane;
  static_assert(3 * kLanes * kPerLane <= mlp_narrow_sm90::kOutColumns);
  // Floats from row to row, odd so that rows begin in different banks.
  static constexpr int kStride = mlp_narrow_sm90::kOutColumns + 1;

  const LossGmmNllParams& loss;

  __forceinline__ unsigned value_address(int row, int column) const {
    constexpr int kExchanged = 2 * Mlp::kOut * 512;
    return this->shared + Mlp::kAt.x + kExchanged + (this->consumer * 64 + row) * kStride * 4 + column * 4;
  }

  // The sums of 64 rows over both consumers, to shared memory.
  template <int own>
  __forceinline__ void add_others() {
    const int row = this->warp * 16 + this->lane / 4;
#pragma unroll
    for (int i = 0; i < Mlp::kOut; i += 4) {
      float others[4];
      load_shared_floats(others, this->exchange_address(1 - own, i));
      const int column = i / 4 * 8 + this->lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        store_shared_4(value_address(row + j / 2 * 8, column + j % 2),
                       __float_as_uint(this->out[own][i + j] + others[j]));
      }
    }
    __syncwarp();  // a warp reads the rows that it wrote
  }

  __forceinline__ void finish(int tile) {
    if (this->consumer == 0) {
      add_others<0>();
    } else {
      add_others<1>();
    }
    const int lane = this->lane % kLanes, row = this->warp * 16 + this->lane / kLanes;
    float logit[kPerLane], mu[kPerLane], log_sigma[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const unsigned at = value_address(row, 3 * (lane + i * kLanes));  // behind the last component are zeros
      logit[i] = __uint_as_float(load_shared_4(at));
      mu[i] = __uint_as_float(load_shared_4(at + 4));
      log_sigma[i] = __uint_as_float(load_shared_4(at + 8));
    }
    fence_proxy_async();  // TMA writes there next
    __syncwarp();
    if (this->lane == 0) mbarrier_arrive(this->shared + Mlp::kAt.x_empty);

    const Index at = static_cast<Index>(tile) * mlp_narrow_sm90::kBlockM + this->consumer * 64 + row;
    const bool wanted = at < loss.rows;
    const float target = load_loss_element<config.target_dtype>(loss.target, at * loss.target_stride, wanted);
    const float value = mixture_loss<kLanes, kPerLane>(logit, mu, log_sigma, target, lane, loss.components);
    if constexpr (config.reduced) {  // a sum that is kept over row tiles would cost the main loop a register
      const float sum = lanes_sum<32>(lane == 0 && wanted ? value * loss.scale : 0.0f);
      const int place = this->consumer * 4 + this->warp;
      if (this->lane == 0) loss.out[tile * mlp_gmm_nll_sm90::kSumsPerTile + place] = sum;
    } else {
      if (lane == 0 && wanted) loss.out[at] = value;
    }
  }
};

template <LossMlpGmmNllSm90Config config>
__forceinline__ void loss_mlp_gmm_nll_sm90(const LossMlpGmmNllSm90Params& p) {
  constexpr MlpNarrowSm90Config kMlp = mlp_gmm_nll_sm90::mlp_config(config);
  mlp_narrow_sm90_roles<kMlp>(p.mlp, [&](const MlpNarrowSm90Consumer<kMlp>& of_mlp) {
    LossMlpGmmNllSm90Consumer<config> consumer{of_mlp, p.loss};
    consumer.run([&](int tile) { consumer.finish(tile); });
  });
}

}  // namespace tessera
