// TMA loads (sm_90): boxes of a tensor, as a tensor map describes them. Elements outside the tensor arrive as zeros and
// still count towards the bytes that the mbarrier expects.
#pragma once

#include "tile/tensor_map.h"

namespace tessera {

// Coordinates are in the map's order, columns first. One thread issues the load; its bytes complete on `mbarrier`.
__forceinline__ void tma_load(unsigned destination, const TensorMap& map, unsigned mbarrier, int x, int y, int z,
                              int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(destination),
      "l"(&map), "r"(mbarrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Makes this thread's writes to shared memory visible to the async proxy, that is to wgmma and TMA.
__forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tessera
