// The order in which key tiles add to dQ's sums, in the deterministic mode of the Hopper backwards and for short sequences.
#pragma once

#include "tile/mask.h"

namespace tessera {

// Two threads beside the dQ warpgroup take care of its turns, so that it does not wait for global memory: one sees that a
// turn has come, up to kTurnStages steps ahead, the other one ends turns. A stage has four mbarriers in shared memory:
// come, and taken by each warp of the dQ warpgroup; left by each warp, and noticed.
constexpr int kTurnStages = 4;
constexpr int kTurnBytes = 4 * kTurnStages * 8;

// The key tiles that add to a query tile take turns, and the one whose turn is first must be scheduled first: a CTA waits
// only for CTAs of smaller index, and GPUs start CTAs in the order of their index, although CUDA does not promise it. If keys beyond a query's position are masked, a later key tile starts at a later query tile and reaches any given
// one earlier, so later key tiles come first, in the grid, too. Else all start at the first query tile, and earlier key
// tiles come first.
constexpr bool comes_in_reverse(const Band& band) { return band.right < kUnbounded; }
// The keys that some query of a query tile sees.
constexpr Interval<int> keys_of_tile(const Band& band, int position_offset, int query_tile, int len_q, int len_k,
                                     int block_q) {
  const int first = query_tile * block_q;
  const int last = (first + block_q < len_q ? first + block_q : len_q) - 1;
  return band.keys_of_any(first + position_offset, last + position_offset).within(len_k);
}
// How many key tiles add to a query tile before key tile `tile`.
constexpr unsigned turn_of(const Band& band, int position_offset, int tile, int query_tile, int len_q, int len_k,
                           int block_q, int block_k) {
  const Interval<int> keys = keys_of_tile(band, position_offset, query_tile, len_q, len_k, block_q);
  return comes_in_reverse(band) ? (keys.end - 1) / block_k - tile : tile - keys.begin / block_k;
}

// Whether the key tile from first_k on is the first or the last one to add to a query tile that sees it.
struct TurnEnds {
  bool first;
  bool last;
};
constexpr TurnEnds turn_ends(const Band& band, int position_offset, int first_k, int query_tile, int len_q, int len_k,
                             int block_q, int block_k) {
  const Interval<int> keys = keys_of_tile(band, position_offset, query_tile, len_q, len_k, block_q);
  const bool has_first_key = keys.begin >= first_k, has_last_key = keys.end <= first_k + block_k;
  return comes_in_reverse(band) ? TurnEnds{has_last_key, has_first_key} : TurnEnds{has_first_key, has_last_key};
}

}  // namespace tessera
