// mma.sync: warp-wide matrix products of 16-bit operands with fp32 accumulators, D[16, 8] += A[16, k] B[k, 8].
//
// Lane l holds, with g = l / 4 and t = l % 4:
//   A: word 0 = (row g, k 2t..2t+1), word 1 = (row g + 8, same k); words 2 and 3 the same for k + 8
//   B: word 0 = (k 2t..2t+1, column g); word 1 the same for k + 8
//   D: values 0, 1 = (row g, columns 2t, 2t+1); values 2, 3 = (row g + 8, same columns)
// D has the layout of A's halves, so one product's result can be the next product's A operand without leaving
// registers.
#pragma once

#include "tile/types.h"

namespace tessera {

// D = A B + C.
template <DType dtype>
__forceinline__ void mma_k8(float (&d)[4], unsigned a0, unsigned a1, unsigned b0, const float (&c)[4]) {
  if constexpr (dtype == DType::kFloat16) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(b0), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
}

template <DType dtype>
__forceinline__ void mma_k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, const float (&c)[4]) {
#if __CUDA_ARCH__ >= 800
  if constexpr (dtype == DType::kFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
#else
  mma_k8<dtype>(d, a[0], a[1], b0, c);
  mma_k8<dtype>(d, a[2], a[3], b1, d);
#endif
}

// D += A B.
template <DType dtype>
__forceinline__ void mma_k8(float (&d)[4], unsigned a0, unsigned a1, unsigned b0) {
  mma_k8<dtype>(d, a0, a1, b0, d);
}
template <DType dtype>
__forceinline__ void mma_k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  mma_k16<dtype>(d, a, b0, b1, d);
}

}  // namespace tessera
