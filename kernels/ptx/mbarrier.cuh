// mbarriers in shared memory (sm_90): a phase completes when all expected arrivals have been counted and all expected
// bytes have been written. Waiting is by the parity of the phase: an mbarrier starts in phase 0, and waiting for parity
// 1 on a new mbarrier returns at once.
#pragma once

namespace tessera {

constexpr int kMbarrierBytes = 8;

__forceinline__ void mbarrier_init(unsigned mbarrier, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(arrivals) : "memory");
}
// Called by the initialising thread: afterwards it may pass the mbarriers to TMA. The other threads of the CTA may use
// them after a CTA-wide barrier.
__forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__forceinline__ void mbarrier_arrive(unsigned mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
// One arrival, and `bytes` more that the current phase waits for.
__forceinline__ void mbarrier_arrive_expect_tx(unsigned mbarrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}

// One arrival, when all cp.async of this thread so far have completed.
__forceinline__ void cp_async_mbarrier_arrive(unsigned mbarrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(mbarrier) : "memory");
}

// try_wait suspends the thread in hardware for a bounded time before it returns false.
__forceinline__ void mbarrier_wait_parity(unsigned mbarrier, unsigned parity) {
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, 0x989680;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(mbarrier), "r"(parity)
        : "memory");
  }
}

}  // namespace tessera
