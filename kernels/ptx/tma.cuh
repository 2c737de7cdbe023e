// TMA loads and stores (sm_90): boxes of a tensor, as a tensor map describes them. Elements outside the tensor arrive as
// zeros and still count towards the bytes that the mbarrier expects; stores skip them.
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

// The same into the shared memory of every CTA of the cluster whose bit is set in `ctas`: destination and mbarrier have
// the same addresses in each.
__forceinline__ void tma_load_multicast(unsigned destination, const TensorMap& map, unsigned mbarrier,
                                        unsigned short ctas, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
      "l"(&map), "r"(mbarrier), "r"(x), "r"(y), "r"(z), "r"(w), "h"(ctas)
      : "memory");
}

// Writes to `source` by other threads must have been made visible to the async proxy before a barrier.
__forceinline__ void tma_store(const TensorMap& map, unsigned source, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(source), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
__forceinline__ void tma_store_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the shared memory of all but the `pending` most recently committed groups of this thread may be reused.
template <int pending>
__forceinline__ void tma_store_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

__forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Makes this thread's writes to shared memory visible to the async proxy, that is to wgmma and TMA.
__forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace tessera
