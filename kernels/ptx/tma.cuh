// Boxes of a tensor by the copy engine (sm_90), as a tensor map describes them. What lies outside of the tensor comes
// as zeros, and counts as bytes landed all the same.
#pragma once

#include "contract/tensor_map.h"

namespace tessera {

// Coordinates: columns first, as in the map. One thread asks; the barrier learns of the bytes.
__forceinline__ void load_box(unsigned destination, const TensorMap& map, unsigned barrier, int x, int y, int z,
                              int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(destination),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

__forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// What this thread wrote to shared memory, before wgmma or the copy engine reads it.
__forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tessera
