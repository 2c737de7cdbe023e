// Named barriers (bar.arrive, bar.sync): some warps arrive and continue, others wait for them. Whole warps take part.
// Barrier 0 is the one that __syncthreads uses.
#pragma once

namespace tessera {

// threads: the number of arriving and waiting threads together. Writes before an arrival are visible after the wait.
__forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace tessera
