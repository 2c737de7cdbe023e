// A work tile of attention/forward_fp8_sm90.cuh: block_q query rows of one head, and the keys that they see.
#pragma once

#include "attention/forward_fp8_sm90_config.h"
#include "tile/mask.h"

namespace tessera {

// Written by the producer for every work tile, read by the consumers.
struct ForwardFp8Sm90WorkTileInfo {
  unsigned batch, head;
  int first_q;  // kNoWork: no more work
  int len_q, len_k;
  int first_tile, last_tile;  // key tiles that some row of the work tile sees; last < first: none
  int unused;

  static constexpr int kNoWork = -1;

  __forceinline__ bool has_keys() const { return last_tile >= first_tile; }
  __forceinline__ int position_offset(const AttentionForwardFp8Sm90Params& p) const {  // query i is at key i + offset
    return p.band.position_offset(len_q, len_k);
  }
  // Keys that `rows` rows from row `first` on see.
  template <bool masked>
  __forceinline__ KeyRange keys_of(const AttentionForwardFp8Sm90Params& p, int first, int rows) const {
    const int last = min(first + rows, len_q) - 1;
    if (last < first) return KeyRange{0, 0, 0, 0};
    const int offset = position_offset(p);
    return key_range<masked>(p.band, first + offset, last + offset, len_k);
  }
};
static_assert(sizeof(ForwardFp8Sm90WorkTileInfo) == kWorkTileBytes);

}  // namespace tessera
