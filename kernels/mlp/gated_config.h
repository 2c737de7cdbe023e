// Config and Params of mlp/gated.cuh.
#pragma once

#include "gemm/epilogue.h"

namespace tessera {

struct MlpGatedConfig {
  DType dtype;
  int activation;
  bool gradient;  // else the forward
  int vector;     // elements per access: 8 (16 bytes), or 1 if a row does not start at a multiple of 16 bytes
};

template <class Visitor>
constexpr void visit_fields(const MlpGatedConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("activation", config.activation);
  visit("gradient", config.gradient);
  visit("vector", config.vector);
}

struct MlpGatedParams {
  GemmMatrix before, before_gate;    // read
  GemmMatrix hidden;                 // written; the gradient's may be null
  GemmMatrix dhidden;                // gradient: read
  GemmMatrix dbefore, dbefore_gate;  // gradient: written
  Index rows;
  int columns;
  unsigned row_chunks;  // ceil(columns / vector)
};

}  // namespace tessera
