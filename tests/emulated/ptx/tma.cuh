// Takes the place of kernels/ptx/tma.cuh (device.h).
#pragma once

#include "device.h"
#include "tile/tensor_map.h"

namespace tessera {

// What the emulated driver leaves in a tensor map: the address, three strides in bytes, four extents and the box.
inline emulated::Tensor tensor_of(const TensorMap& map) {
  const auto* const words = map.words;
  emulated::Tensor t = {reinterpret_cast<unsigned short*>(words[0]), {}, {1}, {}};
  for (int i = 0; i < 4; ++i) {
    if (i > 0) t.strides[i] = static_cast<long>(words[i]) / 2;
    t.extents[i] = static_cast<long>(words[4 + i]);
    t.box[i] = static_cast<int>(words[8 + i]);
  }
  return t;
}
inline TensorMap map_of(const emulated::Tensor& t) {
  TensorMap map = {{reinterpret_cast<unsigned long long>(t.data)}};
  for (int i = 0; i < 4; ++i) {
    if (i > 0) map.words[i] = static_cast<unsigned long long>(t.strides[i]) * 2;
    map.words[4 + i] = static_cast<unsigned long long>(t.extents[i]);
    map.words[8 + i] = static_cast<unsigned long long>(t.box[i]);
  }
  return map;
}

inline void tma_load(unsigned destination, const TensorMap& map, unsigned mbarrier, int x, int y, int z, int w) {
  emulated::load(tensor_of(map), destination, mbarrier, 1u << emulated::cluster_rank(), {x, y, z, w});
}
inline void tma_load_multicast(unsigned destination, const TensorMap& map, unsigned mbarrier, unsigned short ctas,
                               int x, int y, int z, int w) {
  emulated::load(tensor_of(map), destination, mbarrier, ctas, {x, y, z, w});
}
inline void tma_store(const TensorMap& map, unsigned source, int x, int y, int z, int w) {
  emulated::defer(emulated::Queue::kStores, [&map, source, x, y, z, w] {
    emulated::store(tensor_of(map), source, {x, y, z, w});
  });
}
inline void tma_store_commit_group() { emulated::commit(emulated::Queue::kStores); }
template <int pending>
void tma_store_wait_group_read() {
  emulated::wait(emulated::Queue::kStores, pending);
}
inline void prefetch_tensor_map(const TensorMap&) {}
inline void fence_proxy_async() { emulated::fence_async(); }

}  // namespace tessera
