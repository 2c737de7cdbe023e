// Which tiles of keys a block of queries walks over.
#pragma once

#include "contract/attention_forward.h"

namespace tessera {

struct KeyTiles {
  int begin;  // tiles that some query of the block sees
  int end;
  int clear_begin;  // keys that all of them see
  int clear_end;

  __forceinline__ bool is_masked(int first_k, int block_k) const {
    return first_k < clear_begin || first_k + block_k > clear_end;
  }
};

template <bool banded>
__forceinline__ KeyTiles key_tiles(const Band& band, int first_q, int block_q, int block_k, int len_q, int len_k) {
  int seen_begin = 0, seen_end = len_k, clear_begin = 0, clear_end = len_k;
  if constexpr (banded) {
    const int offset = band.bottom_right ? len_k - len_q : 0;
    const int first_position = first_q + offset;
    const int last_position = min(first_q + block_q, len_q) - 1 + offset;
    seen_begin = max(0, first_position - band.left);
    seen_end = min(len_k, last_position + band.right + 1);
    clear_begin = last_position - band.left;
    clear_end = min(len_k, first_position + band.right + 1);
  }
  const int begin = seen_begin / block_k;
  return {begin, seen_end > seen_begin ? (seen_end - 1) / block_k + 1 : begin, clear_begin, clear_end};
}

}  // namespace tessera
