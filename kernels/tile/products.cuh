// The two warp-level matrix products of attention on mma.sync. X is a strip of columns, a multiple of 16 wide.
//
//   rows_by_rows:   X[rows, strip] = start + A[rows, dim] B[strip, dim]^T    A from shared memory or from registers
//   add_by_columns: C[rows, dim] += X[rows, strip] B[strip, dim]             X as the first product left it, rounded
#pragma once

#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "tile/shared_tile.cuh"

namespace tessera {

// 16 * row_tiles rows of a tile as mma's A operand, in steps of 16 along the reduction dimension. The first kept_steps
// stay in registers.
template <class Tile, int row_tiles, int kept_steps>
struct RowOperand {
  static constexpr int kSteps = (Tile::kDim + 15) / 16;  // the last one is 8 deep if dim is not a multiple of 16

  Tile tile;
  int first_row;
  unsigned (&kept)[kept_steps > 0 ? kept_steps : 1][row_tiles][4];

  __forceinline__ void load(unsigned (&a)[row_tiles][4], int step, int lane) const {
    if (step < Tile::kDim / 16) {
      const unsigned from = tile.address(first_row + lane % 16, step * 2 + lane / 16);
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) ldmatrix_x4(a[m], from + m * 16 * Tile::pitch(step * 2));
    } else {
      const unsigned from = tile.address(first_row + lane % 16, Tile::kChunks - 1);
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        unsigned half[2];
        ldmatrix_x2(half, from + m * 16 * Tile::pitch(Tile::kChunks - 1));
        a[m][0] = half[0];
        a[m][1] = half[1];
      }
    }
  }
  // Call when the tile has been loaded.
  __forceinline__ void keep(int lane) const {
#pragma unroll
    for (int step = 0; step < kSteps && step < kept_steps; ++step) load(kept[step], step, lane);
  }
  __forceinline__ void get(unsigned (&a)[row_tiles][4], int step, int lane) const {
    if (step < kept_steps) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int i = 0; i < (step < Tile::kDim / 16 ? 4 : 2); ++i) a[m][i] = kept[step][m][i];
      }
    } else {
      load(a, step, lane);
    }
  }
};

struct FromZero {
  __forceinline__ float operator()(int, int, int) const { return 0; }
};

// One step of 16 along the reduction dimension of X = start + A B^T. start(m, n, i): the initial value of a lane's
// accumulator, used in the first step. b_row: first row of B, a multiple of 8.
template <DType dtype, int row_tiles, int column_tiles, class Rows, class TileB, class Start>
__forceinline__ void rows_by_rows_step(float (&x)[row_tiles][column_tiles][4], const Rows& rows, const TileB& tile_b,
                                       int b_row, int step, bool is_first, const Start& start, int lane) {
  unsigned a[row_tiles][4];
  rows.get(a, step, lane);
  const bool whole = step < TileB::kDim / 16;
  const unsigned from = whole ? tile_b.address(lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2)
                              : tile_b.address(lane % 16, TileB::kChunks - 1);
#pragma unroll
  for (int n = 0; n < column_tiles; n += 2) {
    unsigned b[2][2] = {};
    if (whole) {
      unsigned loaded[4];
      ldmatrix_x4(loaded, from + (b_row + n * 8) * TileB::pitch(step * 2));
      b[0][0] = loaded[0], b[0][1] = loaded[1], b[1][0] = loaded[2], b[1][1] = loaded[3];
    } else {
      unsigned loaded[2];
      ldmatrix_x2(loaded, from + (b_row + n * 8) * TileB::pitch(step * 2));
      b[0][0] = loaded[0], b[1][0] = loaded[1];
    }
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float(&d)[4] = x[m][n + j];
        if (is_first) {
          const float c[4] = {start(m, n + j, 0), start(m, n + j, 1), start(m, n + j, 2), start(m, n + j, 3)};
          whole ? mma_k16<dtype>(d, a[m], b[j][0], b[j][1], c) : mma_k8<dtype>(d, a[m][0], a[m][1], b[j][0], c);
        } else {
          whole ? mma_k16<dtype>(d, a[m], b[j][0], b[j][1]) : mma_k8<dtype>(d, a[m][0], a[m][1], b[j][0]);
        }
      }
    }
  }
}

// 16 columns of C += X B. C may be wider than B.
template <DType dtype, int row_tiles, int depth, int room, class TileB>
__forceinline__ void add_by_columns_step(float (&c)[row_tiles][room][4], const unsigned (&x)[row_tiles][depth][4],
                                         const TileB& tile_b, int b_row, int step, int lane) {
  static_assert(TileB::kChunks <= room);
  const int n = 2 * step;
  const bool both = n + 1 < TileB::kChunks;
  const unsigned from = tile_b.address(lane % 16, both ? n + lane / 16 : n);
#pragma unroll
  for (int k = 0; k < depth; ++k) {
    if (both) {
      unsigned b[4];
      ldmatrix_x4_trans(b, from + (b_row + k * 16) * TileB::pitch(n));
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        mma_k16<dtype>(c[m][n], x[m][k], b[0], b[1]);
        mma_k16<dtype>(c[m][n + 1], x[m][k], b[2], b[3]);
      }
    } else {
      unsigned b[2];
      ldmatrix_x2_trans(b, from + (b_row + k * 16) * TileB::pitch(n));
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) mma_k16<dtype>(c[m][n], x[m][k], b[0], b[1]);
    }
  }
}

// in_halves: two accumulators over half of the reduction dimension each. Tensor cores truncate sums instead of rounding
// them, so a long sum of one sign is biased towards zero; shorter sums halve the bias.
template <DType dtype, bool in_halves, int row_tiles, int column_tiles, class Rows, class TileB, class Start>
__forceinline__ void rows_by_rows(float (&x)[row_tiles][column_tiles][4], const Rows& rows, const TileB& tile_b,
                                  int b_row, const Start& start, int lane) {
  constexpr int kHalf = in_halves ? (Rows::kSteps + 1) / 2 : Rows::kSteps;
#pragma unroll
  for (int step = 0; step < kHalf; ++step) {
    rows_by_rows_step<dtype>(x, rows, tile_b, b_row, step, step == 0, start, lane);
  }
  if constexpr (kHalf < Rows::kSteps) {
    float rest[row_tiles][column_tiles][4];
#pragma unroll
    for (int step = kHalf; step < Rows::kSteps; ++step) {
      rows_by_rows_step<dtype>(rest, rows, tile_b, b_row, step, step == kHalf, FromZero{}, lane);
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

template <DType dtype, int row_tiles, int depth, int room, class TileB>
__forceinline__ void add_by_columns(float (&c)[row_tiles][room][4], const unsigned (&x)[row_tiles][depth][4],
                                    const TileB& tile_b, int b_row, int lane) {
#pragma unroll
  for (int step = 0; step < (TileB::kChunks + 1) / 2; ++step) {
    add_by_columns_step<dtype>(c, x, tile_b, b_row, step, lane);
  }
}

// Both products interleaved, for two different strips: the first is a few long dependency chains, the second many short
// ones.
template <DType dtype, int row_tiles, int column_tiles, int depth, int room, class Rows, class TileB, class Start,
          class TileC>
__forceinline__ void both_products(float (&x)[row_tiles][column_tiles][4], const Rows& rows, const TileB& tile_b,
                                   int b_row, const Start& start, float (&c)[row_tiles][room][4],
                                   const unsigned (&a)[row_tiles][depth][4], const TileC& tile_c, int c_row, int lane) {
  constexpr int kColumnSteps = (TileC::kChunks + 1) / 2;
#pragma unroll
  for (int step = 0; step < Rows::kSteps || step < kColumnSteps; ++step) {
    if (step < Rows::kSteps) rows_by_rows_step<dtype>(x, rows, tile_b, b_row, step, step == 0, start, lane);
    if (step < kColumnSteps) add_by_columns_step<dtype>(c, a, tile_c, c_row, step, lane);
  }
}

// X as the A operand of the second product.
template <DType dtype, int column_tiles>
__forceinline__ void pack_operand(unsigned (&a)[column_tiles / 2][4], const float (&x)[column_tiles][4]) {
#pragma unroll
  for (int k = 0; k < column_tiles / 2; ++k) {
    a[k][0] = pack<dtype>(x[2 * k][0], x[2 * k][1]);
    a[k][1] = pack<dtype>(x[2 * k][2], x[2 * k][3]);
    a[k][2] = pack<dtype>(x[2 * k + 1][0], x[2 * k + 1][1]);
    a[k][3] = pack<dtype>(x[2 * k + 1][2], x[2 * k + 1][3]);
  }
}

}  // namespace tessera
