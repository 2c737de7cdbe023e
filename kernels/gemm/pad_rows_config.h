// Config and Params of gemm/pad_rows.cuh.
#pragma once

#include "gemm/epilogue.h"

namespace tessera {

struct GemmPadRowsConfig {
  int chunks;  // of 16 bytes, per thread
};

template <class Visitor>
constexpr void visit_fields(const GemmPadRowsConfig& config, Visitor&& visit) {
  visit("chunks", config.chunks);
}

struct GemmPadRowsParams {
  GemmMatrix from;  // [rows, columns] of 16-bit elements
  GemmMatrix to;    // rows at multiples of 16 bytes
  Index rows;
  int columns;
  unsigned row_chunks;  // ceil(columns / 8)
};

}  // namespace tessera
