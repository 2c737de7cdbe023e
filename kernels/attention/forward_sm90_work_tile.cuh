// A work tile of attention/forward_sm90.cuh: block_q query rows of one head, and the keys that they see.
#pragma once

#include "attention/forward_sm90_config.h"
#include "tile/mask.h"

namespace tessera {

// Written by the producer for every work tile, read by the consumers.
struct ForwardSm90WorkTileInfo {
  unsigned batch, head;
  int first_q;  // first row of the tile: a query or, with pack_gqa, a (query, head) pair; kNoWork: no more work
  int len_q, len_k;
  int first_tile, last_tile;  // key tiles that some row of the work tile sees; last < first: none
  int first_consumer;         // intra-CTA split: the consumer of the last key tile, which is loaded first

  static constexpr int kNoWork = -1;

  __forceinline__ bool has_keys() const { return last_tile >= first_tile; }
  __forceinline__ int position_offset(const AttentionForwardSm90Params& p) const {  // query i is at key i + offset
    return p.band.position_offset(len_q, len_k);
  }
  template <AttentionForwardSm90Config config>
  __forceinline__ int rows_of_sequence(const AttentionForwardSm90Params& p) const {
    return config.pack_gqa ? len_q * static_cast<int>(p.group) : len_q;
  }
  template <AttentionForwardSm90Config config>
  static __forceinline__ int query_at(const AttentionForwardSm90Params& p, int row) {
    return config.pack_gqa ? static_cast<int>(p.by_group.quotient(row)) : row;
  }
  // Keys that `rows` rows from row `first` on see.
  template <AttentionForwardSm90Config config>
  __forceinline__ KeyRange keys_of(const AttentionForwardSm90Params& p, int first, int rows) const {
    const int last = min(first + rows, rows_of_sequence<config>(p)) - 1;
    if (last < first) return KeyRange{0, 0, 0, 0};
    const int offset = position_offset(p);
    return key_range<config.masked, config.chunked>(p.band, query_at<config>(p, first) + offset,
                                                    query_at<config>(p, last) + offset, len_k);
  }
};
static_assert(sizeof(ForwardSm90WorkTileInfo) == kWorkTileBytes);

}  // namespace tessera
