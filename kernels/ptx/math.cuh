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

// 2^x on the FMA units, for x from -126 to 127, smaller ones as -126: 2^round(x) goes into the exponent, and a
// polynomial takes the rest, at most a half. Relative error below 8e-5, less than what 16 bits round off.
__forceinline__ float polynomial_exp2(float x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  x = fmaxf(x, -126.0f);
  const float rounded = x + kRounder;
  const float rest = x - (rounded - kRounder);
  const float power = 0.99992807f + rest * (0.69326097f + rest * (0.24261113f + rest * 0.05517167f));
  return __uint_as_float(__float_as_uint(power) + (__float_as_uint(rounded) << 23));
}

// tanh.approx would lose half of the digits that a softcap of 50 needs. Away from 0 the absolute error is below 2^-22;
// near it, where that would be too much, a series keeps the relative error there.
__forceinline__ float accurate_tanh(float x) {
  const float x2 = x * x;
  const float series = x + x * x2 * (-1.0f / 3 + x2 * (2.0f / 15 + x2 * (-17.0f / 315 + x2 * (62.0f / 2835))));
  const float by_exp = 1.0f - 2.0f * fast_reciprocal(fast_exp2(x * (2 * kLog2E)) + 1.0f);
  return fabsf(x) < 0.3f ? series : by_exp;
}

}  // namespace tessera
