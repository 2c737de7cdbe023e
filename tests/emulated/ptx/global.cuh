// Takes the place of kernels/ptx/global.cuh (device.h).
#pragma once

#include "ptx/convert.cuh"

namespace tessera {

struct Words2 {
  unsigned word[2];
};
struct Words4 {
  unsigned word[4];
};
template <class Value>
Value load_vector(const void* address) {
  emulated::require(emulated::is_aligned(address, sizeof(Value)), "a misaligned vector in global memory");
  Value value;
  std::memcpy(&value, address, sizeof value);
  return value;
}
template <class Value>
void store_vector(void* address, const Value& value) {
  emulated::require(emulated::is_aligned(address, sizeof value), "a misaligned vector in global memory");
  std::memcpy(address, &value, sizeof value);
}
inline Words4 load_16(const void* address, bool wanted) { return wanted ? load_vector<Words4>(address) : Words4(); }
inline Words4 load_streaming_16(const void* address, bool wanted) { return load_16(address, wanted); }
inline Bits16 load_read_only(const Bits16* address, bool wanted) { return wanted ? *address : Bits16(); }
inline float load_read_only(const float* address, bool wanted) { return wanted ? *address : 0.0f; }
inline void store_16(void* address, const Words4& words) { store_vector(address, words); }
inline void store_8(void* address, Words2 words) { store_vector(address, words); }

// What stands beside its kernel.
template <class Params, class Walk>
void prefetch_pages(const Params&, const Walk&, bool) {}
inline void store_16_if(void* address, const Words4& words, bool wanted) {
  if (wanted) store_16(address, words);
}
inline void store_8(void* address, Words2 words, bool wanted) {
  if (wanted) store_8(address, words);
}
inline void store_float_if(float* address, float value, bool wanted) {
  if (wanted) *address = value;
}
inline void load_coherent(float (&d)[4], const float* address) {
  const auto words = load_vector<Words4>(address);
  std::memcpy(d, &words, sizeof d);
}
inline void store_sums(float* address, const float (&d)[4]) {
  Words4 words;
  std::memcpy(&words, d, sizeof d);
  store_vector(address, words);
}
inline void add_to_sums(float* tile, const float (&d)[4], int lane) {
  for (int i = 0; i < 4; ++i) tile[__CUDA_ARCH__ >= 900 ? lane * 4 + i : i * 32 + lane] += d[i];
}

}  // namespace tessera
