// Takes the place of kernels/ptx/shared.cuh (device.h).
#pragma once

#include "ptx/global.cuh"

namespace tessera {

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - emulated::shared_memory().data);
}
template <class Value>
void move_to(Value& value, unsigned address) {
  emulated::load_shared(&value, address, sizeof value);
}
template <class Value>
void move_from(const Value& value, unsigned address) {
  emulated::store_shared(address, &value, sizeof value);
}

// Lane 8 i + j has the address of row j of matrix i; lane l gets, or has, elements 2 (l % 4) and the next of row l / 4 or, if
// transposed, of that column.
template <bool transposed, int matrices>
void ldmatrix(unsigned (&r)[matrices], unsigned address) {
  unsigned of[32];
  emulated::exchange(&address, 1, of);
  const unsigned lane = threadIdx.x % 32;
  emulated::require(lane / 8 >= matrices || address % 16 == 0, "a misaligned row of ldmatrix");
  for (unsigned i = 0; i < matrices; ++i) {
    if (transposed) {
      Bits16 two[2];
      for (unsigned j = 0; j < 2; ++j) move_to(two[j], of[i * 8 + lane % 4 * 2 + j] + lane / 4 * 2);
      std::memcpy(&r[i], two, sizeof two);
    } else {
      move_to(r[i], of[i * 8 + lane / 4] + lane % 4 * 4);
    }
  }
  emulated::sync_warp();
}
inline void ldmatrix_x4(unsigned (&r)[4], unsigned address) { ldmatrix<false>(r, address); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned address) { ldmatrix<true>(r, address); }
inline void ldmatrix_x2(unsigned (&r)[2], unsigned address) { ldmatrix<false>(r, address); }
inline void ldmatrix_x2_trans(unsigned (&r)[2], unsigned address) { ldmatrix<true>(r, address); }
inline void stmatrix_x4(unsigned address, const unsigned (&r)[4]) {
  unsigned of[32];
  emulated::exchange(&address, 1, of);
  const unsigned lane = threadIdx.x % 32;
  emulated::require(address % 16 == 0, "a misaligned row of stmatrix");
  for (unsigned i = 0; i < 4; ++i) move_from(r[i], of[i * 8 + lane / 4] + lane % 4 * 4);
  emulated::sync_warp();
}

inline void store_shared_4(unsigned address, unsigned value) { move_from(value, address); }
inline void store_shared_8(unsigned address, const Words2& words) { move_from(words, address); }
inline void store_shared_16(unsigned address, const Words4& words) { move_from(words, address); }
inline void store_shared_floats(unsigned address, float v0, float v1) { move_from(float2{v0, v1}, address); }
inline void store_shared_floats(unsigned address, float v0, float v1, float v2, float v3) {
  const float all[4] = {v0, v1, v2, v3};
  move_from(all, address);
}
inline void load_shared_floats(float (&v)[2], unsigned address) { move_to(v, address); }
inline void load_shared_floats(float (&v)[4], unsigned address) { move_to(v, address); }
inline unsigned load_shared_4(unsigned address) {
  unsigned value;
  move_to(value, address);
  return value;
}
inline Bits16 load_shared_2(unsigned address) {
  Bits16 bits;
  move_to(bits, address);
  return bits;
}
inline Words4 load_shared_16(unsigned address) {
  Words4 words;
  move_to(words, address);
  return words;
}

// The first `bytes` of `size`, and zeros.
template <int size>
void cp_async(unsigned address, const void* source, int bytes) {
  emulated::require(bytes <= 0 || emulated::is_aligned(source, size), "a misaligned source of cp.async");
  emulated::defer(emulated::Queue::kCopies, [=] {
    unsigned char copied[size] = {};
    if (bytes > 0) std::memcpy(copied, source, static_cast<std::size_t>(bytes));
    emulated::store_shared(address, copied, size);
  });
}
inline void cp_async_16(unsigned address, const void* source, bool wanted) {
  cp_async<16>(address, source, wanted ? 16 : 0);
}
inline void cp_async_16_narrow(unsigned address, const void* source, bool wanted) {
  cp_async_16(address, source, wanted);
}
inline void cp_async_16_of(unsigned address, const void* source, int bytes) { cp_async<16>(address, source, bytes); }
inline void cp_async_4(unsigned address, const void* source, bool wanted) {
  cp_async<4>(address, source, wanted ? 4 : 0);
}
inline void cp_async_commit_group() { emulated::commit(emulated::Queue::kCopies); }
template <int pending>
void cp_async_wait_group() {
  emulated::wait(emulated::Queue::kCopies, pending);
}

}  // namespace tessera
