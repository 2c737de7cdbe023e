// A KV cache as the forward kernels read it: K and V [rows, capacity, Hkv, D], or [pages, page_size, Hkv, D] and a page
// table, with lengths that only the device knows.
#pragma once

#include "tile/scheduler.h"
#include "tile/types.h"

namespace tessera {

struct KvCache {
  const int* seqlens;     // [B], keys in use; null: `capacity`
  const int* leftpad;     // [B], keys at the start that no query sees; may be null
  const int* batch_idx;   // [B], each sequence's row of the cache; null: b
  const int* page_table;  // [B, pages of a sequence]; null: not paged
  int* status;            // [B], written: 0, or 1 if the sequence is refused; may be null
  Index page_table_stride;
  int capacity;  // keys of a sequence
  int rows;      // of the cache, if not paged
  int num_pages;
  Divisor by_page;  // by the page size
};

}  // namespace tessera
