// Takes the place of kernels/ptx/bulk_copy.cuh (device.h).
#pragma once

#include "device.h"

namespace tessera {

inline void bulk_copy_to_cluster(unsigned destination, unsigned source, unsigned bytes, unsigned mbarrier) {
  emulated::copy_to_cluster(destination, source, bytes, mbarrier);
}

}  // namespace tessera
