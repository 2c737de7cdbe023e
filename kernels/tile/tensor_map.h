// How a 16-bit tensor [B, S, H, D] is divided into tiles for TMA and wgmma.
//
// A tile of rows x D columns is stored in shared memory as consecutive swizzle atoms: all rows of columns 0 to 63, then
// all rows of columns 64 to 127, and so on. (The term is used for the whole column slab: in CUTLASS the atom is its
// eight rows.) A row of an atom is 128 bytes, the span of the widest swizzle. The remainder of D modulo 64 occupies
// either another atom of 64 columns, which TMA fills up with zeros, or, to save shared memory, atoms of 32 and 16
// columns with the swizzle of their width. Global memory is never padded.
#pragma once

namespace tessera {

// Opaque; written by cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
  unsigned long long words[16];
};

constexpr int kWidestAtom = 64;                 // columns
constexpr int kAtomRowBytes = kWidestAtom * 2;  // of the widest atom

// Columns of a tile including padding. min_atom: 64, or 16 to pad as little as possible.
constexpr int padded_dim(int dim, int min_atom) {
  const int rest = dim % kWidestAtom;
  if (rest == 0) return dim;
  if (min_atom == kWidestAtom || rest > 48) return dim - rest + kWidestAtom;
  return dim - rest + (rest + 15) / 16 * 16;
}

struct SwizzleAtom {
  int column;  // first column in the tile
  int width;   // 64, 32 or 16
};

// The atom that contains a column.
constexpr SwizzleAtom atom_at(int dim, int min_atom, int column) {
  const int padded = padded_dim(dim, min_atom);
  const int wide = padded / kWidestAtom * kWidestAtom;
  if (column < wide) return {column / kWidestAtom * kWidestAtom, kWidestAtom};
  const int half = padded - wide >= 32 ? 32 : 0;
  return column < wide + half ? SwizzleAtom{wide, 32} : SwizzleAtom{wide + half, 16};
}

// Byte offset of an atom in a tile: the atoms before it have no padding.
constexpr int atom_offset(const SwizzleAtom& atom, int rows) { return atom.column * rows * 2; }

// Byte offset of an element in a tile, with the swizzle that TMA applies: within each 8 rows of 128 bytes, 16-byte
// chunks are permuted.
constexpr int offset_in_tile(int row, int column, int rows, int dim, int min_atom) {
  const SwizzleAtom atom = atom_at(dim, min_atom, column);
  const int plain = atom_offset(atom, rows) + row * atom.width * 2 + (column - atom.column) * 2;
  return plain ^ (((plain >> 7) & (atom.width / 8 - 1)) << 4);
}

// The widest swizzle repeats every 1024 bytes of the shared-memory address, so tiles are aligned to that.
constexpr int kTileAlignment = 1024;
constexpr int tile_bytes(int rows, int dim, int min_atom) {
  return (rows * padded_dim(dim, min_atom) * 2 + kTileAlignment - 1) / kTileAlignment * kTileAlignment;
}

// Tensor maps of one tensor, by atom width: 64, 32, 16. Unused widths are not set.
struct AtomMaps {
  TensorMap by_width[3];
};
constexpr int map_index(int width) { return width == 64 ? 0 : width == 32 ? 1 : 2; }

}  // namespace tessera
