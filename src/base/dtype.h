// What the host knows about an element type (tile/types.h).
#pragma once

#include <cstddef>

#include "tile/types.h"

namespace tessera {

constexpr std::size_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
constexpr const char* name_of(DType dtype) {
  return dtype == DType::kFloat32 ? "fp32" : dtype == DType::kFloat16 ? "fp16" : "bf16";
}

}  // namespace tessera
