// What is asked of a GEMM, as plain values. check.cc checks the caller's tensors and fills these; every backend, the
// selector and `explain` read them and nothing else.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "gemm/epilogue.h"

namespace tessera {

enum class GemmOp : std::uint8_t { kDense };

constexpr const char* name_of(GemmOp) { return "gemm_dense"; }

// out = epilogue(A B), with A [M, K] and B [K, N]; gemm/epilogue.h says what an epilogue is.
struct GemmProblem {
  GemmOp op = GemmOp::kDense;
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;  // dtype or fp32

  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  bool a_transposed = false;  // a is stored as [K, M]
  bool b_transposed = false;  // b, and the gate, are stored as [K, N], else as [N, K]

  int activation = kIdentity;
  bool bias = false;
  bool gated = false;
  bool gradient = false;       // times f'(saved)
  bool preactivation = false;  // is written, too
  bool residual = false;

  // GPU: rows start at multiples of 16 bytes.
  bool a_aligned = true;
  bool b_aligned = true;  // and those of the gate
  bool out_aligned = true;
  bool epilogue_aligned = true;  // all that the epilogue reads and writes beside out, vectors included
  bool tensor_maps = true;       // the strides of all matrices are positive and below 2^36 elements

  bool operator==(const GemmProblem&) const = default;
};

const char* activation_name(int activation);  // "none", "relu", ...

// A vector or a row-major matrix with a contiguous last dim; the stride counts elements.
struct GemmView {
  void* data = nullptr;
  std::int64_t row_stride = 0;
};

struct GemmArgs {
  GemmProblem problem;
  GemmView a, b, gate;       // read
  GemmView out;              // written
  GemmView bias, gate_bias;  // read; null if not given, as are the following
  GemmView saved, residual;  // read
  GemmView preactivation;    // written
};

}  // namespace tessera
