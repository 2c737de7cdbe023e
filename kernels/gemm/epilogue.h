// What happens to a product before it is stored, as host and kernels see it.
//
//   x = A B + bias                                   stored as `preactivation` if wanted
//   y = f(x), or x f'(saved), or x f(A gate + gate_bias)
//   out = y + residual
#pragma once

#include "tile/types.h"

namespace tessera {

// Values of Config::activation.
constexpr int kIdentity = 0;
constexpr int kRelu = 1;
constexpr int kSilu = 2;
constexpr int kGeluTanh = 3;
constexpr int kGeluErf = 4;

// Which matrix of an epilogue, beside out, passes through shared memory in boxes that TMA loads or stores.
constexpr int kStagedNone = 0;
constexpr int kStagedResidual = 1;
constexpr int kStagedSaved = 2;
constexpr int kStagedPreactivation = 3;

// The part of a Config that an epilogue is instantiated for.
struct GemmEpilogueConfig {
  DType dtype;  // of bias, saved and preactivation
  DType out_dtype;
  int activation;
  bool bias;
  bool gated;
  bool gradient;  // times f'(saved) instead of f
  bool preactivation;
  bool residual;
  bool pairs;    // N is even, and bias and all rows of these matrices start at multiples of 16 bytes
  bool grouped;  // matrices and vectors may have a layer per group
};
template <class Config>
constexpr GemmEpilogueConfig epilogue_of(const Config& config) {
  bool grouped = false;
  if constexpr (requires { config.grouping; }) grouped = config.grouping != 0;
  return {config.dtype,    config.out_dtype,     config.activation, config.bias,  config.gated,
          config.gradient, config.preactivation, config.residual,   config.pairs, grouped};
}

// A matrix with a contiguous last dim, or one per group; strides count elements.
struct GemmMatrix {
  void* data;
  Index row_stride;
  Index group_stride;
};

// Pointers that the Config does not ask for are null.
struct GemmEpilogueParams {
  const void* bias;       // [N], or one per group
  const void* gate_bias;  // likewise
  Index bias_group_stride;
  Index gate_bias_group_stride;
  GemmMatrix saved;          // [M, N]
  GemmMatrix preactivation;  // [M, N], written
  GemmMatrix residual;       // [M, N], of out's type; may be out itself
  GemmMatrix out;            // [M, N]
};

}  // namespace tessera
