// 2^x on the FMA units, for those exponentials that the special function unit has no time for.
#pragma once

namespace tessera {

// For x from -126 to 127, others as the nearer of these, NaN as such: 2^round(x) goes into the exponent, and a
// polynomial takes the rest, at most a half. Relative error below 8e-5, less than what 16 bits round off.
__forceinline__ float polynomial_exp2(float x) {
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-126.0f));
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(127.0f));
  const float rounded = x + kRounder;
  const float rest = x - (rounded - kRounder);
  const float power = 0.99992807f + rest * (0.69326097f + rest * (0.24261113f + rest * 0.05517167f));
  return __uint_as_float(__float_as_uint(power) + (__float_as_uint(rounded) << 23));
}

}  // namespace tessera
