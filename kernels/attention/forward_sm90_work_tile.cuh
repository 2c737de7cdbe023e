// A work tile of attention/forward_sm90.cuh and attention/forward_fp8_sm90.cuh: block_q query rows of one head, and the
// keys that they see. Where the code of both is the same, it is a template of the Config, and what it asks of a Config
// beyond its fields are the overloads below.
#pragma once

#include "attention/forward_sm90_config.h"
#include "tile/mask.h"

namespace tessera {

// A tile in shared memory, in columns of 16 bits.
struct TileShape {
  int rows;
  int columns;
};
constexpr TileShape q_tile_of(const AttentionForwardSm90Config& config) { return {block_q_of(config), config.dim_qk}; }
constexpr TileShape k_tile_of(const AttentionForwardSm90Config& config) { return {config.block_k, config.dim_qk}; }
constexpr TileShape v_tile_of(const AttentionForwardSm90Config& config) { return {config.block_k, config.dim_v}; }
constexpr bool has_transposed_v(const AttentionForwardSm90Config&) { return false; }
// The number of boxes, of equal rows, in which Q is loaded.
constexpr int q_boxes_of(const AttentionForwardSm90Config&) { return 1; }
// The stage of Q is in use until the end of a work tile.
constexpr bool loads_q_late(const AttentionForwardSm90Config&) { return false; }
constexpr ForwardSm90Layout layout_of(const AttentionForwardSm90Config& config) { return forward_sm90_layout(config); }

// Written by the producer for every work tile, read by the consumers.
struct ForwardSm90WorkTileInfo {
  unsigned batch, head;
  int first_q;  // first row of the tile: a query or, with pack_gqa, a (query, head) pair; kNoWork: no more work
  int len_q, len_k;
  int first_tile, last_tile;  // key tiles that some row of the work tile sees; last < first: none
  short first_consumer;       // intra-CTA split: the consumer of the last key tile, which is loaded first
  bool ends_keys;             // few_keys: no later work tile has the same keys

  static constexpr int kNoWork = -1;

  __forceinline__ bool has_keys() const { return last_tile >= first_tile; }
  __forceinline__ int position_offset(const AttentionForwardSm90Params& p) const {  // query i is at key i + offset
    return p.band.position_offset(len_q, len_k);
  }
  template <auto config>
  __forceinline__ int rows_of_sequence(const AttentionForwardSm90Params& p) const {
    return config.pack_gqa ? len_q * static_cast<int>(p.group) : len_q;
  }
  template <auto config>
  static __forceinline__ int query_at(const AttentionForwardSm90Params& p, int row) {
    return config.pack_gqa ? static_cast<int>(p.by_group.quotient(row)) : row;
  }
  // Keys that `rows` rows from row `first` on see.
  template <auto config>
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
