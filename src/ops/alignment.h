// Whether a tensor's rows may be read several elements at a time.
#pragma once

#include <cstdint>

#include "ops/attention.h"

namespace tessera {

// True where every row starts at a multiple of `vector` elements. The stride of a dim of one element does not matter.
inline bool allows_vectors(const TensorView& view, std::int64_t batch, std::int64_t seq, std::int64_t heads,
                           std::int64_t element_bytes, std::int64_t vector) {
  const auto fits = [vector](std::int64_t extent, std::int64_t stride) { return extent <= 1 || stride % vector == 0; };
  return reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(element_bytes * vector) == 0 &&
         fits(batch, view.batch_stride) && fits(seq, view.seq_stride) && fits(heads, view.head_stride);
}

}  // namespace tessera
