// How a product is divided into groups, as host and kernels see it. Offsets are [groups + 1], in device memory.
#pragma once

namespace tessera {

// Values of Config::grouping.
constexpr int kUngrouped = 0;
constexpr int kBatched = 1;     // a (unless it is shared), b and out have a layer per group
constexpr int kRaggedRows = 2;  // group g: rows offsets[g] to offsets[g + 1] of a and out, layer g of b
constexpr int kRaggedSums =
    3;  // group g: rows offsets[g] to offsets[g + 1] of a and b, which are terms; layer g of out

// Whether matrices of out's shape have a layer per group.
constexpr bool out_has_layers(int grouping) { return grouping == kBatched || grouping == kRaggedSums; }

struct GroupRange {
  int begin, end;
};
// Entries that decrease, or are beyond the last row, select no rows outside of the tensors.
constexpr GroupRange group_range(const int* offsets, int group, int rows) {
  const int first = offsets[group], last = offsets[group + 1];
  const int begin = first < 0 ? 0 : first < rows ? first : rows;
  return {begin, last < begin ? begin : last < rows ? last : rows};
}

}  // namespace tessera
