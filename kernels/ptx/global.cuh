// Vector and read-only accesses to global memory. Read-only loads require that nothing writes the data while the kernel
// runs; streaming loads, whose bytes are used once, do not allocate in L1.
#pragma once

#include "ptx/convert.cuh"

namespace tessera {

struct Words2 {
  unsigned word[2];
};
struct Words4 {
  unsigned word[4];
};

// All loads take a predicate and return 0 if it is false: a branch around each load would keep the compiler from
// issuing them back to back.

__forceinline__ Words4 load_streaming_16(const void* address, bool wanted) {  // address: a multiple of 16
  Words4 v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(v.word[0]), "=&r"(v.word[1]), "=&r"(v.word[2]), "=&r"(v.word[3])
      : "l"(address), "r"(static_cast<int>(wanted)));
  return v;
}

__forceinline__ Words4 load_16(const void* address, bool wanted) {  // address: a multiple of 16; allocates in L1
  Words4 v;
  asm("{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(v.word[0]), "=&r"(v.word[1]), "=&r"(v.word[2]), "=&r"(v.word[3])
      : "l"(address), "r"(static_cast<int>(wanted)));
  return v;
}

__forceinline__ Bits16 load_read_only(const Bits16* address, bool wanted) {
  Bits16 v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.b16 %0, 0;\n"
      "@p ld.global.nc.b16 %0, [%1];\n"
      "}\n"
      : "=&h"(v)
      : "l"(address), "r"(static_cast<int>(wanted)));
  return v;
}

__forceinline__ float load_read_only(const float* address, bool wanted) {
  float v;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@p ld.global.nc.b32 %0, [%1];\n"
      "}\n"
      : "=&f"(v)
      : "l"(address), "r"(static_cast<int>(wanted)));
  return v;
}

__forceinline__ void store_16(void* address, const Words4& v) {  // address: a multiple of 16
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(address), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

__forceinline__ void store_8(void* address, Words2 v) {  // address: a multiple of 8
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(address), "r"(v.word[0]), "r"(v.word[1]) : "memory");
}

}  // namespace tessera
