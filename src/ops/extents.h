// Sizes and strides on the way to a launch: rows that do not overflow, and whether they may be read several elements at
// a time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ops/attention.h"

namespace tessera {

// a * b * c of sizes that are not negative; the largest number there is where that is beyond it.
inline std::int64_t saturating_product(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t product = 0;
  if (a == 0 || b == 0 || c == 0) return 0;
  const bool overflows = __builtin_mul_overflow(a, b, &product) || __builtin_mul_overflow(product, c, &product);
  return overflows ? std::numeric_limits<std::int64_t>::max() : product;
}

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Of `columns` heads of all sequences, how many are worked on together so that what they read again and again, so many
// bytes each, stays in the L2 cache. `group` of them share those bytes. All groups are of one size, so that the last is
// no short rest that begins with the longest tiles.
inline unsigned columns_together(std::int64_t columns, std::int64_t bytes, std::int64_t group = 1) {
  constexpr std::int64_t kCacheBytes = std::int64_t{32} << 20;  // two thirds of what an H100 has
  const std::int64_t fit = std::max<std::int64_t>(1, kCacheBytes / std::max<std::int64_t>(1, bytes)) * group;
  const std::int64_t rounds = std::max<std::int64_t>(1, ceil_div(columns, fit));
  return static_cast<unsigned>(std::min(columns, ceil_div(ceil_div(columns, rounds), group) * group));
}

// True where every row starts at a multiple of `vector` elements. The stride of a dim of one element does not matter.
inline bool allows_vectors(const TensorView& view, std::int64_t batch, std::int64_t seq, std::int64_t heads,
                           std::int64_t element_bytes, std::int64_t vector) {
  const auto fits = [vector](std::int64_t extent, std::int64_t stride) { return extent <= 1 || stride % vector == 0; };
  return reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(element_bytes * vector) == 0 &&
         fits(batch, view.batch_stride) && fits(seq, view.seq_stride) && fits(heads, view.head_stride);
}

inline Strides strides_of(const TensorView& view) { return {view.batch_stride, view.seq_stride, view.head_stride}; }
inline RowStrides strides_of(const RowView& view) { return {view.batch_stride, view.head_stride}; }

}  // namespace tessera
