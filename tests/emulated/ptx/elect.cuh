// Takes the place of kernels/ptx/elect.cuh (device.h).
#pragma once

#include "device.h"

namespace tessera {

inline bool elect_one() { return threadIdx.x % 32 == 0; }
inline int read_thread() { return static_cast<int>(threadIdx.x); }

}  // namespace tessera
