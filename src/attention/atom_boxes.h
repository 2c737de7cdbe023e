// Tensors as boxes that TMA loads (tile/tensor_map.h).
#pragma once

#include <array>
#include <cstdint>

#include "attention/problem.h"
#include "base/status.h"
#include "cuda/tensor_map.h"
#include "tile/tensor_map.h"

namespace tessera::attention {

// The boxes of each swizzle atom width that a tile has, widest first.
struct AtomBoxes {
  std::array<cuda::TensorBox, 3> box;
  int count = 0;

  cuda::TensorBox* begin() { return box.data(); }
  cuda::TensorBox* end() { return box.data() + count; }
  const cuda::TensorBox* begin() const { return box.data(); }
  const cuda::TensorBox* end() const { return box.data() + count; }
};

// seq: rows of a sequence, the longest one's if packed (attention/forward_sm90_config.h: RowOrigin). total: rows
// of a packed tensor.
struct TensorExtents {
  std::int64_t batch, seq, heads, dim;
  bool packed;
  std::int64_t total;
};
// Of q and, except for the dim, of o and dO; of k and v.
TensorExtents query_extents(const AttentionProblem& problem, std::int64_t dim);
TensorExtents key_extents(const AttentionProblem& problem, std::int64_t dim);
// Of k or v of a cache: pages as a batch; without pages as if packed, each row of the cache a sequence of cache_pitch rows.
TensorExtents cache_extents(const AttentionProblem& problem, const TensorView& view, std::int64_t dim);
std::int64_t cache_pitch(const AttentionProblem& problem, const TensorView& view);

// Boxes of `rows` rows into `boxes`, which is empty. pack_gqa: 0, or the heads that a box has of each of its rows / pack_gqa
// queries; heads are then the second axis. TESSERA_UNSUPPORTED if a packed tensor has too little memory before it.
Status atom_boxes(const TensorView& view, const TensorExtents& of, int rows, int min_atom, AtomBoxes& boxes,
                  std::int64_t pack_gqa = 0);
// The boxes as maps for a kernel. The driver makes them only if a context is current.
Status encode_all(const AtomBoxes& boxes, AtomMaps& maps);
// If all swizzle atoms are of one width.
Status encode_one(const AtomBoxes& boxes, TensorMap& map);

}  // namespace tessera::attention
