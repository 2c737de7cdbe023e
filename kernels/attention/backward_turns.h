// The order in which key tiles add to dQ's sums in the deterministic mode of the Hopper backwards.
#pragma once

#include "tile/mask.h"

namespace tessera {

// The key tiles that add to a query tile take turns, and the one whose turn is first must be scheduled
// first. If keys beyond a query's position are masked, a later key tile starts at a later query tile and reaches any given
// one earlier, so later key tiles come first, in the grid, too. Else all start at the first query tile, and earlier key
// tiles come first.
constexpr bool comes_in_reverse(const Band& band) { return band.right < kUnbounded; }
// How many key tiles add to a query tile before key tile `tile`.
constexpr unsigned turn_of(const Band& band, int position_offset, int tile, int query_tile, int len_q, int len_k,
                           int block_q, int block_k) {
  const int first = query_tile * block_q;
  const int last = (first + block_q < len_q ? first + block_q : len_q) - 1;
  const Interval<int> keys = band.keys_of_any(first + position_offset, last + position_offset).within(len_k);
  return comes_in_reverse(band) ? (keys.end - 1) / block_k - tile : tile - keys.begin / block_k;
}

}  // namespace tessera
