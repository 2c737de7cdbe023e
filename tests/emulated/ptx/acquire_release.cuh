// Takes the place of kernels/ptx/acquire_release.cuh (device.h).
#pragma once

#include "device.h"

namespace tessera {

inline unsigned add_to_counter(unsigned* counter, unsigned value) {
  emulated::progress();
  return atomicAdd(counter, value);
}
inline void increment_release(unsigned* counter) { add_to_counter(counter, 1); }
inline unsigned increment_acq_rel(unsigned* counter) { return add_to_counter(counter, 1); }
inline unsigned load_acquire(const unsigned* counter) {
  emulated::yield();  // who asks again in a loop waits
  return *counter;
}
inline void add_relaxed(unsigned* counter, unsigned value) { add_to_counter(counter, value); }
inline unsigned load_relaxed(const unsigned* counter) { return *counter; }
inline void fence_acq_rel_gpu() {}

}  // namespace tessera
