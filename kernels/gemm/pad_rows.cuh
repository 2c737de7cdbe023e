// Copies a matrix whose rows start anywhere to one whose rows start at multiples of 16 bytes, which TMA can load. Entry
// point: gemm_pad_rows, below. Columns behind the last one are not read later, but written as zeros.
//
// A thread writes 16 bytes at a time, which lie across two aligned chunks of the matrix: it loads both and shifts. The second
// one is its neighbour's first, so it is in L1. At the edges of the matrix it reads element by element.
#pragma once

#include "gemm/pad_rows_config.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/shift.cuh"

namespace tessera {

template <GemmPadRowsConfig config>
__forceinline__ void gemm_pad_rows(const GemmPadRowsParams& p) {
  pdl_wait_and_launch_dependents();
  const unsigned long long first =
      static_cast<unsigned long long>(blockIdx.x) * blockDim.x * config.chunks + threadIdx.x;
  const auto* data = static_cast<const Bits16*>(p.from.data);
  const Bits16* end = data + (p.rows - 1) * p.from.row_stride + p.columns;
  Words4 own[config.chunks], behind[config.chunks];
  int shift[config.chunks];
  bool whole[config.chunks];
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) {
    const unsigned long long index = first + i * blockDim.x;
    const Index row = static_cast<Index>(index / p.row_chunks);
    const int column = static_cast<int>(index % p.row_chunks) * 8;
    const Bits16* from = data + row * p.from.row_stride + column;
    shift[i] = static_cast<int>(reinterpret_cast<unsigned long long>(from) / 2 % 8);
    const Bits16* before = from - shift[i];
    whole[i] = row < p.rows && column + 8 <= p.columns && before >= data && before + 16 <= end;
    own[i] = load_16(before, whole[i]);
    behind[i] = load_16(before + 8, whole[i]);
  }
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) {
    const unsigned long long index = first + i * blockDim.x;
    const Index row = static_cast<Index>(index / p.row_chunks);
    const int column = static_cast<int>(index % p.row_chunks) * 8;
    if (row >= p.rows) continue;
    Words4 words = eight_of_sixteen(own[i], behind[i], shift[i]);
    if (!whole[i]) {
      const Bits16* from = data + row * p.from.row_stride + column;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        words.word[w] = static_cast<unsigned>(load_read_only(from + 2 * w, column + 2 * w < p.columns)) |
                        static_cast<unsigned>(load_read_only(from + 2 * w + 1, column + 2 * w + 1 < p.columns)) << 16;
      }
    }
    store_16(static_cast<Bits16*>(p.to.data) + row * p.to.row_stride + column, words);
  }
}

}  // namespace tessera
