// Tensor maps: how the copy engine of sm_90 finds boxes of a tensor (contract/tensor_map.h).
#pragma once

#include <array>
#include <cstdint>

#include "contract/tensor_map.h"
#include "ops/status.h"

namespace tessera::cuda {

// A 16-bit tensor of four axes, the first contiguous, and the box of columns x rows of its first two that a copy takes.
// Boxes lie in shared memory with the swizzle of their width. What is outside of the tensor comes as zeros.
struct TensorBox {
  std::uintptr_t address = 0;  // a multiple of 16; may be outside of the tensor, if no row there is asked for
  std::array<std::uint64_t, 4> extents{};  // elements, each from 1 to 2^32
  std::array<std::uint64_t, 3> strides{};  // bytes, of the second axis and on: multiples of 16 below 2^40
  std::uint32_t columns = 0;               // 64, 32 or 16
  std::uint32_t rows = 0;                  // 1 to 256
  std::uint32_t layers = 1;                // of the third axis, 1 to 256

  bool operator==(const TensorBox&) const = default;
};

// Host work alone, in any current context; TESSERA_UNSUPPORTED where the driver is too old to know tensor maps. A
// thread remembers the maps that it asked for last, and gets one again without the driver.
Result<TensorMap> encode(const TensorBox& box);

}  // namespace tessera::cuda
