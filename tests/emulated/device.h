// The names that device code finds without an include.
#pragma once

#include <math.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "emulated.h"

#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct float2 {
  float x, y;
};
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline float __fmul_rn(float a, float b) {
  volatile float product = a * b;  // not part of an FMA
  return product;
}
inline float __fadd_rn(float a, float b) {
  volatile float sum = a + b;
  return sum;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<std::uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const std::uint64_t bytes = static_cast<std::uint64_t>(y) << 32 | x;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) chosen |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return chosen;
}
inline unsigned atomicAdd(unsigned* at, unsigned value) { return *at += value, *at - value; }
inline int atomicAdd(int* at, int value) { return *at += value, *at - value; }
inline float atomicAdd(float* at, float value) {
  const float before = *at;
  *at += value;
  return before;
}
inline unsigned atomicMax(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at = max(before, value);
  return before;
}

inline void __syncwarp(unsigned = 0xffffffffu) { tessera::emulated::sync_warp(); }
inline void __syncthreads() { tessera::emulated::sync_threads(); }
namespace tessera::emulated {
struct OfLanes {
  unsigned value[32];
  template <class Value>
  explicit OfLanes(Value own) {
    static_assert(sizeof own == 4);
    const auto bits = __builtin_bit_cast(unsigned, own);
    exchange(&bits, 1, value);
  }
};
inline int lane() { return static_cast<int>(threadIdx.x % 32); }
template <class Value>
Value shuffle(Value own, int from) {
  return __builtin_bit_cast(Value, OfLanes(own).value[from & 31]);
}
}  // namespace tessera::emulated
template <class Value>
Value __shfl_sync(unsigned, Value own, int lane) {
  return tessera::emulated::shuffle(own, lane);
}
template <class Value>
Value __shfl_xor_sync(unsigned, Value own, int mask) {
  return tessera::emulated::shuffle(own, tessera::emulated::lane() ^ mask);
}
template <class Value>
Value __shfl_up_sync(unsigned, Value own, int distance) {
  const int lane = tessera::emulated::lane();
  return tessera::emulated::shuffle(own, lane < distance ? lane : lane - distance);
}
template <class Value>
Value __shfl_down_sync(unsigned, Value own, int distance) {
  const int lane = tessera::emulated::lane();
  return tessera::emulated::shuffle(own, lane + distance > 31 ? lane : lane + distance);
}
template <class Value>
unsigned __match_any_sync(unsigned, Value own) {
  const tessera::emulated::OfLanes all(own);
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) same |= (all.value[i] == __builtin_bit_cast(unsigned, own) ? 1u : 0u) << i;
  return same;
}
inline unsigned __ballot_sync(unsigned, int holds) {
  return __match_any_sync(0, holds != 0 ? 1 : 0) ^ (holds != 0 ? 0u : 0xffffffffu);
}
inline int __any_sync(unsigned, int holds) { return __ballot_sync(0, holds) != 0; }
inline int __all_sync(unsigned, int holds) { return __ballot_sync(0, holds) == 0xffffffffu; }
inline unsigned __reduce_max_sync(unsigned, unsigned own) {
  unsigned largest = 0;
  for (const unsigned other : tessera::emulated::OfLanes(own).value) largest = max(largest, other);
  return largest;
}
inline int __syncthreads_and(int holds) {
  static const char site = 0;
  int& broken = tessera::emulated::of_cta<int>(&site);
  __syncthreads();
  broken = 0;
  __syncthreads();
  if (holds == 0) broken = 1;
  __syncthreads();
  return broken == 0;
}
