// Tensors as the copy engine is to see them (contract/tensor_map.h).
#pragma once

#include <array>
#include <cstdint>

#include "contract/tensor_map.h"
#include "cuda/tensor_map.h"
#include "ops/attention.h"
#include "ops/status.h"

namespace tessera {

// The boxes of each panel width that a tile has, widest first.
struct PanelBoxes {
  std::array<cuda::TensorBox, 3> box;
  int count = 0;

  const cuda::TensorBox* begin() const { return box.data(); }
  const cuda::TensorBox* end() const { return box.data() + count; }
};

// seq: rows of a sequence, the longest one's where packed (contract/attention_forward_sm90.h: RowOrigin). total: rows
// of a packed tensor.
struct TensorExtents {
  std::int64_t batch, seq, heads, dim;
  bool packed;
  std::int64_t total;
};
// Of q and, but for the dim, of o and dO; of k and v.
TensorExtents query_extents(const AttentionProblem& problem, std::int64_t dim);
TensorExtents key_extents(const AttentionProblem& problem, std::int64_t dim);

// Boxes of `rows` rows into `boxes`, which is empty. joined: 0, or heads that a box has of each of its rows / joined
// queries; heads are then the second axis. TESSERA_UNSUPPORTED where a packed tensor has too little memory before it.
Status panel_boxes(const TensorView& view, const TensorExtents& of, int rows, int narrowest_panel, PanelBoxes& boxes,
                   std::int64_t joined = 0);

}  // namespace tessera
