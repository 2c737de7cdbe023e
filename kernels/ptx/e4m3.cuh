// e4m3 (fp8): conversions from and to fp32, and wgmma with e4m3 operands (sm_90a): D[64, n] += A[64, 32] B[32, n] with
// fp32 accumulators, of which the tensor cores keep about 14 bits.
//
// Four values are held in a 32-bit register, the first in the low byte. Both operands of wgmma are K-major: a step is 32
// bytes, as for 16-bit operands, so matrix descriptors and swizzle atoms (ptx/wgmma.cuh, tile/tensor_map.h) are those of a
// 16-bit tensor with half as many columns. A in registers: word i of lane l has row l / 4 + i % 2 * 8 and columns
// l % 4 * 4 + i / 2 * 16 to + 3.
#pragma once

#include "ptx/wgmma.cuh"

namespace tessera {

constexpr float kLargestE4m3 = 448.0f;

// Rounds to nearest even; beyond the largest value, to the largest. The high half comes first: the second conversion adds its
// half to the result of the first.
__forceinline__ unsigned pack_e4m3(float v0, float v1, float v2, float v3) {
  unsigned packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "mov.b32 %0, {low, high};\n}\n"
      : "=r"(packed)
      : "f"(v0), "f"(v1), "f"(v2), "f"(v3));
  return packed;
}

__forceinline__ void unpack_e4m3(unsigned packed, float (&v)[4]) {
  asm("{\n.reg .b16 low, high;\n.reg .b32 a, b;\n.reg .b16 x, y;\n"
      "mov.b32 {low, high}, %4;\n"
      "cvt.rn.f16x2.e4m3x2 a, low;\n"
      "cvt.rn.f16x2.e4m3x2 b, high;\n"
      "mov.b32 {x, y}, a;\ncvt.f32.f16 %0, x;\ncvt.f32.f16 %1, y;\n"
      "mov.b32 {x, y}, b;\ncvt.f32.f16 %2, x;\ncvt.f32.f16 %3, y;\n}\n"
      : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
      : "r"(packed));
}

// As Wgmma<n>.
template <int n>
struct WgmmaE4m3;

#define TESSERA_WGMMA_E4M3(n, i0, i1, i2, i3, i4, i5)                                                             \
  template <>                                                                                                     \
  struct WgmmaE4m3<n> {                                                                                           \
    static __forceinline__ void shared_shared(float (&d)[n / 2], unsigned long long a, unsigned long long b,      \
                                              bool adds) {                                                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                                       \
                   ", 0;\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" TESSERA_REGISTERS_##n             \
                   "}, %" #i0 ", %" #i1 ", p, 1, 1;\n}\n"                                                         \
                   : TESSERA_SUMS_##n                                                                             \
                   : "l"(a), "l"(b), "r"(static_cast<int>(adds)));                                                \
    }                                                                                                             \
    static __forceinline__ void registers_shared(float (&d)[n / 2], const unsigned (&a)[4], unsigned long long b, \
                                                 bool adds) {                                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                                       \
                   ", 0;\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" TESSERA_REGISTERS_##n             \
                   "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1;\n}\n"                         \
                   : TESSERA_SUMS_##n                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)));            \
    }                                                                                                             \
  }
// n, and the indices of the operands that follow its accumulators.
TESSERA_WGMMA_E4M3(16, 8, 9, 10, 11, 12, 13);
TESSERA_WGMMA_E4M3(32, 16, 17, 18, 19, 20, 21);
TESSERA_WGMMA_E4M3(48, 24, 25, 26, 27, 28, 29);
TESSERA_WGMMA_E4M3(64, 32, 33, 34, 35, 36, 37);
TESSERA_WGMMA_E4M3(80, 40, 41, 42, 43, 44, 45);
TESSERA_WGMMA_E4M3(96, 48, 49, 50, 51, 52, 53);
TESSERA_WGMMA_E4M3(112, 56, 57, 58, 59, 60, 61);
TESSERA_WGMMA_E4M3(128, 64, 65, 66, 67, 68, 69);
TESSERA_WGMMA_E4M3(144, 72, 73, 74, 75, 76, 77);
TESSERA_WGMMA_E4M3(160, 80, 81, 82, 83, 84, 85);
TESSERA_WGMMA_E4M3(176, 88, 89, 90, 91, 92, 93);
TESSERA_WGMMA_E4M3(192, 96, 97, 98, 99, 100, 101);
TESSERA_WGMMA_E4M3(208, 104, 105, 106, 107, 108, 109);
TESSERA_WGMMA_E4M3(224, 112, 113, 114, 115, 116, 117);
TESSERA_WGMMA_E4M3(240, 120, 121, 122, 123, 124, 125);
TESSERA_WGMMA_E4M3(256, 128, 129, 130, 131, 132, 133);

#undef TESSERA_WGMMA_E4M3

}  // namespace tessera
