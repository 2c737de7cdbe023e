// Takes the place of kernels/ptx/cluster.cuh (emulated.h).
#pragma once

#include "emulated.h"

namespace tessera {

inline unsigned cluster_cta_rank() { return emulated::cluster_rank(); }
inline void cluster_arrive_relaxed() { emulated::cluster_arrive(); }
inline void cluster_wait() { emulated::cluster_wait(); }
inline void mbarrier_arrive_at(unsigned mbarrier, unsigned rank) { emulated::mbarrier_arrive_at(mbarrier, rank); }

}  // namespace tessera
