// Takes the place of kernels/ptx/global.cuh (emulated.h).
#pragma once

#include "ptx/convert.cuh"

namespace tessera {

struct Words2 {
  unsigned word[2];
};
struct Words4 {
  unsigned word[4];
};
inline Words4 load_16(const void* address, bool wanted) {
  Words4 words = {};
  if (wanted) std::memcpy(&words, address, sizeof words);
  return words;
}
template <class Value>
Value load_read_only(const Value* address, bool wanted) {
  return wanted ? *address : Value();
}
inline void store_16(void* address, const Words4& words) { std::memcpy(address, &words, sizeof words); }

}  // namespace tessera
