// Copies a matrix whose rows start anywhere to one whose rows start at multiples of 16 bytes, which TMA can load. Entry
// point: gemm_pad_rows, below. Columns behind the last one are not read later, but written as zeros.
//
// A thread writes 16 bytes at a time. It reads them element by element; neighbours read the same cache lines.
#pragma once

#include "gemm/pad_rows_config.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"

namespace tessera {

template <GemmPadRowsConfig config>
__forceinline__ void gemm_pad_rows(const GemmPadRowsParams& p) {
  pdl_wait_and_launch_dependents();
  const unsigned long long first =
      static_cast<unsigned long long>(blockIdx.x) * blockDim.x * config.chunks + threadIdx.x;
  Words4 words[config.chunks];
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) {
    const unsigned long long index = first + i * blockDim.x;
    const Index row = static_cast<Index>(index / p.row_chunks);
    const int column = static_cast<int>(index % p.row_chunks) * 8;
    const Bits16* from = static_cast<const Bits16*>(p.from.data) + row * p.from.row_stride + column;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const bool low = row < p.rows && column + 2 * w < p.columns;
      const bool high = row < p.rows && column + 2 * w + 1 < p.columns;
      words[i].word[w] = static_cast<unsigned>(load_read_only(from + 2 * w, low)) |
                         static_cast<unsigned>(load_read_only(from + 2 * w + 1, high)) << 16;
    }
  }
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) {
    const unsigned long long index = first + i * blockDim.x;
    const Index row = static_cast<Index>(index / p.row_chunks);
    const int column = static_cast<int>(index % p.row_chunks) * 8;
    if (row < p.rows) store_16(static_cast<Bits16*>(p.to.data) + row * p.to.row_stride + column, words[i]);
  }
}

}  // namespace tessera
