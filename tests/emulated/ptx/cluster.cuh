// Takes the place of kernels/ptx/cluster.cuh (device.h).
#pragma once

#include "device.h"

namespace tessera {

inline unsigned cluster_cta_rank() { return emulated::cluster_rank(); }
inline void cluster_arrive() { emulated::cluster_arrive(); }
inline void cluster_arrive_relaxed() { emulated::cluster_arrive(); }
inline void cluster_wait() { emulated::cluster_wait(); }
inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
inline void mbarrier_arrive_at(unsigned mbarrier, unsigned rank) { emulated::mbarrier_arrive_at(mbarrier, rank); }
inline unsigned cluster_address(unsigned address, unsigned rank) { return emulated::cluster_address(address, rank); }
inline void store_cluster(unsigned address, float v) { emulated::store_cluster(address, &v, sizeof v); }
inline void store_cluster_floats(unsigned address, float v0, float v1) {
  const float both[2] = {v0, v1};
  emulated::store_cluster(address, both, sizeof both);
}

}  // namespace tessera
