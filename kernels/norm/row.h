// What the kernels of the norm family share with the host: rows in memory, and how threads share a row.
#pragma once

#include "tile/types.h"

namespace tessera {

// Rows of a matrix with a contiguous last dim; the stride counts elements.
struct NormMatrix {
  void* data;
  Index row_stride;
};

constexpr int norm_element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }
constexpr int norm_chunk_elements(DType dtype) { return 16 / norm_element_bytes(dtype); }

// Columns that the threads of a row hold in registers.
template <class Config>
constexpr int norm_tile_columns(const Config& config) {
  return config.row_threads * config.chunks * norm_chunk_elements(config.dtype);
}

}  // namespace tessera
