// What kernels of e4m3 and their host sides share: scales, and V as wgmma reads it.
#pragma once

#include "tile/types.h"

namespace tessera {

// For loads and swizzles, e4m3 tensors are 16-bit tensors of half as many columns.
constexpr int fp8_columns(int dim) { return dim / 2; }

// Keys of a scale of K that a tile distinguishes.
constexpr int kScaleKeys = 64;

// V is read transposed, [Dv, keys], with its keys in the order in which wgmma takes P from the accumulators of S: of each
// 16 keys, 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15. A sequence of a packed batch starts at a multiple of 16 keys.
constexpr int kValueGroup = 16;
constexpr int value_key(int column) { return column / 2 % 2 * 8 + column / 4 % 4 * 2 + column % 2; }  // of a group
constexpr Index value_start(Index cu_seqlen, Index batch) { return (cu_seqlen / kValueGroup + batch) * kValueGroup; }
constexpr Index value_length(Index keys) { return (keys + kValueGroup - 1) / kValueGroup * kValueGroup; }

// Scales of a tensor: that of a row is data[batch * strides.batch + head * strides.head + (row >> shift)].
struct RowScales {
  const float* data;
  RowStrides strides;  // 0 if all have the same
  int shift;           // rows of a block are 2^shift; 31: one block

  // Those of a head.
  constexpr const float* of(unsigned batch, unsigned head) const {
    return data + batch * strides.batch + head * strides.head;
  }
};

}  // namespace tessera
