// wgmma (sm_90a): products of a warpgroup, D[64, n] += A[64, 16] B[16, n], 16-bit operands, fp32 accumulators in
// registers.
//
// Warp w of the warpgroup holds rows 16 w to 16 w + 15 of D, and of A if A is in registers, in mma.sync's layout: the
// j-th tile of 8 columns of D is d[4 j] to d[4 j + 3] (D in ptx/mma.cuh), the four words of A are A in ptx/mma.cuh.
//
// In shared memory an operand consists of swizzle atoms (tile/tensor_map.h): rows of `width` columns (64, 32 or 16, the
// span of the 128, 64 or 32-byte swizzle) in groups of eight rows. In 16-byte chunks, with W = width / 8 chunks per
// row, the canonical layouts that a matrix descriptor can express are
//   K-major   ((8, n), 2) : ((W, SBO), 1)             rows are M or N; the 16 columns of a step are two adjacent chunks
//   MN-major  ((W, n), (8, 2)) : ((1, LBO), (W, SBO))  rows are K; columns are M or N and continue in the next atom
// In both, SBO is the distance between groups of eight rows, 16 width bytes. LBO matters only if MN-major: it is the
// distance between atoms. K-major, the next step of 16 columns is 32 bytes further in the same row: the swizzle acts on
// address bits, so the start address may lie inside a row as long as groups are aligned. MN-major, the next step is 16
// rows further.
#pragma once

#include "tile/types.h"

namespace tessera {

// The two words of a matrix descriptor. Its start address counts in units of 16 bytes.
struct MatrixDescriptor {
  unsigned low;   // start address, LBO
  unsigned high;  // SBO, swizzle mode

  __forceinline__ unsigned long long at(unsigned byte_offset) const {
    unsigned long long whole;
    asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(low + byte_offset / 16), "r"(high));
    return whole;
  }
};

// address: of the atom's first row, a multiple of 16 width. atom_distance: bytes to the next atom, MN-major only.
template <int width>
__forceinline__ MatrixDescriptor matrix_descriptor(unsigned address, unsigned atom_distance) {
  static_assert(width == 64 || width == 32 || width == 16);
  constexpr unsigned kSwizzle = width == 64 ? 1 : width == 32 ? 2 : 3;
  return {(address & 0x3ffff) >> 4 | atom_distance >> 4 << 16, static_cast<unsigned>(width) | kSwizzle << 30};
}

// Orders register writes of ordinary instructions before wgmma reads or accumulates into those registers.
__forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `pending` of the most recently committed groups are still in flight.
template <int pending>
__forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
// Call on the accumulators of a group that has been waited for: the compiler may not move their uses above the wait.
template <int count>
__forceinline__ void wgmma_fence_operand(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Call before a product that does not add to its accumulators: what they held is not kept in registers until then.
template <int count>
__forceinline__ void wgmma_discard(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "=f"(d[i]));
}

// Sets the number of registers per thread from here on. The whole warpgroup calls it, and each warp role is one branch
// of an if.
template <int registers>
__forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

// Wgmma<n>: shared_shared reads both operands from shared memory, registers_shared reads A from registers. adds: D += A
// B if true, else D = A B. transposed_a, transposed_b: that operand is MN-major if true, else K-major.
template <int n>
struct Wgmma;

// "%0, %1, ..." and "+f"(d[0]), ...: the list for each n extends the previous one by four.
#define TESSERA_REGISTERS_8 "%0, %1, %2, %3"
#define TESSERA_REGISTERS_16 TESSERA_REGISTERS_8 ", %4, %5, %6, %7"
#define TESSERA_REGISTERS_24 TESSERA_REGISTERS_16 ", %8, %9, %10, %11"
#define TESSERA_REGISTERS_32 TESSERA_REGISTERS_24 ", %12, %13, %14, %15"
#define TESSERA_REGISTERS_40 TESSERA_REGISTERS_32 ", %16, %17, %18, %19"
#define TESSERA_REGISTERS_48 TESSERA_REGISTERS_40 ", %20, %21, %22, %23"
#define TESSERA_REGISTERS_56 TESSERA_REGISTERS_48 ", %24, %25, %26, %27"
#define TESSERA_REGISTERS_64 TESSERA_REGISTERS_56 ", %28, %29, %30, %31"
#define TESSERA_REGISTERS_72 TESSERA_REGISTERS_64 ", %32, %33, %34, %35"
#define TESSERA_REGISTERS_80 TESSERA_REGISTERS_72 ", %36, %37, %38, %39"
#define TESSERA_REGISTERS_88 TESSERA_REGISTERS_80 ", %40, %41, %42, %43"
#define TESSERA_REGISTERS_96 TESSERA_REGISTERS_88 ", %44, %45, %46, %47"
#define TESSERA_REGISTERS_104 TESSERA_REGISTERS_96 ", %48, %49, %50, %51"
#define TESSERA_REGISTERS_112 TESSERA_REGISTERS_104 ", %52, %53, %54, %55"
#define TESSERA_REGISTERS_120 TESSERA_REGISTERS_112 ", %56, %57, %58, %59"
#define TESSERA_REGISTERS_128 TESSERA_REGISTERS_120 ", %60, %61, %62, %63"
#define TESSERA_REGISTERS_136 TESSERA_REGISTERS_128 ", %64, %65, %66, %67"
#define TESSERA_REGISTERS_144 TESSERA_REGISTERS_136 ", %68, %69, %70, %71"
#define TESSERA_REGISTERS_152 TESSERA_REGISTERS_144 ", %72, %73, %74, %75"
#define TESSERA_REGISTERS_160 TESSERA_REGISTERS_152 ", %76, %77, %78, %79"
#define TESSERA_REGISTERS_168 TESSERA_REGISTERS_160 ", %80, %81, %82, %83"
#define TESSERA_REGISTERS_176 TESSERA_REGISTERS_168 ", %84, %85, %86, %87"
#define TESSERA_REGISTERS_184 TESSERA_REGISTERS_176 ", %88, %89, %90, %91"
#define TESSERA_REGISTERS_192 TESSERA_REGISTERS_184 ", %92, %93, %94, %95"
#define TESSERA_REGISTERS_200 TESSERA_REGISTERS_192 ", %96, %97, %98, %99"
#define TESSERA_REGISTERS_208 TESSERA_REGISTERS_200 ", %100, %101, %102, %103"
#define TESSERA_REGISTERS_216 TESSERA_REGISTERS_208 ", %104, %105, %106, %107"
#define TESSERA_REGISTERS_224 TESSERA_REGISTERS_216 ", %108, %109, %110, %111"
#define TESSERA_REGISTERS_232 TESSERA_REGISTERS_224 ", %112, %113, %114, %115"
#define TESSERA_REGISTERS_240 TESSERA_REGISTERS_232 ", %116, %117, %118, %119"
#define TESSERA_REGISTERS_248 TESSERA_REGISTERS_240 ", %120, %121, %122, %123"
#define TESSERA_REGISTERS_256 TESSERA_REGISTERS_248 ", %124, %125, %126, %127"
#define TESSERA_SUMS_8 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define TESSERA_SUMS_16 TESSERA_SUMS_8, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define TESSERA_SUMS_24 TESSERA_SUMS_16, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define TESSERA_SUMS_32 TESSERA_SUMS_24, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define TESSERA_SUMS_40 TESSERA_SUMS_32, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define TESSERA_SUMS_48 TESSERA_SUMS_40, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define TESSERA_SUMS_56 TESSERA_SUMS_48, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define TESSERA_SUMS_64 TESSERA_SUMS_56, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define TESSERA_SUMS_72 TESSERA_SUMS_64, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define TESSERA_SUMS_80 TESSERA_SUMS_72, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define TESSERA_SUMS_88 TESSERA_SUMS_80, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define TESSERA_SUMS_96 TESSERA_SUMS_88, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define TESSERA_SUMS_104 TESSERA_SUMS_96, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define TESSERA_SUMS_112 TESSERA_SUMS_104, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define TESSERA_SUMS_120 TESSERA_SUMS_112, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define TESSERA_SUMS_128 TESSERA_SUMS_120, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define TESSERA_SUMS_136 TESSERA_SUMS_128, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define TESSERA_SUMS_144 TESSERA_SUMS_136, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define TESSERA_SUMS_152 TESSERA_SUMS_144, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define TESSERA_SUMS_160 TESSERA_SUMS_152, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define TESSERA_SUMS_168 TESSERA_SUMS_160, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define TESSERA_SUMS_176 TESSERA_SUMS_168, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define TESSERA_SUMS_184 TESSERA_SUMS_176, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define TESSERA_SUMS_192 TESSERA_SUMS_184, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define TESSERA_SUMS_200 TESSERA_SUMS_192, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define TESSERA_SUMS_208 TESSERA_SUMS_200, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define TESSERA_SUMS_216 TESSERA_SUMS_208, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define TESSERA_SUMS_224 TESSERA_SUMS_216, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define TESSERA_SUMS_232 TESSERA_SUMS_224, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define TESSERA_SUMS_240 TESSERA_SUMS_232, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define TESSERA_SUMS_248 TESSERA_SUMS_240, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define TESSERA_SUMS_256 TESSERA_SUMS_248, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])

#define TESSERA_WGMMA_SHARED(n, type, i0, i1, i2, i3, i4)                                                 \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2                                                   \
               ", 0;\n"                                                                                   \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TESSERA_REGISTERS_##n \
               "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\n}\n"                                 \
               : TESSERA_SUMS_##n                                                                         \
               : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(static_cast<int>(transposed_a)),        \
                 "n"(static_cast<int>(transposed_b)))
#define TESSERA_WGMMA_REGISTERS(n, type, i0, i1, i2, i3, i4, i5, i6)                                      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5                                                   \
               ", 0;\n"                                                                                   \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" TESSERA_REGISTERS_##n \
               "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}\n"           \
               : TESSERA_SUMS_##n                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)),         \
                 "n"(static_cast<int>(transposed_b)))
#define TESSERA_WGMMA(n, i0, i1, i2, i3, i4, i5, i6)                                                              \
  template <>                                                                                                     \
  struct Wgmma<n> {                                                                                               \
    template <DType dtype, bool transposed_b, bool transposed_a = false>                                          \
    static __forceinline__ void shared_shared(float (&d)[n / 2], unsigned long long a, unsigned long long b,      \
                                              bool adds) {                                                        \
      if constexpr (dtype == DType::kFloat16) {                                                                   \
        TESSERA_WGMMA_SHARED(n, "f16", i0, i1, i2, i3, i4);                                                       \
      } else {                                                                                                    \
        TESSERA_WGMMA_SHARED(n, "bf16", i0, i1, i2, i3, i4);                                                      \
      }                                                                                                           \
    }                                                                                                             \
    template <DType dtype, bool transposed_b>                                                                     \
    static __forceinline__ void registers_shared(float (&d)[n / 2], const unsigned (&a)[4], unsigned long long b, \
                                                 bool adds) {                                                     \
      if constexpr (dtype == DType::kFloat16) {                                                                   \
        TESSERA_WGMMA_REGISTERS(n, "f16", i0, i1, i2, i3, i4, i5, i6);                                            \
      } else {                                                                                                    \
        TESSERA_WGMMA_REGISTERS(n, "bf16", i0, i1, i2, i3, i4, i5, i6);                                           \
      }                                                                                                           \
    }                                                                                                             \
  }
// n, and the indices of the operands that follow its accumulators.
TESSERA_WGMMA(8, 4, 5, 6, 7, 8, 9, 10);
TESSERA_WGMMA(16, 8, 9, 10, 11, 12, 13, 14);
TESSERA_WGMMA(24, 12, 13, 14, 15, 16, 17, 18);
TESSERA_WGMMA(32, 16, 17, 18, 19, 20, 21, 22);
TESSERA_WGMMA(40, 20, 21, 22, 23, 24, 25, 26);
TESSERA_WGMMA(48, 24, 25, 26, 27, 28, 29, 30);
TESSERA_WGMMA(56, 28, 29, 30, 31, 32, 33, 34);
TESSERA_WGMMA(64, 32, 33, 34, 35, 36, 37, 38);
TESSERA_WGMMA(72, 36, 37, 38, 39, 40, 41, 42);
TESSERA_WGMMA(80, 40, 41, 42, 43, 44, 45, 46);
TESSERA_WGMMA(88, 44, 45, 46, 47, 48, 49, 50);
TESSERA_WGMMA(96, 48, 49, 50, 51, 52, 53, 54);
TESSERA_WGMMA(104, 52, 53, 54, 55, 56, 57, 58);
TESSERA_WGMMA(112, 56, 57, 58, 59, 60, 61, 62);
TESSERA_WGMMA(120, 60, 61, 62, 63, 64, 65, 66);
TESSERA_WGMMA(128, 64, 65, 66, 67, 68, 69, 70);
TESSERA_WGMMA(136, 68, 69, 70, 71, 72, 73, 74);
TESSERA_WGMMA(144, 72, 73, 74, 75, 76, 77, 78);
TESSERA_WGMMA(152, 76, 77, 78, 79, 80, 81, 82);
TESSERA_WGMMA(160, 80, 81, 82, 83, 84, 85, 86);
TESSERA_WGMMA(168, 84, 85, 86, 87, 88, 89, 90);
TESSERA_WGMMA(176, 88, 89, 90, 91, 92, 93, 94);
TESSERA_WGMMA(184, 92, 93, 94, 95, 96, 97, 98);
TESSERA_WGMMA(192, 96, 97, 98, 99, 100, 101, 102);
TESSERA_WGMMA(200, 100, 101, 102, 103, 104, 105, 106);
TESSERA_WGMMA(208, 104, 105, 106, 107, 108, 109, 110);
TESSERA_WGMMA(216, 108, 109, 110, 111, 112, 113, 114);
TESSERA_WGMMA(224, 112, 113, 114, 115, 116, 117, 118);
TESSERA_WGMMA(232, 116, 117, 118, 119, 120, 121, 122);
TESSERA_WGMMA(240, 120, 121, 122, 123, 124, 125, 126);
TESSERA_WGMMA(248, 124, 125, 126, 127, 128, 129, 130);
TESSERA_WGMMA(256, 128, 129, 130, 131, 132, 133, 134);

#undef TESSERA_WGMMA
#undef TESSERA_WGMMA_SHARED
#undef TESSERA_WGMMA_REGISTERS

}  // namespace tessera
