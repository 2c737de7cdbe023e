// Takes the place of kernels/ptx/shared.cuh (emulated.h).
#pragma once

#include "ptx/global.cuh"

namespace tessera {

inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(pointer) - memory);
}
template <class Value>
void move_to(Value& value, unsigned address) {
  std::memcpy(&value, emulated::shared(address, sizeof value), sizeof value);
}
template <class Value>
void move_from(const Value& value, unsigned address) {
  std::memcpy(emulated::shared(address, sizeof value), &value, sizeof value);
}
inline void ldmatrix_x4(unsigned (&r)[4], unsigned address) { emulated::ldmatrix(r, address); }
inline void stmatrix_x4(unsigned address, const unsigned (&r)[4]) { emulated::stmatrix(address, r); }
inline void store_shared_4(unsigned address, unsigned value) { move_from(value, address); }
inline void store_shared_16(unsigned address, const Words4& words) { move_from(words, address); }
inline void store_shared_floats(unsigned address, float v0, float v1) { move_from(float2{v0, v1}, address); }
inline void load_shared_floats(float (&v)[2], unsigned address) { move_to(v, address); }
inline Words4 load_shared_16(unsigned address) {
  Words4 words;
  move_to(words, address);
  return words;
}
inline void cp_async_4(unsigned address, const void* source, bool wanted) {
  unsigned value = 0;
  if (wanted) std::memcpy(&value, source, sizeof value);
  move_from(value, address);
}
inline void cp_async_commit_group() {}
template <int pending>
void cp_async_wait_group() {}
inline Bits16 load_shared_2(unsigned address) {
  Bits16 bits;
  move_to(bits, address);
  return bits;
}

}  // namespace tessera
