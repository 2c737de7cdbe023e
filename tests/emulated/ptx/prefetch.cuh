// Takes the place of kernels/ptx/prefetch.cuh (device.h).
#pragma once

namespace tessera {

inline void prefetch_l2(const void*) {}

}  // namespace tessera
