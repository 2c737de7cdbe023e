// What is asked of a GEMM, as plain values. check.cc checks the caller's tensors and fills these; every backend, the
// selector and `explain` read them and nothing else.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "gemm/epilogue.h"
#include "gemm/groups.h"

namespace tessera {

enum class GemmOp : std::uint8_t { kDense, kGrouped };

constexpr const char* name_of(GemmOp op) { return op == GemmOp::kDense ? "gemm_dense" : "gemm_grouped"; }

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

  // kGrouped: M, or K, of all groups together if that is what is ragged, else of one.
  int grouping = kUngrouped;
  std::int64_t groups = 0;
  bool a_shared = false;  // kBatched: all groups have the same a

  int activation = kIdentity;
  bool bias = false;
  bool gated = false;
  bool gradient = false;       // times f'(saved)
  bool preactivation = false;  // is written, too
  bool residual = false;
  // Only recipes that embed a product set these; the C ABI of gemm does not. The same holds for gated with preactivation,
  // which stores both preactivations.
  bool gated_gradient = false;  // backward through a gated pair
  bool weighted = false;        // whose rows have weights
  bool sums_two = false;        // A B + A2 B2

  // GPU: rows start at multiples of 16 bytes.
  bool a_aligned = true;
  bool b_aligned = true;  // and those of the gate
  bool out_aligned = true;
  bool epilogue_aligned = true;  // all that the epilogue reads and writes beside out, vectors included
  bool tensor_maps = true;       // the strides of all matrices are positive and below 2^36 elements
  // TESSERA_GEMM_OUT_PADDED: the padding after a row of out and of the preactivation, up to the next multiple of 16 bytes, may
  // be overwritten. False if rows need none.
  bool out_padded = false;

  bool operator==(const GemmProblem&) const = default;
};

const char* activation_name(int activation);  // "none", "relu", ...

// A vector or a row-major matrix with a contiguous last dim, or one per group; strides count elements.
struct GemmView {
  void* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t group_stride = 0;
};

struct GemmArgs {
  GemmProblem problem;
  GemmView a, b, gate;                    // read
  GemmView out;                           // written
  GemmView bias, gate_bias;               // read; null if not given, as are the following
  GemmView saved, residual;               // read
  GemmView preactivation;                 // written
  const std::int32_t* offsets = nullptr;  // [groups + 1], read; null if groups are not ragged
  // Of products that only recipes ask for.
  GemmView gate_preactivation;         // written
  GemmView saved_gate;                 // read, as is saved
  GemmView out_gate, hidden;           // written; hidden unless it is null
  const float* row_weights = nullptr;  // [M], read
  float* row_dots = nullptr;           // [M, dot_parts_of], written
  GemmView a2, b2;                     // read
};

// Both matrices of a gated pair are stored, or loaded.
inline bool moves_pair(const GemmProblem& p) { return p.gated_gradient || (p.gated && p.preactivation); }
// In row_dots, for so many columns of out.
inline std::int64_t dot_parts_of(std::int64_t columns) { return (columns + kDotColumns - 1) / kDotColumns; }

}  // namespace tessera
