// The two products of tile/products.cuh with a B of e4m3, which is converted to fp16 in registers, exactly; A and X are fp16.
//
// B's tile has two values in each 16-bit column, so that ldmatrix brings four of a row, or two of two rows, to a lane, and
// mma's operands follow the order in which they come:
//
//   rows_by_e4m3_rows:    in every 16 columns, the reduction runs in the order of interleaved_pair(), as A must have it
//   add_by_e4m3_columns:  of every 16 columns of C, the first tile of 8 has the even ones and the second the odd ones, until
//                         order_columns() has given each lane columns 4 t and 4 t + 1 of the first, and the next two of the second
#pragma once

#include "tile/products.cuh"

namespace tessera {

// The value pairs of a word of four.
__forceinline__ void halves_from_e4m3(unsigned word, unsigned& low, unsigned& high) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}\n"
      : "=r"(low), "=r"(high)
      : "r"(word));
}

// B of e4m3 in one step of 32 along the reduction dimension, or of 16 at its end.
template <int row_tiles, int column_tiles, class Rows, class TileB>
__forceinline__ void rows_by_e4m3_rows_step(float (&x)[row_tiles][column_tiles][4], const Rows& rows,
                                            const TileB& tile_b, int b_row, int step, bool is_first, int lane) {
  const bool both = step * 2 + 1 < TileB::kChunks;
  unsigned a[2][row_tiles][4];
  rows.get(a[0], step * 2, lane);
  if (both) rows.get(a[1], step * 2 + 1, lane);
  const unsigned from = both ? tile_b.address(lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2)
                             : tile_b.address(lane % 16, TileB::kChunks - 1);
#pragma unroll
  for (int n = 0; n < column_tiles; n += 2) {
    unsigned b[2][2] = {};  // [column tile][half of the step]
    if (both) {
      unsigned loaded[4];
      ldmatrix_x4(loaded, from + (b_row + n * 8) * TileB::pitch(step * 2));
      b[0][0] = loaded[0], b[0][1] = loaded[1], b[1][0] = loaded[2], b[1][1] = loaded[3];
    } else {
      unsigned loaded[2];
      ldmatrix_x2(loaded, from + (b_row + n * 8) * TileB::pitch(step * 2));
      b[0][0] = loaded[0], b[1][0] = loaded[1];
    }
#pragma unroll
    for (int half = 0; half < (both ? 2 : 1); ++half) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        unsigned low, high;
        halves_from_e4m3(b[j][half], low, high);
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          const float zeros[4] = {};
          is_first&& half == 0 ? mma_k16<DType::kFloat16>(x[m][n + j], a[half][m], low, high, zeros)
                               : mma_k16<DType::kFloat16>(x[m][n + j], a[half][m], low, high);
        }
      }
    }
  }
}

// X = A B^T. in_halves: as for rows_by_rows.
template <bool in_halves, int row_tiles, int column_tiles, class Rows, class TileB>
__forceinline__ void rows_by_e4m3_rows(float (&x)[row_tiles][column_tiles][4], const Rows& rows, const TileB& tile_b,
                                       int b_row, int lane) {
  constexpr int kSteps = (TileB::kChunks + 1) / 2;
  constexpr int kHalf = in_halves ? (kSteps + 1) / 2 : kSteps;
#pragma unroll
  for (int step = 0; step < kHalf; ++step) {
    rows_by_e4m3_rows_step(x, rows, tile_b, b_row, step, step == 0, lane);
  }
  if constexpr (kHalf < kSteps) {
    float rest[row_tiles][column_tiles][4];
#pragma unroll
    for (int step = kHalf; step < kSteps; ++step) {
      rows_by_e4m3_rows_step(rest, rows, tile_b, b_row, step, step == kHalf, lane);
    }
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < column_tiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[m][n][i] += rest[m][n][i];
      }
    }
  }
}

// Where the rows of A have pair `pair` of 8 in every 16 columns.
constexpr int interleaved_pair(int pair) { return pair / 2 + pair % 2 * 4; }

// C += X B.
template <int row_tiles, int depth, int room, class TileB>
__forceinline__ void add_by_e4m3_columns(float (&c)[row_tiles][room][4], const unsigned (&x)[row_tiles][depth][4],
                                         const TileB& tile_b, int b_row, int lane) {
  static_assert(2 * TileB::kChunks <= room);
#pragma unroll
  for (int chunk = 0; chunk < TileB::kChunks; chunk += 2) {
    const bool both = chunk + 1 < TileB::kChunks;
    const unsigned from = tile_b.address(lane % 16, both ? chunk + lane / 16 : chunk);
#pragma unroll
    for (int k = 0; k < depth; ++k) {
      unsigned b[2][2] = {};  // [chunk][rows of eight]
      if (both) {
        unsigned loaded[4];
        ldmatrix_x4_trans(loaded, from + (b_row + k * 16) * TileB::pitch(chunk));
        b[0][0] = loaded[0], b[0][1] = loaded[1], b[1][0] = loaded[2], b[1][1] = loaded[3];
      } else {
        unsigned loaded[2];
        ldmatrix_x2_trans(loaded, from + (b_row + k * 16) * TileB::pitch(chunk));
        b[0][0] = loaded[0], b[0][1] = loaded[1];
      }
#pragma unroll
      for (int j = 0; j < (both ? 2 : 1); ++j) {
        unsigned even[2], odd[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Two columns of two rows: from row by row to column by column.
          halves_from_e4m3(__byte_perm(b[j][i], 0, 0x3120), even[i], odd[i]);
        }
        const int n = (chunk + j) * 2;
#pragma unroll
        for (int m = 0; m < row_tiles; ++m) {
          mma_k16<DType::kFloat16>(c[m][n], x[m][k], even[0], even[1]);
          mma_k16<DType::kFloat16>(c[m][n + 1], x[m][k], odd[0], odd[1]);
        }
      }
    }
  }
}

template <int row_tiles, int room>
__forceinline__ void order_columns(float (&c)[row_tiles][room][4]) {
#pragma unroll
  for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
    for (int n = 0; n + 1 < room; n += 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float even = c[m][n][half * 2 + 1];
        c[m][n][half * 2 + 1] = c[m][n + 1][half * 2];
        c[m][n + 1][half * 2] = even;
      }
    }
  }
}

// The first column that a lane has in a tile of 8, after order_columns().
__forceinline__ int ordered_column(int n, int lane) { return n / 2 * 16 + lane % 4 * 4 + n % 2 * 2; }

}  // namespace tessera
