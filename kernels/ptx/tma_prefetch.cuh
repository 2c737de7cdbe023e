// TMA prefetch (sm_90): brings a box of a tensor into L2 before it is loaded.
#pragma once

#include "tile/tensor_map.h"

namespace tessera {

// Coordinates as for tma_load.
__forceinline__ void tma_prefetch_l2(const TensorMap& map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(x), "r"(y),
               "r"(z), "r"(w)
               : "memory");
}

}  // namespace tessera
