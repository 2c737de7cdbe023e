// The KV cache as attention/decode.cuh reads and extends it: contiguous or in pages, with new keys appended and rotary
// embedding applied.
#pragma once

#include "attention/decode_schedule.cuh"
#include "attention/fp8_round.cuh"
#include "ptx/convert.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/global.cuh"
#include "tile/rotary.cuh"
#include "tile/shared_tile.cuh"

namespace tessera {

// One sequence's keys of one head, in K or in V. Rows are of 16-bit columns, with two values each if they are e4m3. T = float:
// their scales.
template <bool paged, class T = Bits16>
struct CacheRows {
  T* base;           // contiguous: the row of key 0; paged: row 0 of page 0
  const int* pages;  // of the sequence, if paged

  __forceinline__ CacheRows(const AttentionDecodeParams& p, void* data, const Strides& strides, int batch, int head) {
    const DecodeSchedule& s = p.schedule;
    base = static_cast<T*>(data) + head * strides.head;
    if constexpr (paged) {
      pages = s.page_table + batch * s.page_table_stride;
    } else {
      base += (s.cache_batch_idx ? s.cache_batch_idx[batch] : batch) * strides.batch;
    }
  }

  // wanted: the key is in use, so that it has a page. A page that does not exist is read as the last one.
  __forceinline__ T* row(const DecodeSchedule& s, const Strides& strides, int key, bool wanted) const {
    if constexpr (!paged) return base + key * strides.seq;
    const int page = page_of(s, key);
    const unsigned physical = wanted ? min(static_cast<unsigned>(pages[page]), s.num_pages - 1u) : 0;
    return base + physical * strides.batch + (key - page * static_cast<int>(s.page_size.by)) * strides.seq;
  }
};

// Brings the page numbers of keys that are loaded later into L1. Behind the loads of keys and values that are already
// in flight, they would take microseconds.
__forceinline__ void prefetch_pages(const AttentionDecodeParams& p, const DecodeWalk& load, bool mine) {
  constexpr int kTilesAhead = 12;
  if (!mine) return;
  const int key = load.first_key() + (kTilesAhead << p.schedule.tile_shift);
  const bool here = key < load.sequence.length;
  if (!here && load.batch + 1 >= p.schedule.batch) return;
  const DecodeSchedule& s = p.schedule;
  const int* entry = s.page_table + (here ? load.batch * s.page_table_stride + page_of(s, key)
                                          : (load.batch + 1) * s.page_table_stride);
  asm volatile("prefetch.global.L1 [%0];" ::"l"(entry));
}

// Loads a tile of K or of V; keys outside [begin, end) become zeros. On sm_80 and newer with 16-byte loads it is
// asynchronous, else it is complete, for this thread, when it returns. Each thread loads one 16-byte column of every
// kRowsPerPass-th row. whole: all keys are inside.
template <int threads, int vector, bool whole, class Tile, bool paged>
__forceinline__ void load_cache_tile(const DecodeSchedule& s, const Tile& tile, const CacheRows<paged>& rows,
                                     const Strides& strides, int first_key, int begin, int end) {
  using Loader = TileLoader<Tile, threads, vector>;
  // Every thread has a row in every pass.
  constexpr bool kAllRows = threads == Tile::kChunks * Loader::kRowsPerPass && Tile::kRows % Loader::kRowsPerPass == 0;
  const int thread = recomputed(threadIdx.x);
  const int chunk = thread % Tile::kChunks;
  const int first_row = thread / Tile::kChunks;
  const Bits16* next = rows.base + (first_key + first_row) * strides.seq + chunk * 8;  // if contiguous
  constexpr int kUnroll = Loader::kPasses > 8 ? 4 : 8;  // wide rows leave fewer registers
#pragma unroll kUnroll
  for (int pass = 0; pass < Loader::kPasses; ++pass) {
    const int row = first_row + pass * Loader::kRowsPerPass;
    const bool mine = kAllRows || (first_row < Loader::kRowsPerPass && row < Tile::kRows);
    const int key = first_key + row;
    const bool wanted = mine && (whole || (key >= begin && key < end));
    const Bits16* from = paged ? rows.row(s, strides, key, wanted) + chunk * 8 : next;
    next += Loader::kRowsPerPass * strides.seq;
    if constexpr (Loader::kAsync) {
#if __CUDA_ARCH__ >= 800
      // A wider fetch would bring the neighbouring head's bytes.
      constexpr bool kWholeLines = Tile::kPitch % 128 == 0;
      if (mine) {
        kWholeLines ? cp_async_16(tile.address(row, chunk), from, wanted)
                    : cp_async_16_narrow(tile.address(row, chunk), from, wanted);
      }
#endif
    } else if (mine) {
      store_shared_16(tile.address(row, chunk), load_chunk<vector>(from, wanted));
    }
  }
}

// A column of a new key or value as the cache's keys have it, or had it before they were rounded to e4m3.
template <DType dtype, bool rotates>
__forceinline__ float new_value(const AttentionDecodeParams& p, const Bits16* source, int column, int position) {
  const auto value = [&](int c) { return to_float<dtype>(source[c]); };
  const float x = rotates && p.rotary_dim > 0 ? rotated<dtype>(p, value, column, position) : value(column);
  return to_float<dtype>(from_float<dtype>(x));
}

// Four of them, divided by their scale.
template <DType dtype, bool rotates>
__forceinline__ unsigned new_e4m3_word(const AttentionDecodeParams& p, const Bits16* source, int column, int position,
                                       float scale) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __fdiv_rn(new_value<dtype, rotates>(p, source, column + i, position), scale);
  return pack_e4m3(v[0], v[1], v[2], v[3]);
}

// Copies new keys, or values, that belong to a tile into it, and into the cache if `writes`. rotates: with rotary
// embedding, new key i at rotary_position + i. e4m3: divided by the scale and rounded, after that; a word at a time, since
// the rest of the kernel leaves few registers.
template <DType dtype, int threads, int vector, bool rotates, bool e4m3, class Tile, class Rows>
__forceinline__ void append_to_tile(const AttentionDecodeParams& p, const Tile& tile, const Rows& rows,
                                    const Strides& strides, const Bits16* added, Index added_stride,
                                    const DecodeSequence& sequence, int first_key, int rotary_position, float scale,
                                    bool writes) {
  constexpr int kParts = Tile::kChunks * (e4m3 ? 4 : 1);  // of a row
  const int from_key = max(first_key, sequence.old_length);
  const int end_key = min(first_key + Tile::kRows, sequence.length);
#pragma unroll 1
  for (int index = recomputed(threadIdx.x); index < (end_key - from_key) * kParts; index += threads) {
    const int key = from_key + index / kParts, part = index % kParts;
    const int which = key - sequence.old_length;
    const Bits16* source = added + which * added_stride;
    if constexpr (e4m3) {
      const unsigned word = new_e4m3_word<dtype, rotates>(p, source, part * 4, rotary_position + which, scale);
      store_shared_4(tile.address(key - first_key, part / 4) + part % 4 * 4, word);
      if (writes) reinterpret_cast<unsigned*>(rows.row(p.schedule, strides, key, true))[part] = word;
    } else {
      const auto value = [&](int column) { return to_float<dtype>(source[column]); };
      const Words4 words = rotates && p.rotary_dim > 0 ? rotated_chunk<dtype>(p, value, part, rotary_position + which)
                                                       : load_chunk<vector>(source + part * 8, true);
      store_shared_16(tile.address(key - first_key, part), words);
      if (writes) store_chunk<vector>(rows.row(p.schedule, strides, key, true) + part * 8, words);
    }
  }
}

// The same if keys have scales: that of a page is read; that of a key is the least power of two that brings its row into
// e4m3's range, and is written. A warp has a row. tile_scales: of the tile's keys, in shared memory.
template <DType dtype, int warps, bool rotates, class Tile, class Rows, class Scales>
__forceinline__ void append_with_key_scales(const AttentionDecodeParams& p, const Tile& tile, const Rows& rows,
                                            const Strides& strides, const Scales& scales, const Strides& scale_strides,
                                            unsigned tile_scales, const Bits16* added, Index added_stride,
                                            const DecodeSequence& sequence, int first_key, int rotary_position,
                                            bool writes) {
  constexpr int kWords = Tile::kChunks * 4;  // of a row
  const int lane = recomputed(threadIdx.x) % 32, end_key = min(first_key + Tile::kRows, sequence.length);
#pragma unroll 1
  for (int key = max(first_key, sequence.old_length) + recomputed(threadIdx.x) / 32; key < end_key; key += warps) {
    const int which = key - sequence.old_length, position = rotary_position + which;
    const Bits16* source = added + which * added_stride;
    float* const kept = scales.row(p.schedule, scale_strides, key, true);
    const bool by_key = scale_strides.seq != 0;
    float scale;
    if (by_key) {
      float largest = 0;
#pragma unroll 1
      for (int column = lane; column < kWords * 4; column += 32) {
        largest = fmaxf(largest, fabsf(new_value<dtype, rotates>(p, source, column, position)));
      }
      scale = fp8_row_scale(float_from_bits(__reduce_max_sync(0xffffffffu, bits_from_float(largest))));
    } else {
      scale = *kept;
    }
#pragma unroll 1
    for (int word = lane; word < kWords; word += 32) {
      const unsigned values = new_e4m3_word<dtype, rotates>(p, source, word * 4, position, scale);
      store_shared_4(tile.address(key - first_key, word / 4) + word % 4 * 4, values);
      if (writes) reinterpret_cast<unsigned*>(rows.row(p.schedule, strides, key, true))[word] = values;
    }
    if (lane != 0) continue;
    store_shared_4(tile_scales + (key - first_key) * 4, bits_from_float(scale));
    if (writes && by_key) *kept = scale;
  }
}

}  // namespace tessera
