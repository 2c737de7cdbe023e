// Takes the place of kernels/ptx/mbarrier.cuh (device.h).
#pragma once

#include "device.h"

namespace tessera {

constexpr int kMbarrierBytes = 8;
inline void mbarrier_init(unsigned mbarrier, unsigned arrivals) { emulated::mbarrier_init(mbarrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(unsigned mbarrier) { emulated::mbarrier_arrive(mbarrier, 0); }
inline void mbarrier_arrive_expect_tx(unsigned mbarrier, unsigned bytes) { emulated::mbarrier_arrive(mbarrier, bytes); }
inline void cp_async_mbarrier_arrive(unsigned mbarrier) { emulated::mbarrier_arrive_after_copies(mbarrier); }
inline bool mbarrier_is_complete(unsigned mbarrier, unsigned parity) {
  return emulated::mbarrier_has_completed(mbarrier, parity);
}
inline void mbarrier_wait_parity(unsigned mbarrier, unsigned parity) {
  emulated::wait_until([=] { return emulated::mbarrier_has_completed(mbarrier, parity); });
  emulated::fall_behind();
}

}  // namespace tessera
