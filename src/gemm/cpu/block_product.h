// Products of blocks of fp32 in registers: the inner loops of the CPU backend, compiled for every x86 level that the
// library knows.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace tessera::gemm::cpu_backend {

// Operands are packed into panels: [panel][k][width] floats, width rows of A or columns of B each. Missing rows of the
// last panel are zeros.
struct BlockOps {
  int rows;     // width of a panel of A
  int columns;  // width of a panel of B
  // values: of type dtype. by_k: element (i, k) is values[i * stride + k], else values[k * stride + i].
  void (*pack)(DType dtype, const void* values, std::int64_t stride, bool by_k, std::int64_t count, std::int64_t k,
               int width, float* packed);
  // result [a_panels * rows, b_panels * columns] = or += A B; stride: of the result's rows.
  void (*multiply)(const float* a, const float* b, float* result, std::int64_t stride, std::int64_t a_panels,
                   std::int64_t b_panels, std::int64_t k, bool adds);
};

// For this CPU; null if it is too old.
const BlockOps* block_ops();

}  // namespace tessera::gemm::cpu_backend
