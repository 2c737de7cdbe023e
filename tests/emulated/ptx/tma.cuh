// Takes the place of kernels/ptx/tma.cuh (emulated.h).
#pragma once

#include "emulated.h"
#include "tile/tensor_map.h"

namespace tessera {

inline const emulated::Tensor& tensor_of(const TensorMap& map) {
  return *reinterpret_cast<const emulated::Tensor*>(map.words[0]);
}
inline TensorMap map_of(const emulated::Tensor& tensor) { return {{reinterpret_cast<unsigned long long>(&tensor)}}; }

inline void tma_load(unsigned destination, const TensorMap& map, unsigned mbarrier, int x, int y, int z, int) {
  emulated::load(tensor_of(map), destination, mbarrier, 1u << emulated::cluster_rank(), x, y, z);
}
inline void tma_load_multicast(unsigned destination, const TensorMap& map, unsigned mbarrier, unsigned short ctas,
                               int x, int y, int z, int) {
  emulated::load(tensor_of(map), destination, mbarrier, ctas, x, y, z);
}
inline void tma_store(const TensorMap& map, unsigned source, int x, int y, int z, int) {
  emulated::defer(emulated::Queue::kStores,
                  [&map, source, x, y, z] { emulated::store(tensor_of(map), source, x, y, z); });
}
inline void tma_store_commit_group() { emulated::commit(emulated::Queue::kStores); }
template <int pending>
void tma_store_wait_group_read() {
  emulated::wait(emulated::Queue::kStores, pending);
}
inline void prefetch_tensor_map(const TensorMap&) {}
inline void fence_proxy_async() {}

}  // namespace tessera
