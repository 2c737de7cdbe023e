// Named barriers: some warps arrive and go on, others wait for them; whole warps at a time. Barrier 0 is __syncthreads.
#pragma once

namespace tessera {

// threads: of both sides together. Writes before an arrival are seen after the wait.
__forceinline__ void barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__forceinline__ void barrier_wait(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace tessera
