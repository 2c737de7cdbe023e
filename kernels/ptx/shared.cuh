// Shared memory: ldmatrix and stmatrix of 8x8 matrices in mma's register layout, vector loads and stores, and cp.async.
#pragma once

#include "ptx/global.cuh"

namespace tessera {

__forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Lanes 8i to 8i + 7 hold the addresses of the eight 16-byte rows of matrix i.
__forceinline__ void ldmatrix_x4(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// The addresses of lanes 0 to 15 are used; those of the other lanes are ignored but must be valid.
__forceinline__ void ldmatrix_x2(unsigned (&r)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}
__forceinline__ void ldmatrix_x2_trans(unsigned (&r)[2], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(address)
               : "memory");
}

#if __CUDA_ARCH__ >= 900
// The inverse of ldmatrix_x4, with the same addresses.
__forceinline__ void stmatrix_x4(unsigned address, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
#endif

__forceinline__ void store_shared_16(unsigned address, const Words4& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}
__forceinline__ void store_shared_8(unsigned address, const Words2& v) {  // address: a multiple of 8
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(v.word[0]), "r"(v.word[1]) : "memory");
}
__forceinline__ Words4 load_shared_16(unsigned address) {
  Words4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "r"(address)
               : "memory");
  return v;
}
__forceinline__ void load_shared_floats(float (&v)[2], unsigned address) {  // address: a multiple of 8
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(address) : "memory");
}
__forceinline__ void load_shared_floats(float (&v)[4], unsigned address) {  // address: a multiple of 16
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address)
               : "memory");
}
__forceinline__ void store_shared_floats(unsigned address, float v0, float v1) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v0), "f"(v1) : "memory");
}
__forceinline__ void store_shared_floats(unsigned address, float v0, float v1, float v2, float v3) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v0), "f"(v1), "f"(v2), "f"(v3)
               : "memory");
}
__forceinline__ unsigned load_shared_4(unsigned address) {
  unsigned v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
__forceinline__ Bits16 load_shared_2(unsigned address) {
  Bits16 v;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
  return v;
}
__forceinline__ void store_shared_4(unsigned address, unsigned value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

#if __CUDA_ARCH__ >= 800
// Copies 16 bytes without going through registers; writes zeros, and does not read `source`, if not `wanted`.
__forceinline__ void cp_async_16(unsigned destination, const void* source, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source),
               "r"(wanted ? 16 : 0)
               : "memory");
}
// The same, without fetching the rest of its 128 bytes into L2.
__forceinline__ void cp_async_16_narrow(unsigned destination, const void* source, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(wanted ? 16 : 0)
               : "memory");
}
// Copies the first `bytes` of 16, 0 to 16, and writes zeros for the rest.
__forceinline__ void cp_async_16_of(unsigned destination, const void* source, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(bytes)
               : "memory");
}
__forceinline__ void cp_async_4(unsigned destination, const void* source, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(destination), "l"(source), "r"(wanted ? 4 : 0)
               : "memory");
}
__forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `pending` of the most recently committed groups are still in flight.
template <int pending>
__forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
#endif

}  // namespace tessera
