// cuBLASLt, opened with dlopen the first time a product asks for it. The part of cublasLt.h that is used is declared in
// cublaslt.cc, since the build needs no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "cuda/driver.h"

namespace tessera::cuda {

// D = f(A B + bias), or A B + bias + C: row-major matrices with a contiguous last dim, strides in elements.
struct LtProduct {
  enum class Activation { kNone, kRelu, kGeluTanh };

  DType dtype = DType::kBFloat16;      // of A, B and the bias
  DType out_dtype = DType::kBFloat16;  // of C and D
  std::int64_t m = 0, n = 0, k = 0;
  bool a_transposed = false;  // A is [K, M]
  bool b_transposed = false;  // B is [K, N], else [N, K]
  std::int64_t a_stride = 0, b_stride = 0, c_stride = 0, out_stride = 0;
  unsigned a_alignment = 16, b_alignment = 16;  // bytes, of the rows
  unsigned out_alignment = 16;                  // of those of D and C, and of the bias
  Activation activation = Activation::kNone;
  bool bias = false;
  bool residual = false;  // C
};
struct LtPointers {
  const void* a = nullptr;
  const void* b = nullptr;
  const void* bias = nullptr;
  const void* c = nullptr;
  void* out = nullptr;
};
struct LtAlgorithm {
  std::uint64_t data[8] = {};  // opaque
  std::size_t workspace = 0;   // bytes
};

// "13.0.2": its version; or TESSERA_UNSUPPORTED and why there is none: it was not found, it does not fit the driver, or
// TESSERA_NO_CUBLASLT is set to anything but 0.
Result<std::string> cublaslt_version();

// The algorithms that its heuristic names first, at most `count`, whose sums are in a fixed order. May be empty.
Result<std::vector<LtAlgorithm>> lt_algorithms(int device, const LtProduct& product, int count);

// Enqueues one product. Allocates no device memory; workspace: algorithm.workspace bytes, aligned to 256.
Status lt_enqueue(int device, const LtProduct& product, const LtPointers& pointers, const LtAlgorithm& algorithm,
                  void* workspace, CUstream stream);

}  // namespace tessera::cuda
