// Rows in chunks of eight elements (of fp32: four), at any address and of any length. A thread has the same columns in every
// row, so it keeps their weights and their gradients in registers.
//
// If all rows are aligned, a chunk is 16 bytes of the row, one load or store. If not, its elements are row_threads columns
// apart and are loaded and stored one by one; the threads of a warp then have neighbouring elements, and whole sectors are
// moved but for the ends of a row.
#pragma once

#include "norm/row.h"
#include "ptx/global.cuh"
#include "ptx/prefetch.cuh"

namespace tessera {

template <DType dtype>
struct Chunk {
  static constexpr int kElements = norm_chunk_elements(dtype);
  float value[kElements];
};

template <DType dtype>
__forceinline__ Chunk<dtype> unpacked(const Words4& words) {
  Chunk<dtype> chunk;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (dtype == DType::kFloat32) {
      chunk.value[w] = float_from_bits(words.word[w]);
    } else {
      chunk.value[2 * w] = low_to_float<dtype>(words.word[w]);
      chunk.value[2 * w + 1] = high_to_float<dtype>(words.word[w]);
    }
  }
  return chunk;
}

template <DType dtype>
__forceinline__ Words4 packed(const Chunk<dtype>& chunk) {
  Words4 words;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (dtype == DType::kFloat32) {
      words.word[w] = bits_from_float(chunk.value[w]);
    } else {
      words.word[w] = pack<dtype>(chunk.value[2 * w], chunk.value[2 * w + 1]);
    }
  }
  return words;
}

// Keeps the compiler from unpacking a chunk before this point, or from keeping what it unpacked before: a row and its
// weights fit the registers only as they are stored.
__forceinline__ void stay_packed(Words4& words) {
#pragma unroll
  for (unsigned& word : words.word) asm volatile("" : "+r"(word));
}

template <DType dtype>
__forceinline__ Words4 all_ones() {
  Chunk<dtype> ones;
#pragma unroll
  for (float& x : ones.value) x = 1.0f;
  return packed<dtype>(ones);
}

// The chunks of one thread of a row. `columns`: of the row; 0 for a row that does not exist.
template <DType dtype, bool kAligned, int kRowThreads>
struct RowChunks {
  static constexpr int kElements = norm_chunk_elements(dtype), kBytes = norm_element_bytes(dtype);
  int thread;

  __forceinline__ int column(int chunk, int element) const {
    return kAligned ? (chunk * kRowThreads + thread) * kElements + element
                    : (chunk * kElements + element) * kRowThreads + thread;
  }

  // Zeros from the end of the row on.
  __forceinline__ Words4 load(const void* row, int columns, int chunk) const {
    if constexpr (kAligned) {
      const int first = column(chunk, 0);
      return load_streaming_16(static_cast<const char*>(row) + first * kBytes, first < columns);
    } else {
      Words4 words = {};
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int at = column(chunk, e);
        if constexpr (dtype == DType::kFloat32) {
          words.word[e] = bits_from_float(load_read_only(static_cast<const float*>(row) + at, at < columns));
        } else {
          const unsigned bits = load_read_only(static_cast<const Bits16*>(row) + at, at < columns);
          words.word[e / 2] |= bits << (e % 2 * 16);
        }
      }
      return words;
    }
  }

  // Brings the chunks of all threads into L2: one of the eight that share a line asks for it.
  __forceinline__ void prefetch(const void* row, int columns, int chunk) const {
    const int first = column(chunk, 0);
    if (kAligned && thread % 8 == 0 && first < columns) prefetch_l2(static_cast<const char*>(row) + first * kBytes);
  }

  __forceinline__ void store(void* row, int columns, int chunk, const Words4& words) const {
    if constexpr (kAligned) {
      const int first = column(chunk, 0);
      if (first < columns) store_16(static_cast<char*>(row) + first * kBytes, words);
    } else {
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const int at = column(chunk, e);
        if (at >= columns) continue;
        if constexpr (dtype == DType::kFloat32) {
          static_cast<unsigned*>(row)[at] = words.word[e];
        } else {
          static_cast<Bits16*>(row)[at] = static_cast<Bits16>(words.word[e / 2] >> (e % 2 * 16));
        }
      }
    }
  }
};

// The sum over the threads of a row, in a fixed order. shared: [2][warps of the CTA]; calls alternate between its halves,
// so that one barrier per call is enough.
template <int kRowThreads>
struct RowSum {
  float (*shared)[32];
  int half = 0;

  __forceinline__ float operator()(float x) {
    constexpr int kLanes = kRowThreads < 32 ? kRowThreads : 32;
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    if constexpr (kRowThreads > 32) {
      constexpr int kWarps = kRowThreads / 32;
      const int warp = static_cast<int>(threadIdx.x) / 32;
      if (threadIdx.x % 32 == 0) shared[half][warp] = x;
      __syncthreads();
      x = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) x += shared[half][warp / kWarps * kWarps + i];
      half ^= 1;
    }
    return x;
  }
};

__forceinline__ char* row_at(const NormMatrix& m, Index row, int element_bytes) {
  return static_cast<char*>(m.data) + row * m.row_stride * element_bytes;
}

}  // namespace tessera
