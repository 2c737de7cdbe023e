// The queries of the last key tiles of a Hopper backward, divided among CTAs: if all key tiles take the same time, some SMs
// would have none in the last wave, and if the longest come last, they would end at different times.
#pragma once

#include "tile/mask.h"
#include "tile/scheduler.h"

namespace tessera {

// CTAs of dK and dV of the same keys add them to fp32 sums, and the last one to do so writes them.
struct QuerySlices {
  unsigned whole;    // CTAs that have all queries of their key tile, before the others
  Divisor by_tiles;  // divided key tiles: slice 0 of each comes first
  unsigned count;    // slices of a divided key tile
  float* sums;       // [divided key tiles][block_k / 16][Dqk / 8 + Dv / 8] tiles as those of dQ's sums; 0 at the start
  unsigned* added;   // [divided key tiles][block_k / 16]: slices that have added; 0 at the start
};

struct QuerySlice {
  unsigned item;   // of the work items without slices
  int tile;        // of the divided key tiles; -1: this one is not divided
  unsigned slice;  // of its queries

  constexpr QueryTiles of(const QueryTiles& tiles, const QuerySlices& all) const {
    if (tile < 0) return tiles;
    const auto before = [&](unsigned i) {
      return static_cast<int>(static_cast<unsigned>(tiles.count) * i / all.count);
    };
    return {tiles.first + before(slice), before(slice + 1) - before(slice)};
  }
};
constexpr QuerySlice query_slice(const QuerySlices& all, unsigned cta) {
  if (cta < all.whole) return {cta, -1, 0};
  const unsigned slice = all.by_tiles.quotient(cta - all.whole);
  const unsigned tile = cta - all.whole - slice * all.by_tiles.by;
  return {all.whole + tile, static_cast<int>(tile), slice};
}

}  // namespace tessera
