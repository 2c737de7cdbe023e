// mma.sync with e4m3 operands (sm_89 and newer): D[16, 8] += A[16, 32] B[32, 8] with fp32 accumulators.
//
// Lane l holds, with g = l / 4 and t = l % 4, four values of k in a word:
//   A: word 0 = (row g, k 4t..4t+3), word 1 = (row g + 8, same k); words 2 and 3 the same for k + 16
//   B: word 0 = (k 4t..4t+3, column g); word 1 the same for k + 16
//   D: values 0, 1 = (row g, columns 2t, 2t+1); values 2, 3 = (row g + 8, same columns)
// Bytes lie as those of 16-bit operands do, so ldmatrix loads A, and B if its rows are along k.
#pragma once

namespace tessera {

__forceinline__ void mma_e4m3_k32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace tessera
