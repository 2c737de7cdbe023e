// Takes the place of kernels/ptx/math.cuh (device.h).
#pragma once

#include "device.h"

namespace tessera {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }
inline float min_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmin(a, b); }
inline float accurate_tanh(float x) { return std::tanh(x); }

}  // namespace tessera
