// Counters in global memory that order the work of CTAs (sm_70): what a CTA did before a release is visible to the one
// whose acquiring load sees it.
#pragma once

namespace tessera {

// Adds 1. What other threads of the CTA did counts, too, if a barrier follows it and precedes this.
__forceinline__ void increment_release(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

// Adds 1 and returns what was there before. Likewise, and what was done before the earlier releases is visible.
__forceinline__ unsigned increment_acq_rel(unsigned* counter) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

__forceinline__ unsigned load_acquire(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Order nothing.
__forceinline__ void add_relaxed(unsigned* counter, unsigned value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(value) : "memory");
}
__forceinline__ unsigned load_relaxed(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

}  // namespace tessera
