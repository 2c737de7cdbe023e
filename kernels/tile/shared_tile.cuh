// A [rows, dim] tile of 16-bit values in shared memory, and its loads and stores.
//
// Rows are contiguous and unpadded, in 16-byte chunks. ldmatrix reads one chunk column of eight rows at a time; those
// eight chunks must fall into eight different 16-byte bank groups. With c chunks per row and g = gcd(c, 8), row r
// starts at bank group r * c mod 8, which repeats every 8 / g rows; so chunk indices are XORed with (r / (8 / g)) mod
// g. The result stays inside the row because g divides c, and it works for every head dim that is a multiple of 8.
#pragma once

#include "ptx/shared.cuh"
#include "tile/tensor_map.h"

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

  // The swizzle repeats every eight rows: address(row + 8 * n, chunk) = address(row, chunk) + 8 * n * pitch(chunk),
  // which an instruction can encode as an immediate.
  static constexpr int pitch(int) { return kPitch; }
  __forceinline__ unsigned address(int row, int chunk) const {
    const int swizzled = chunk ^ ((row / (8 / kSwizzle)) & (kSwizzle - 1));
    return base + static_cast<unsigned>(row * kChunks + swizzled) * 16;
  }
};

// The same tile as TMA writes it: in swizzle atoms as narrow as the dim allows (tile/tensor_map.h). Pairs of chunks from
// an even one on lie in one atom.
template <int rows, int dim>
struct AtomTile {
  static constexpr int kRows = rows;
  static constexpr int kDim = dim;
  static constexpr int kChunks = dim / 8;
  static constexpr int kMinAtom = 16;
  static constexpr int kBytes = tile_bytes(rows, dim, kMinAtom);
  static_assert(dim % 16 == 0 && rows % 8 == 0);

  unsigned base;  // a multiple of kTileAlignment

  static constexpr int pitch(int chunk) { return atom_at(dim, kMinAtom, chunk / 2 * 16).width * 2; }
  __forceinline__ unsigned address(int row, int chunk) const {
    return base + static_cast<unsigned>(offset_in_tile(row, chunk * 8, rows, dim, kMinAtom));
  }
};

// Hides a value's origin from the compiler: addresses derived from the result are recomputed where they are used
// instead of being kept in registers across the loop, because registers are the scarcer resource.
__forceinline__ int recomputed(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Loads rows of a [length, dim] matrix in global memory into a tile, with zeros for rows beyond `length`. All threads
// of the CTA take part. begin() issues the loads and end() completes them: the caller computes in between, and adds a
// CTA-wide barrier after end(). On sm_80 and newer the loads are cp.async; on older architectures they go through
// registers, which end() stores. Each thread loads one chunk column of every kRowsPerPass-th row; a few threads are
// idle if the number of columns does not divide the number of threads. `vector` is the number of elements per load: 8,
// or 1 if pointers or strides are not multiples of 16 bytes.
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

  // source: row 0 of the matrix.
  __forceinline__ void begin(const Tile& tile, const Bits16* source, Index row_stride, int first_row, int length) {
    const int thread = recomputed(threadIdx.x);
    const int chunk = thread % Tile::kChunks;
    int row = thread / Tile::kChunks;
    const Bits16* from = source + (first_row + row) * row_stride + chunk * 8;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool mine = row < (pass + 1) * kRowsPerPass && row < Tile::kRows;
      const bool wanted = first_row + row < length;
      load(tile, pass, row, chunk, from, mine, wanted);
      row += kRowsPerPass;
      from += kRowsPerPass * row_stride;
    }
#if __CUDA_ARCH__ >= 800
    if constexpr (kAsync) cp_async_commit_group();
#endif
  }
  // The same for rows that are anywhere: rows(row, wanted) is a row's address, or any valid one if it is not wanted.
  template <class Rows>
  __forceinline__ void begin(const Tile& tile, const Rows& rows, int first_row, int length) {
    const int thread = recomputed(threadIdx.x);
    const int chunk = thread % Tile::kChunks;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = thread / Tile::kChunks + pass * kRowsPerPass;
      const bool mine = row < (pass + 1) * kRowsPerPass && row < Tile::kRows;
      const bool wanted = first_row + row < length;
      load(tile, pass, row, chunk, rows(first_row + row, mine && wanted) + chunk * 8, mine, wanted);
    }
#if __CUDA_ARCH__ >= 800
    if constexpr (kAsync) cp_async_commit_group();
#endif
  }

  __forceinline__ void end(const Tile& tile) {
    if constexpr (kAsync) {
#if __CUDA_ARCH__ >= 800
      cp_async_wait_group<0>();
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

 private:
  __forceinline__ void load(const Tile& tile, int pass, int row, int chunk, const Bits16* from, bool mine,
                            bool wanted) {
    if constexpr (kAsync) {
#if __CUDA_ARCH__ >= 800
      if (mine) cp_async_16(tile.address(row, chunk), from, wanted);
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
  }
};

// Loads one fp32 value per thread in the same way; 0 if it is not wanted.
template <bool async>
struct ValueLoader {
  float staged;

  __forceinline__ void begin(unsigned destination, const float* source, bool mine, bool wanted) {
    if constexpr (async) {
#if __CUDA_ARCH__ >= 800
      if (mine) cp_async_4(destination, source, wanted);
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

// Stores a warp's rows of a tile to rows of a [length, dim] matrix in global memory, in full cache lines.
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
