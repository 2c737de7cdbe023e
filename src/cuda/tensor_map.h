// Tensor maps, which describe to sm_90's TMA how to find boxes of a tensor (tile/tensor_map.h).
#pragma once

#include <array>
#include <cstdint>

#include "base/status.h"
#include "tile/tensor_map.h"

namespace tessera::cuda {

// A 16-bit tensor with four axes, the first contiguous, and the box of columns x rows x layers that a TMA load copies.
// Boxes lie in shared memory with the swizzle of their width. Elements outside of the tensor are loaded as zeros.
struct TensorBox {
  std::uintptr_t address = 0;              // a multiple of 16; may be outside of the tensor if no row there is loaded
  std::array<std::uint64_t, 4> extents{};  // elements, each from 1 to 2^32
  std::array<std::uint64_t, 3> strides{};  // bytes, of the second axis and on: multiples of 16 below 2^40
  std::uint32_t columns = 0;               // 64, 32 or 16
  std::uint32_t rows = 0;                  // 1 to 256
  std::uint32_t layers = 1;                // of the third axis, 1 to 256
  bool promotes = true;                    // a load brings the whole 256 bytes around it into L2

  bool operator==(const TensorBox&) const = default;
};

// Host work only, in any current context; TESSERA_UNSUPPORTED if the driver is too old for tensor maps. Each thread
// caches the maps that it encoded last.
Result<TensorMap> encode(const TensorBox& box);

}  // namespace tessera::cuda
