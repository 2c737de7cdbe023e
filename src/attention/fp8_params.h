// Params of e4m3 tensors, filled from a problem's arguments.
#pragma once

#include <cstdint>

#include "attention/fp8.h"
#include "attention/problem.h"

namespace tessera::attention {

// For loads, an e4m3 tensor is a 16-bit tensor of half as many columns.
inline TensorView halved(const TensorView& view) {
  return {view.data, view.batch_stride / 2, view.seq_stride / 2, view.head_stride / 2};
}

// block: rows that share a scale; 0: all.
inline RowScales scales_of(const ScaleView& view, std::int64_t block) {
  constexpr int kWhole = 31;
  return {view.data, {view.batch_stride, view.head_stride}, block == 0 ? kWhole : block == 64 ? 6 : 7};
}

}  // namespace tessera::attention
