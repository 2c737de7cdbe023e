// Base-2 exponential and logarithm, and the reciprocal, of the special function unit; relative error below 2^-22,
// subnormals flushed.
#pragma once

namespace tessera {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__forceinline__ float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Absolute error below 2^-22: tanh.approx would lose half of the digits that a softcap of 50 needs.
__forceinline__ float tanh_from_exp2(float x) {
  return 1.0f - 2.0f * fast_reciprocal(fast_exp2(x * (2 * kLog2E)) + 1.0f);
}

}  // namespace tessera
