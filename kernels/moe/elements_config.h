// Config and Params of moe/elements.cuh.
#pragma once

#include "gemm/epilogue.h"

namespace tessera {

constexpr int kMoeElementsThreads = 256;

struct MoeElementsConfig {
  DType dtype;
  int activation;
  bool gated;
  int vector;  // elements per access: 8 (16 bytes), or 1 if rows do not consist of whole, aligned chunks
};

template <class Visitor>
constexpr void visit_fields(const MoeElementsConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("activation", config.activation);
  visit("gated", config.gated);
  visit("vector", config.vector);
}

// Matrices are [rows, columns], in the order of experts.
struct MoeElementsParams {
  GemmMatrix before, before_gate;    // read; before_gate: gated
  GemmMatrix dhidden;                // read
  GemmMatrix hidden;                 // written: times the weight; may be null
  GemmMatrix dbefore, dbefore_gate;  // written
  const float* row_weights;          // [rows]
  float* row_dweights;               // [rows], written
  const int* last_row;               // [1], on the device: rows from this one on are not used
  int rows;
  int columns;
};

}  // namespace tessera
