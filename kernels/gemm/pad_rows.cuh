// Copies a matrix whose rows start anywhere to one whose rows start at multiples of 16 bytes, which TMA can load. Entry
// point: gemm_pad_rows, below. There may be several copies, with their columns shifted by 0 to 7. What a copy has before the
// matrix's columns and behind them is zero.
//
// A thread writes the same 16 bytes of every gridDim.y-th copy. In the matrix they lie across two aligned chunks, and those of
// all copies across three, which are loaded once. At the ends of a row a chunk is read element by element.
#pragma once

#include "gemm/pad_rows_config.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/shift.cuh"

namespace tessera {

// Eight elements of a row from `column` on, at a multiple of 16 bytes. Columns that the row does not have are zero.
__forceinline__ Words4 gemm_pad_load(const GemmPadRowsParams& p, const Bits16* row, int column, bool wanted) {
  Words4 words = load_16(row + column, wanted && column >= 0 && column + 8 <= p.columns);
  const bool starts = column < 0 && column + 8 > 0, ends = column < p.columns && column + 8 > p.columns;
  if (wanted && (starts || ends)) {
    const auto bits = [&](int e) {
      const bool exists = static_cast<unsigned>(column + e) < static_cast<unsigned>(p.columns);
      return static_cast<unsigned>(load_read_only(row + column + e, exists));
    };
#pragma unroll
    for (int w = 0; w < 4; ++w) words.word[w] = bits(2 * w) | bits(2 * w + 1) << 16;
  }
  return words;
}

template <GemmPadRowsConfig config>
__forceinline__ void gemm_pad_rows(const GemmPadRowsParams& p) {
  pdl_wait_and_launch_dependents();
  const unsigned long long first =
      static_cast<unsigned long long>(blockIdx.x) * blockDim.x * config.chunks + threadIdx.x;
  Words4 words[config.chunks][3];
  int before[config.chunks];  // elements from the second chunk's beginning to the column of a copy that is not shifted
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) {
    const unsigned long long index = first + i * blockDim.x;
    const Index at = static_cast<Index>(index / p.row_chunks);
    const int column = static_cast<int>(index % p.row_chunks) * 8;
    const Bits16* row = static_cast<const Bits16*>(p.from.data) + at * p.from.row_stride;
    before[i] = static_cast<int>(reinterpret_cast<unsigned long long>(row) / 2 % 8);
#pragma unroll
    for (int c = 0; c < 3; ++c) {
      words[i][c] = gemm_pad_load(p, row, column - before[i] + (c - 1) * 8, at < p.rows && (c > 0 || p.copies > 1));
    }
  }
  for (int copy = static_cast<int>(blockIdx.y); copy < p.copies; copy += static_cast<int>(gridDim.y)) {
#pragma unroll
    for (int i = 0; i < config.chunks; ++i) {
      const unsigned long long index = first + i * blockDim.x;
      const Index at = static_cast<Index>(index / p.row_chunks);
      if (at >= p.rows) continue;
      const int shift = before[i] - p.shift[copy];
      const Words4 chunk = shift >= 0 ? eight_of_sixteen(words[i][1], words[i][2], shift)
                                      : eight_of_sixteen(words[i][0], words[i][1], shift + 8);
      store_16(static_cast<Bits16*>(p.to.data) + copy * p.to.group_stride + index * 8, chunk);
    }
  }
}

}  // namespace tessera
