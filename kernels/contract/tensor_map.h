// How a 16-bit tensor [B, S, H, D] is cut into tiles for the copy engine and wgmma.
//
// A tile of rows x D columns lies in shared memory as panels, one after the other: all rows of columns 0 to 63, then of
// columns 64 to 127, and so on. A row of a panel is 128 bytes, what the widest swizzle spans. What is left of D after
// the 64s either takes a panel of 64 as well, filled up with zeros by the copy engine, or, to save room, panels of 32
// and 16 columns with the swizzle of their width. Global memory is never padded.
#pragma once

namespace tessera {

// Opaque; what cuTensorMapEncodeTiled writes.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

constexpr int kWidestPanel = 64;

// Columns of a tile with its padding. narrowest: 64, or 16 to fill up as little as can be.
constexpr int padded_dim(int dim, int narrowest) {
  const int rest = dim % kWidestPanel;
  if (rest == 0) return dim;
  if (narrowest == kWidestPanel || rest > 48) return dim - rest + kWidestPanel;
  return dim - rest + (rest + 15) / 16 * 16;
}

struct Panel {
  int column;  // the first of its columns in the tile
  int width;   // 64, 32 or 16
};

// The panel that a column is in.
constexpr Panel panel_at(int dim, int narrowest, int column) {
  const int padded = padded_dim(dim, narrowest);
  const int wide = padded / kWidestPanel * kWidestPanel;
  if (column < wide) return {column / kWidestPanel * kWidestPanel, kWidestPanel};
  const int half = padded - wide >= 32 ? 32 : 0;
  return column < wide + half ? Panel{wide, 32} : Panel{wide + half, 16};
}

// Byte offset of a panel in a tile: the panels before it are full.
constexpr int panel_offset(const Panel& panel, int rows) { return panel.column * rows * 2; }

// Byte offset of an element in a tile, by the swizzle that the copy engine writes with: within each 8 rows of 128
// bytes, 16-byte chunks change places.
constexpr int offset_in_tile(int row, int column, int rows, int dim, int narrowest) {
  const Panel panel = panel_at(dim, narrowest, column);
  const int plain = panel_offset(panel, rows) + row * panel.width * 2 + (column - panel.column) * 2;
  return plain ^ (((plain >> 7) & (panel.width / 8 - 1)) << 4);
}

// The widest swizzle repeats every 1024 bytes, and wgmma reads addresses by that.
constexpr int kTileAlignment = 1024;
constexpr int tile_bytes(int rows, int dim, int narrowest) {
  return (rows * padded_dim(dim, narrowest) * 2 + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
}

// Maps of one tensor, by the panels' width: 64, 32, 16. Those that no panel has are not set.
struct PanelMaps {
  TensorMap by_width[3];
};
constexpr int map_index(int width) { return width == 64 ? 0 : width == 32 ? 1 : 2; }

}  // namespace tessera
