// The order in which the tiles of a product are computed.
#pragma once

namespace tessera {

// group_rows row tiles are processed at a time, column by column: CTAs that run together share rows of A and columns of B
// in L2.
struct TileOrder {
  unsigned row_tiles;
  unsigned column_tiles;
  unsigned group_rows;
};
struct TilePosition {
  unsigned row;
  unsigned column;
};
constexpr TilePosition tile_position(const TileOrder& order, unsigned index) {
  const unsigned group_tiles = order.group_rows * order.column_tiles;
  const unsigned group = index / group_tiles;
  const unsigned first = group * order.group_rows;
  const unsigned left = order.row_tiles - first;
  const unsigned rows = left < order.group_rows ? left : order.group_rows;
  const unsigned within = index - group * group_tiles;
  const unsigned column = within / rows;
  return {first + within - column * rows, column};
}

}  // namespace tessera
