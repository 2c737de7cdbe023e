#include "ops/panel_boxes.h"

#include <utility>

namespace tessera {
namespace {

constexpr std::uint64_t kBytes = 2;  // of an element

}  // namespace

TensorExtents query_extents(const AttentionProblem& p, std::int64_t dim) {
  return {p.batch, p.seq_q, p.heads_q, dim, p.varlen, p.total_q};
}
TensorExtents key_extents(const AttentionProblem& p, std::int64_t dim) {
  return {p.batch, p.seq_k, p.heads_kv, dim, p.varlen, p.total_k};
}

Status panel_boxes(const TensorView& view, const TensorExtents& of, int rows, int narrowest_panel, PanelBoxes& boxes,
                   std::int64_t joined) {
  const auto bytes = [](std::int64_t elements) { return static_cast<std::uint64_t>(elements) * kBytes; };
  // The stride of an axis of one does not matter, but must be one that the driver takes.
  const auto stride = [&](std::int64_t extent, std::int64_t elements) {
    return extent > 1 ? bytes(elements) : std::uint64_t{16};
  };
  cuda::TensorBox box;
  box.address = reinterpret_cast<std::uintptr_t>(view.data);
  box.rows = static_cast<std::uint32_t>(rows);
  const std::int64_t last = of.packed ? of.total + 1 : of.batch;
  box.extents = {static_cast<std::uint64_t>(of.dim), static_cast<std::uint64_t>(of.seq),
                 static_cast<std::uint64_t>(of.heads), static_cast<std::uint64_t>(last)};
  // Packed, both axes of rows move by rows, of which there may be one.
  box.strides = {stride(of.packed ? of.total : of.seq, view.seq_stride), stride(of.heads, view.head_stride),
                 of.packed ? stride(of.total, view.seq_stride) : stride(of.batch, view.batch_stride)};
  if (of.packed) {
    const std::uint64_t before = static_cast<std::uint64_t>(of.seq) * box.strides[0];
    if (before > box.address) return Status(TESSERA_UNSUPPORTED, "sequences are too long for the copy engine");
    box.address -= before;
  }
  if (joined > 0) {
    std::swap(box.extents[1], box.extents[2]);
    std::swap(box.strides[0], box.strides[1]);
    box.rows = static_cast<std::uint32_t>(joined);
    box.layers = static_cast<std::uint32_t>(rows / joined);
  }
  const int dim = static_cast<int>(of.dim);
  for (int column = 0; column < padded_dim(dim, narrowest_panel);) {
    const Panel panel = panel_at(dim, narrowest_panel, column);
    box.columns = static_cast<std::uint32_t>(panel.width);
    if (boxes.count == 0 || boxes.box[boxes.count - 1].columns != box.columns) boxes.box[boxes.count++] = box;
    column += panel.width;
  }
  return {};
}

}  // namespace tessera
