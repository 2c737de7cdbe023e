// Takes the place of kernels/ptx/barrier.cuh (device.h).
#pragma once

#include "device.h"

namespace tessera {

// A warp arrives as a whole.
inline void named_barrier_arrive(int barrier, int threads) {
  emulated::sync_warp();
  emulated::named_barrier(barrier, threads, false);
}
inline void named_barrier_sync(int barrier, int threads) {
  emulated::sync_warp();
  emulated::named_barrier(barrier, threads, true);
}

}  // namespace tessera
