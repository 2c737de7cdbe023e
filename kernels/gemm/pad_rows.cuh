// Copies a matrix whose rows start anywhere to one whose rows start at multiples of 16 bytes, which TMA can load. Entry
// point: gemm_pad_rows, below. There may be several copies, with their columns shifted; a thread writes the same chunks of every
// gridDim.y-th. What a copy has before the matrix's columns and behind them is zero.
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
__forceinline__ void gemm_pad_copy(const GemmPadRowsParams& p, int copy) {
  const unsigned long long first =
      static_cast<unsigned long long>(blockIdx.x) * blockDim.x * config.chunks + threadIdx.x;
  const auto* data = static_cast<const Bits16*>(p.from.data);
  const Bits16* end = data + (p.rows - 1) * p.from.row_stride + p.columns;
  Words4 own[config.chunks], behind[config.chunks];
  int shift[config.chunks];
  bool whole[config.chunks];
  const int before_first = p.shift[copy];
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) {
    const unsigned long long index = first + i * blockDim.x;
    const Index row = static_cast<Index>(index / p.row_chunks);
    const int column = static_cast<int>(index % p.row_chunks) * 8 - before_first;
    const Bits16* from = data + row * p.from.row_stride + column;
    shift[i] = static_cast<int>(reinterpret_cast<unsigned long long>(from) / 2 % 8);
    const Bits16* before = from - shift[i];
    whole[i] = row < p.rows && column >= 0 && column + 8 <= p.columns && before >= data && before + 16 <= end;
    own[i] = load_16(before, whole[i]);
    behind[i] = load_16(before + 8, whole[i]);
  }
#pragma unroll
  for (int i = 0; i < config.chunks; ++i) {
    const unsigned long long index = first + i * blockDim.x;
    const Index row = static_cast<Index>(index / p.row_chunks);
    const int column = static_cast<int>(index % p.row_chunks) * 8 - before_first;
    if (row >= p.rows) continue;
    Words4 words = eight_of_sixteen(own[i], behind[i], shift[i]);
    if (!whole[i]) {
      const Bits16* from = data + row * p.from.row_stride + column;
      const auto bits = [&](int e) {
        const bool exists = static_cast<unsigned>(column + e) < static_cast<unsigned>(p.columns);
        return static_cast<unsigned>(load_read_only(from + e, exists));
      };
#pragma unroll
      for (int w = 0; w < 4; ++w) words.word[w] = bits(2 * w) | bits(2 * w + 1) << 16;
    }
    store_16(static_cast<Bits16*>(p.to.data) + copy * p.to.group_stride + row * p.to.row_stride + column + before_first,
             words);
  }
}

template <GemmPadRowsConfig config>
__forceinline__ void gemm_pad_rows(const GemmPadRowsParams& p) {
  pdl_wait_and_launch_dependents();
  for (int copy = static_cast<int>(blockIdx.y); copy < p.copies; copy += static_cast<int>(gridDim.y)) {
    gemm_pad_copy<config>(p, copy);
  }
}

}  // namespace tessera
