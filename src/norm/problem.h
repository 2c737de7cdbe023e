// What is asked of a norm or a rotary embedding, as plain values. check.cc checks the caller's tensors and fills these;
// every backend, the selector and `explain` read them and nothing else.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace tessera {

enum class NormOp : std::uint8_t { kForward, kBackward, kRotary };

constexpr const char* name_of(NormOp op) {
  return op == NormOp::kForward ? "norm_forward" : op == NormOp::kBackward ? "norm_backward" : "norm_rotary";
}

// tessera/norm.h says what each op computes.
struct NormProblem {
  NormOp op = NormOp::kForward;
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;     // rotary: B S H
  std::int64_t columns = 0;  // rotary: D

  bool centered = false;    // LayerNorm
  bool residual = false;    // forward: residual and sum; backward: dsum
  bool weight = false;      // is given
  bool bias = false;        // forward: is given
  bool statistics = false;  // forward: rstd, and LayerNorm's mean, are written
  bool parameters = false;  // backward: dweight or dbias is wanted

  // Rotary.
  std::int64_t batch = 0, seq = 0, heads = 0;
  std::int64_t rotated = 0;             // R
  DType table_dtype = DType::kFloat32;  // dtype or fp32
  bool interleaved = false;
  bool inverse = false;
  bool positions = false;  // are given

  bool aligned = true;  // GPU: rows and vectors start at multiples of 16 bytes, and are such a multiple long

  bool operator==(const NormProblem&) const = default;
};

// A vector, or rows with a contiguous last dim. Strides count elements; rotary has three of them.
struct NormView {
  void* data = nullptr;
  std::int64_t row_stride = 0;    // rotary: from token to token
  std::int64_t batch_stride = 0;  // rotary
  std::int64_t head_stride = 0;   // rotary
};

// Views are null if not given.
struct NormArgs {
  NormProblem problem;
  NormView x, residual, dout, dsum;  // read
  NormView out, sum, dx;             // written
  NormView weight, bias;             // read
  NormView dweight, dbias;           // written
  NormView rstd, mean;               // fp32; written by the forward, read by the backward
  NormView cos, sin;                 // [table_rows, R / 2]
  NormView positions;                // int32 [B, S]; row_stride: from token to token
  std::int64_t table_rows = 0;
  float eps = 0;
};

}  // namespace tessera
