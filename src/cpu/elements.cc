#include "cpu/elements.h"

#include <algorithm>

namespace tessera::cpu {

TESSERA_CLONED void load_row(DType dtype, const void* data, std::int64_t at, std::int64_t count, float* to) {
  if (dtype == DType::kFloat32) {
    std::copy_n(static_cast<const float*>(data) + at, count, to);  // unlike memcpy, takes null pointers if count is 0
    return;
  }
  const std::uint16_t* from = static_cast<const std::uint16_t*>(data) + at;
  if (dtype == DType::kBFloat16) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = float_of_bfloat(from[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) to[i] = float_of_half(from[i]);
  }
}

TESSERA_CLONED void store_row(DType dtype, void* data, std::int64_t at, std::int64_t count, const float* from) {
  if (dtype == DType::kFloat32) {
    std::copy_n(from, count, static_cast<float*>(data) + at);
    return;
  }
  std::uint16_t* to = static_cast<std::uint16_t*>(data) + at;
  if (dtype == DType::kBFloat16) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = bfloat_of(from[i]);
  } else {
    for (std::int64_t i = 0; i < count; ++i) to[i] = half_of(from[i]);
  }
}

}  // namespace tessera::cpu
