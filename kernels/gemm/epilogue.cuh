// Activations and their derivatives, and the epilogue of one element (gemm/epilogue.h). All of it is fp32.
#pragma once

#include "gemm/epilogue.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"

namespace tessera {

__forceinline__ float sigmoid(float x) { return fast_reciprocal(1.0f + fast_exp2(-kLog2E * x)); }

constexpr float kGeluScale = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

// 0.5 x (1 + tanh(u)) = x sigmoid(2 u), with the cubic u of the tanh form of GELU.
__forceinline__ float gelu_argument(float x) { return 2.0f * kGeluScale * (x + kGeluCubic * x * x * x); }

// A NaN stays NaN, and a finite argument gives a finite value.
template <int activation>
__forceinline__ float activate(float x) {
  if constexpr (activation == kRelu) return x < 0.0f ? 0.0f : x;
  if constexpr (activation == kSilu) return x * sigmoid(x);
  if constexpr (activation == kGeluTanh) return x * sigmoid(gelu_argument(x));
  if constexpr (activation == kGeluErf) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
  return x;
}

template <int activation>
__forceinline__ float activation_derivative(float x) {
  if constexpr (activation == kRelu) return x > 0.0f ? 1.0f : 0.0f;
  if constexpr (activation == kSilu) {
    const float s = sigmoid(x);
    return s + x * s * (1.0f - s);
  }
  if constexpr (activation == kGeluTanh) {
    // Beyond 10 the sigmoid is 0 or 1 and its slope 0; the square of a large x would overflow.
    const float c = fminf(fmaxf(x, -10.0f), 10.0f);
    const float s = sigmoid(gelu_argument(c));
    return s + c * s * (1.0f - s) * 2.0f * kGeluScale * (1.0f + 3.0f * kGeluCubic * c * c);
  }
  if constexpr (activation == kGeluErf) {
    const float density = 0.3989422804014327f * fast_exp2(-0.5f * kLog2E * x * x);
    return 0.5f + 0.5f * erff(x * 0.7071067811865476f) + x * density;
  }
  return 1.0f;
}

// Elements (row, column) and (row, column + 1) of a matrix, or of a vector if row is 0; 0 for those that do not exist.
// pairs: both exist or neither does, and they can be accessed at once.
template <DType dtype, bool pairs>
__forceinline__ void load_pair(float (&v)[2], const void* data, Index at, bool first, bool second) {
  v[0] = v[1] = 0.0f;
  if constexpr (dtype == DType::kFloat32) {
    const float* from = static_cast<const float*>(data) + at;
    if constexpr (pairs) {
      if (first) {
        const float2 both = *reinterpret_cast<const float2*>(from);
        v[0] = both.x, v[1] = both.y;
      }
    } else {
      if (first) v[0] = from[0];
      if (second) v[1] = from[1];
    }
  } else {
    const Bits16* from = static_cast<const Bits16*>(data) + at;
    if constexpr (pairs) {
      const unsigned both = first ? *reinterpret_cast<const unsigned*>(from) : 0u;
      v[0] = low_to_float<dtype>(both), v[1] = high_to_float<dtype>(both);
    } else {
      if (first) v[0] = to_float<dtype>(from[0]);
      if (second) v[1] = to_float<dtype>(from[1]);
    }
  }
}
template <DType dtype, bool pairs>
__forceinline__ void store_pair(void* data, Index at, float v0, float v1, bool first, bool second) {
  if constexpr (dtype == DType::kFloat32) {
    float* to = static_cast<float*>(data) + at;
    if constexpr (pairs) {
      if (first) *reinterpret_cast<float2*>(to) = float2{v0, v1};
    } else {
      if (first) to[0] = v0;
      if (second) to[1] = v1;
    }
  } else {
    Bits16* to = static_cast<Bits16*>(data) + at;
    if constexpr (pairs) {
      if (first) *reinterpret_cast<unsigned*>(to) = pack<dtype>(v0, v1);
    } else {
      if (first) to[0] = from_float<dtype>(v0);
      if (second) to[1] = from_float<dtype>(v1);
    }
  }
}

// The epilogue of a lane's part of an accumulator tile (ptx/mma.cuh): columns `column` and the next in rows[0] (values 0
// and 1) and in rows[1] (values 2 and 3). Rows from `m` on and columns from `n` on or below 0 do not exist.
template <GemmEpilogueConfig config>
struct GemmEpilogue {
  const GemmEpilogueParams& p;
  int m, n;
  int group = 0;

  __forceinline__ Index element(const GemmMatrix& matrix, Index row, int column) const {
    return row * matrix.row_stride + column + (config.grouped ? group * matrix.group_stride : 0);
  }

  // x: A B, replaced by the result. gate: A times the gate, if gated, to which its bias is added. stores: the result is stored
  // from here, by plain stores. staged (kStagedNone, ...): the matrix whose elements of this tile the caller has loaded into
  // `extra`, or will store from there.
  template <bool stores, int staged>
  __forceinline__ void apply(float (&x)[4], float (&gate)[4], float (&extra)[4], const int (&rows)[2],
                             int column) const {
    const bool first = static_cast<unsigned>(column) < static_cast<unsigned>(n);
    const bool second = static_cast<unsigned>(column + 1) < static_cast<unsigned>(n);
    float bias[2] = {}, gate_bias[2] = {};
    if constexpr (config.bias) {
      const Index at = column + (config.grouped ? group * p.bias_group_stride : 0);
      load_pair<config.dtype, config.pairs>(bias, p.bias, at, first, second);
    }
    if constexpr (config.bias && config.gated) {
      const Index at = column + (config.grouped ? group * p.gate_bias_group_stride : 0);
      load_pair<config.dtype, config.pairs>(gate_bias, p.gate_bias, at, first, second);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Index row = rows[half];
      const bool exists = rows[half] < m;
      float(&y)[2] = reinterpret_cast<float(&)[2]>(x[half * 2]);
      float(&own)[2] = reinterpret_cast<float(&)[2]>(extra[half * 2]);
      float saved[2] = {own[0], own[1]}, residual[2] = {own[0], own[1]};
      if constexpr (config.gradient && staged != kStagedSaved) {
        load_pair<config.dtype, config.pairs>(saved, p.saved.data, element(p.saved, row, column), exists && first,
                                              exists && second);
      }
      if constexpr (config.residual && staged != kStagedResidual) {
        load_pair<config.out_dtype, config.pairs>(residual, p.residual.data, element(p.residual, row, column),
                                                  exists && first, exists && second);
      }
      if constexpr (config.bias) y[0] += bias[0], y[1] += bias[1];
      if constexpr (config.preactivation && staged == kStagedPreactivation) {
        own[0] = y[0], own[1] = y[1];
      } else if constexpr (config.preactivation) {
        store_pair<config.dtype, config.pairs>(p.preactivation.data, element(p.preactivation, row, column), y[0], y[1],
                                               exists && first, exists && second);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (config.gradient) {
          y[i] *= activation_derivative<config.activation>(saved[i]);
        } else if constexpr (config.gated) {
          if constexpr (config.bias) gate[half * 2 + i] += gate_bias[i];
          y[i] *= activate<config.activation>(gate[half * 2 + i]);
        } else {
          y[i] = activate<config.activation>(y[i]);
        }
        if constexpr (config.residual) y[i] += residual[i];
      }
      if constexpr (stores) {
        store_pair<config.out_dtype, config.pairs>(p.out.data, element(p.out, row, column), y[0], y[1], exists && first,
                                                   exists && second);
      }
    }
  }
  // With plain loads and stores alone.
  __forceinline__ void apply(float (&x)[4], float (&gate)[4], const int (&rows)[2], int column) const {
    float none[4] = {};
    apply<true, kStagedNone>(x, gate, none, rows, column);
  }
};

// Backward through a gated pair, of a lane's part of an accumulator tile. x: A B, replaced by out. saved, by hidden. gate:
// saved_gate, replaced by out_gate. weight, dot: of the lane's two rows.
template <GemmEpilogueConfig config>
__forceinline__ void apply_gated_gradient(float (&x)[4], float (&saved)[4], float (&gate)[4], const float (&weight)[2],
                                          float (&dot)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float f = activate<config.activation>(gate[i]);
    const float slope = activation_derivative<config.activation>(gate[i]);
    const float hidden = saved[i] * f;
    const float w = config.weighted ? weight[i / 2] : 1.0f;
    if constexpr (config.weighted) dot[i / 2] += x[i] * hidden;
    const float d = w * x[i];
    gate[i] = d * saved[i] * slope;
    x[i] = d * f;
    saved[i] = w * hidden;
  }
}

}  // namespace tessera
