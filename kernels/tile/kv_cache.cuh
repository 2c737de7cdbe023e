// What a kernel reads of a KV cache before it loads keys: lengths, rows and pages.
#pragma once

#include "ptx/convert.cuh"
#include "tile/kv_cache.h"
#include "tile/shared_tile.cuh"

namespace tessera {

// A sequence's keys without its left padding: masks and ALiBi are aligned with the last key, so it does not count. A
// sequence whose lengths or indices do not fit the cache has no keys.
struct CachedSequence {
  int length;
  int leftpad;  // key 0 is at this row of the sequence
  int row;      // of the cache, if not paged
  bool refused;
};

__forceinline__ CachedSequence cached_sequence(const KvCache& cache, unsigned batch) {
  const int length = cache.seqlens ? cache.seqlens[batch] : cache.capacity;
  const int leftpad = cache.leftpad ? cache.leftpad[batch] : 0;
  const int row = cache.batch_idx ? cache.batch_idx[batch] : static_cast<int>(batch);
  const bool fits =
      length >= 0 && length <= cache.capacity && leftpad >= 0 && (!cache.batch_idx || (row >= 0 && row < cache.rows));
  return {fits && length > leftpad ? length - leftpad : 0, leftpad, row, !fits};
}

// A page that does not exist is read as the last one.
__forceinline__ int physical_page(const KvCache& cache, int page) {
  return static_cast<int>(min(static_cast<unsigned>(page), cache.num_pages - 1u));
}

// Rows of one head of a paged cache, as TileLoader takes them.
struct PagedRows {
  const KvCache& cache;
  const Bits16* base;  // row 0 of page 0
  Strides strides;     // .batch: of a page
  const int* pages;    // of the sequence
  int leftpad;

  // wanted: the key is in use, so that it has a page.
  __forceinline__ const Bits16* row(int key, bool wanted) const {
    if (!wanted) return base;
    const int at = leftpad + key;
    const int page = static_cast<int>(cache.by_page.quotient(at));
    return base + physical_page(cache, pages[page]) * strides.batch +
           (at - page * static_cast<int>(cache.by_page.by)) * strides.seq;
  }
};

}  // namespace tessera
