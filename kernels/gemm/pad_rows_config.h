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

constexpr int kMostCopies = 8;

struct GemmPadRowsParams {
  GemmMatrix from;  // [rows, columns] of 16-bit elements
  GemmMatrix to;    // rows at multiples of 16 bytes; its groups are copies
  Index rows;
  int columns;
  int copies;
  int shift[kMostCopies];  // the column of a copy that has the matrix's first one
  unsigned row_chunks;     // of 16 bytes, in a row of a copy
};

}  // namespace tessera
