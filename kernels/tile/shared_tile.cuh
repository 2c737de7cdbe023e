// A [rows, dim] tile of 16-bit values in shared memory, and how it gets there.
//
// Rows lie one after the other, in 16-byte chunks, unpadded. ldmatrix reads one chunk column of eight rows at a time;
// those eight must fall into the eight different 16-byte bank groups. With c chunks a row and g = gcd(c, 8), row r
// starts at bank group r * c mod 8, which repeats every 8 / g rows; so chunk indices are XORed with (r / (8 / g)) mod
// g. That stays inside the row because g divides c, and it serves every head dim that is a multiple of 8.
#pragma once

#include "ptx/shared.cuh"

namespace tessera {

constexpr int greatest_common_divisor(int a, int b) { return b == 0 ? a : greatest_common_divisor(b, a % b); }

template <int rows, int dim>
struct SharedTile {
  static constexpr int kRows = rows;
  static constexpr int kDim = dim;
  static constexpr int kChunks = dim / 8;
  static constexpr int kPitch = dim * 2;  // bytes from row to row
  static constexpr int kBytes = rows * kPitch;
  static constexpr int kSwizzle = greatest_common_divisor(kChunks, 8);
  static_assert(dim % 8 == 0 && rows % 8 == 0);

  unsigned base;  // address in shared memory, a multiple of 128

  // Eight rows on, the swizzle is the same: address(row + 8 * n, chunk) = address(row, chunk) + 8 * n * kPitch, which
  // an instruction can take as a constant.
  __forceinline__ unsigned address(int row, int chunk) const {
    const int swizzled = chunk ^ ((row / (8 / kSwizzle)) & (kSwizzle - 1));
    return base + static_cast<unsigned>(row * kChunks + swizzled) * 16;
  }
};

// A value that the compiler may not carry over from an earlier use: addresses made from it are computed where they are
// needed instead of being kept in registers across the loop, which are dearer.
__forceinline__ int recomputed(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Moves rows of a [length, dim] matrix in global memory into a tile, rows beyond `length` as zeros, by all threads of a
// block. begin() starts the loads and end() sees them through: the caller computes in between, and puts a barrier after
// end(). On sm_80 and up the bytes travel by cp.async; before that, in registers, and end() stores them.
// A thread keeps to one chunk column and takes every kRowsPerPass-th row; a few threads idle where the column count
// does not divide theirs. `vector` is how many elements one load takes: 8, or 1 where pointers or strides are not
// multiples of 16 bytes.
template <class Tile, int threads, int vector>
struct TileLoader {
  static constexpr int kRowsPerPass = threads / Tile::kChunks < Tile::kRows ? threads / Tile::kChunks : Tile::kRows;
  static constexpr int kPasses = (Tile::kRows + kRowsPerPass - 1) / kRowsPerPass;
  static_assert(kRowsPerPass >= 1);
#if __CUDA_ARCH__ >= 800
  static constexpr bool kAsync = vector == 8;
#else
  static constexpr bool kAsync = false;
#endif

  Words4 staged[kAsync ? 1 : kPasses];

  // source: the matrix's row 0.
  __forceinline__ void begin(const Tile& tile, const Bits16* source, Index row_stride, int first_row, int length) {
    const int thread = recomputed(threadIdx.x);
    const int chunk = thread % Tile::kChunks;
    int row = thread / Tile::kChunks;
    const Bits16* from = source + (first_row + row) * row_stride + chunk * 8;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool mine = row < (pass + 1) * kRowsPerPass && row < Tile::kRows;
      const bool wanted = first_row + row < length;
      if constexpr (kAsync) {
#if __CUDA_ARCH__ >= 800
        if (mine) copy_async_16(tile.address(row, chunk), from, wanted);
#endif
      } else if constexpr (vector == 8) {
        staged[pass] = load_16(from, mine && wanted);
      } else {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          staged[pass].word[w] = static_cast<unsigned>(load_read_only(from + 2 * w, mine && wanted)) |
                                 static_cast<unsigned>(load_read_only(from + 2 * w + 1, mine && wanted)) << 16;
        }
      }
      row += kRowsPerPass;
      from += kRowsPerPass * row_stride;
    }
#if __CUDA_ARCH__ >= 800
    if constexpr (kAsync) copy_async_commit();
#endif
  }

  __forceinline__ void end(const Tile& tile) {
    if constexpr (kAsync) {
#if __CUDA_ARCH__ >= 800
      copy_async_wait<0>();
#endif
    } else {
      const int thread = recomputed(threadIdx.x);
      const int chunk = thread % Tile::kChunks;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int row = thread / Tile::kChunks + pass * kRowsPerPass;
        if (row < (pass + 1) * kRowsPerPass && row < Tile::kRows) {
          store_shared_16(tile.address(row, chunk), staged[pass]);
        }
      }
    }
  }
};

// One fp32 value of a thread, the same way. What is not wanted comes as 0.
template <bool async>
struct ValueLoader {
  float staged;

  __forceinline__ void begin(unsigned destination, const float* source, bool mine, bool wanted) {
    if constexpr (async) {
#if __CUDA_ARCH__ >= 800
      if (mine) copy_async_4(destination, source, wanted);
#endif
    } else {
      staged = load_read_only(source, mine && wanted);
    }
  }
  __forceinline__ void end(unsigned destination, bool mine) {
    if constexpr (!async) {
      if (mine) store_shared_4(destination, bits_from_float(staged));
    }
  }
};

// A warp's rows of a tile, to rows of a [length, dim] matrix in global memory: whole lines at a time.
template <int vector, int rows, class Tile>
__forceinline__ void store_rows(const Tile& tile, int first_row, Bits16* out, Index row_stride, int first, int length,
                                int lane) {
#pragma unroll 4
  for (int index = lane; index < rows * Tile::kChunks; index += 32) {
    const int row = first_row + index / Tile::kChunks;
    const int chunk = index % Tile::kChunks;
    if (first + row >= length) continue;
    const Words4 words = load_shared_16(tile.address(row, chunk));
    Bits16* to = out + (first + row) * row_stride + chunk * 8;
    if constexpr (vector == 8) {
      store_16(to, words);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = static_cast<Bits16>(words.word[i / 2] >> (i % 2 * 16));
    }
  }
}

}  // namespace tessera
