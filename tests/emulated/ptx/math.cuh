// Takes the place of kernels/ptx/math.cuh (emulated.h).
#pragma once

#include "emulated.h"

namespace tessera {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_reciprocal(float x) { return 1.0f / x; }

}  // namespace tessera
