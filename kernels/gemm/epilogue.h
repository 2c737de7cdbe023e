// What happens to a product before it is stored, as host and kernels see it.
//
//   x = A B + bias                                   stored as `preactivation` if wanted
//   y = f(x), or x f'(saved), or x f(A gate + gate_bias)
//   out = y + residual
//
// Or, backward through a gated pair hidden = saved f(saved_gate), where A B is the gradient of hidden and w the weight of its
// row (1 if rows have none):
//
//   out = w A B f(saved_gate)    out_gate = w A B saved f'(saved_gate)    hidden = w saved f(saved_gate)
//   row_dots = sum(A B hidden / w)                   the gradient of w, by parts of kDotColumns columns
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
constexpr int kStagedPreactivation = 3;  // gated: and the gate's
constexpr int kStagedPair = 4;           // saved and saved_gate

constexpr int kDotColumns = 64;  // of a part of row_dots

// The part of a Config that an epilogue is instantiated for.
struct GemmEpilogueConfig {
  DType dtype;  // of bias, saved and preactivation
  DType out_dtype;
  int activation;
  bool bias;
  bool gated;
  bool gradient;        // times f'(saved) instead of f
  bool gated_gradient;  // backward through a gated pair
  bool weighted;        // whose rows have weights
  bool preactivation;
  bool residual;
  bool pairs;    // N is even, and bias and all rows of these matrices start at multiples of 16 bytes
  bool grouped;  // matrices and vectors may have a layer per group
};
template <class Config>
constexpr GemmEpilogueConfig epilogue_of(const Config& config) {
  bool grouped = false;
  if constexpr (requires { config.grouping; }) grouped = config.grouping != 0;
  bool gated_gradient = false, weighted = false;
  if constexpr (requires { config.gated_gradient; }) {
    gated_gradient = config.gated_gradient;
    weighted = config.weighted;
  }
  return {config.dtype,   config.out_dtype, config.activation,    config.bias,     config.gated, config.gradient,
          gated_gradient, weighted,         config.preactivation, config.residual, config.pairs, grouped};
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

// Additional matrices of a gated product that stores its preactivations, and of the gradient of a gated pair.
struct GemmPairParams {
  GemmMatrix gate_preactivation;  // [M, N], written: of a gated product
  GemmMatrix out_gate;            // [M, N], written: of the gradient, as are the following
  GemmMatrix hidden;              // [M, N], written unless it is null
  const float* row_weights;       // [M], read if weighted
  float* row_dots;                // [M, dot_parts], written if weighted
  int dot_parts;
};

}  // namespace tessera
