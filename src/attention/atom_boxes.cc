#include "attention/atom_boxes.h"

#include <utility>

namespace tessera::attention {
namespace {

constexpr std::uint64_t kBytes = 2;  // of an element

}  // namespace

TensorExtents query_extents(const AttentionProblem& p, std::int64_t dim) {
  return {p.batch, p.seq_q, p.heads_q, dim, p.varlen, p.total_q};
}
TensorExtents key_extents(const AttentionProblem& p, std::int64_t dim) {
  return {p.batch, p.seq_k, p.heads_kv, dim, p.varlen, p.total_k};
}

std::int64_t cache_pitch(const AttentionProblem& p, const TensorView& view) {
  return p.cache_rows > 1 ? view.batch_stride / view.seq_stride : 0;
}
TensorExtents cache_extents(const AttentionProblem& p, const TensorView& view, std::int64_t dim) {
  if (p.paged) return {p.num_pages, p.page_size, p.heads_kv, dim, false, 0};
  return {1, p.seq_k, p.heads_kv, dim, true, (p.cache_rows - 1) * cache_pitch(p, view) + p.seq_k};
}

Status atom_boxes(const TensorView& view, const TensorExtents& of, int rows, int min_atom, AtomBoxes& boxes,
                  std::int64_t pack_gqa) {
  const auto bytes = [](std::int64_t elements) { return static_cast<std::uint64_t>(elements) * kBytes; };
  // The stride of an axis of extent 1 does not matter, but must be one that the driver accepts.
  const auto stride = [&](std::int64_t extent, std::int64_t elements) {
    return extent > 1 ? bytes(elements) : std::uint64_t{16};
  };
  cuda::TensorBox box;
  box.address = reinterpret_cast<std::uintptr_t>(view.data);
  box.rows = static_cast<std::uint32_t>(rows);
  const std::int64_t last = of.packed ? of.total + 1 : of.batch;
  box.extents = {static_cast<std::uint64_t>(of.dim), static_cast<std::uint64_t>(of.seq),
                 static_cast<std::uint64_t>(of.heads), static_cast<std::uint64_t>(last)};
  // If packed, both axes of rows move by rows, of which there may be one.
  box.strides = {stride(of.packed ? of.total : of.seq, view.seq_stride), stride(of.heads, view.head_stride),
                 of.packed ? stride(of.total, view.seq_stride) : stride(of.batch, view.batch_stride)};
  if (of.packed) {
    const std::uint64_t before = static_cast<std::uint64_t>(of.seq) * box.strides[0];
    if (before > box.address) return Status(TESSERA_UNSUPPORTED, "sequences are too long for TMA");
    box.address -= before;
  }
  if (pack_gqa > 0) {
    std::swap(box.extents[1], box.extents[2]);
    std::swap(box.strides[0], box.strides[1]);
    box.rows = static_cast<std::uint32_t>(pack_gqa);
    box.layers = static_cast<std::uint32_t>(rows / pack_gqa);
  }
  const int dim = static_cast<int>(of.dim);
  for (int column = 0; column < padded_dim(dim, min_atom);) {
    const SwizzleAtom atom = atom_at(dim, min_atom, column);
    box.columns = static_cast<std::uint32_t>(atom.width);
    if (boxes.count == 0 || boxes.box[boxes.count - 1].columns != box.columns) boxes.box[boxes.count++] = box;
    column += atom.width;
  }
  return {};
}

Status encode_all(const AtomBoxes& boxes, AtomMaps& maps) {
  for (const cuda::TensorBox& box : boxes) {
    const auto map = cuda::encode(box);
    if (!map.ok()) return map.status();
    maps.by_width[map_index(static_cast<int>(box.columns))] = *map;
  }
  return {};
}

Status encode_one(const AtomBoxes& boxes, TensorMap& map) {
  const auto made = cuda::encode(boxes.box[0]);
  if (!made.ok()) return made.status();
  map = *made;
  return {};
}

}  // namespace tessera::attention
