// Which keys a query sees: the one relation that the CPU backend, the host and every kernel use.
//
// Query i of a sequence is at position i + offset, where the offset aligns the first or the last query with the first
// or the last key. It sees key j if position - left <= j <= position + right and j lies within the sequence; with
// chunks, only keys of the chunk that its position is in. BasicBand states this relation once in each direction;
// everything below follows from it.
#pragma once

#include "tile/types.h"

namespace tessera {

template <class Int>
struct Interval {
  Int begin = 0;
  Int end = 0;  // exclusive; empty if end <= begin

  constexpr bool empty() const { return end <= begin; }
  constexpr bool contains(Int x) const { return x >= begin && x < end; }
  // The part within [0, length). If that is empty, end may be less than begin.
  constexpr Interval within(Int length) const { return {begin > 0 ? begin : 0, end < length ? end : length}; }
};
using Range = Interval<Index>;

template <class Int>
struct BasicBand {
  Int left;           // kUnbounded: all keys
  Int right;          // likewise; 0 if causal
  bool bottom_right;  // the last query is at the position of the last key, else the first at that of the first
  Int chunk;          // positions and keys n * chunk to (n + 1) * chunk - 1 are a chunk; 0: no chunks

  constexpr Int position_offset(Int len_q, Int len_k) const { return bottom_right ? len_k - len_q : 0; }
  // Keys that the query at a position sees, and positions whose query sees a key; not limited to the sequence.
  // chunked: false if there are no chunks, and a kernel should have no code for them.
  template <bool chunked = true>
  constexpr Interval<Int> keys_of(Int position) const {
    return in_chunk<chunked>({position - left, position + right + 1}, position);
  }
  template <bool chunked = true>
  constexpr Interval<Int> positions_of(Int key) const {
    return in_chunk<chunked>({key - right, key + left + 1}, key);
  }
  // Keys that some query, or that every query, from one position to another sees. Both ends of keys_of never fall.
  template <bool chunked = true>
  constexpr Interval<Int> keys_of_any(Int first, Int last) const {
    return {keys_of<chunked>(first).begin, keys_of<chunked>(last).end};
  }
  template <bool chunked = true>
  constexpr Interval<Int> keys_of_all(Int first, Int last) const {
    return {keys_of<chunked>(last).begin, keys_of<chunked>(first).end};
  }

 private:
  // The part of an interval around x that lies in x's chunk.
  template <bool chunked>
  constexpr Interval<Int> in_chunk(const Interval<Int>& interval, Int x) const {
    if constexpr (!chunked) return interval;
    if (chunk <= 0) return interval;
    const Int beyond = x % chunk;  // negative positions exist: more queries than keys
    const Int first = x - beyond - (beyond < 0 ? chunk : 0);
    return {interval.begin > first ? interval.begin : first,
            interval.end < first + chunk ? interval.end : first + chunk};
  }
};
using Band = BasicBand<int>;  // as kernels take it
constexpr int kUnbounded = 1 << 30;

// Kernels use 32 bits and tiles. masked: false if the band is unbounded on both sides and has no chunks.

// Keys of the sequence that the query at a position sees.
template <bool masked, bool chunked = false>
constexpr Interval<int> visible_keys(const Band& band, int position, int len_k) {
  if constexpr (!masked) return {0, len_k};
  const Interval<int> keys = band.keys_of<chunked>(position);
  return {keys.begin, keys.end < len_k ? keys.end : len_k};
}

template <bool masked>
constexpr bool is_visible(const Band& band, int position, int key, int len_k) {
  if constexpr (!masked) return key < len_k;
  return visible_keys<masked>(band, position, len_k).contains(key);
}

// Keys of the sequence that some of a tile's queries see, and those that all of them see.
struct KeyRange {
  int begin, end;
  int clear_begin, clear_end;

  constexpr int first_tile(int block_k) const { return begin / block_k; }
  // Less than first_tile if no key is seen.
  constexpr int last_tile(int block_k) const { return end > begin ? (end - 1) / block_k : first_tile(block_k) - 1; }
  // One past the last tile; first_tile if no key is seen.
  constexpr int end_tile(int block_k) const { return end > begin ? (end - 1) / block_k + 1 : first_tile(block_k); }
  // Whether some query does not see some key of this tile, so that its scores have to be masked.
  constexpr bool is_masked(int first_k, int block_k) const {
    return first_k < clear_begin || first_k + block_k > clear_end;
  }
};

template <bool masked, bool chunked = false>
constexpr KeyRange key_range(const Band& band, int first_position, int last_position, int len_k) {
  if constexpr (!masked) return {0, len_k, 0, len_k};
  const Interval<int> any = band.keys_of_any<chunked>(first_position, last_position).within(len_k);
  const Interval<int> all = band.keys_of_all<chunked>(first_position, last_position);
  return {any.begin, any.end, all.begin, all.end < len_k ? all.end : len_k};
}

// Query tiles that see some of the keys from first_k to last_k: `count` tiles from `first` on.
struct QueryTiles {
  int first;
  int count;
};

constexpr QueryTiles query_tiles(const Interval<int>& queries, int block_q) {
  if (queries.empty()) return {0, 0};
  return {queries.begin / block_q, (queries.end - 1) / block_q + 1 - queries.begin / block_q};
}

constexpr QueryTiles query_tiles(const Band& band, int position_offset, int first_k, int last_k, int len_q,
                                 int block_q) {
  const Interval<int> queries = {band.positions_of<false>(first_k).begin - position_offset,
                                 band.positions_of<false>(last_k).end - position_offset};
  return query_tiles(queries.within(len_q), block_q);
}

// The host and the CPU backend use 64 bits, and single queries and keys.

struct Mask {
  bool causal = false;
  bool bottom_right = false;  // query i is at position i + Sk - Sq instead of i
  Index window_left = -1;     // -1: no bound
  Index window_right = -1;
  Index chunk = 0;  // 0: no chunks

  constexpr bool everything() const { return !causal && window_left < 0 && window_right < 0 && chunk == 0; }
};

constexpr BasicBand<Index> band_of(const Mask& mask) {
  constexpr Index kNoBound = Index{1} << 61;
  const auto edge = [](Index window) { return window < 0 || window > kNoBound ? kNoBound : window; };
  return {edge(mask.window_left), mask.causal ? 0 : edge(mask.window_right), mask.bottom_right, mask.chunk};
}

constexpr Index position_offset(const Mask& mask, Index seq_q, Index seq_k) {
  return band_of(mask).position_offset(seq_q, seq_k);
}

// Both ends within [0, length], so that the union of the ranges of neighbouring queries is {first.begin, last.end} even
// if some are empty.
constexpr Range clamped(const Range& range, Index length) {
  const auto clamp = [length](Index x) { return x < 0 ? 0 : x < length ? x : length; };
  return {clamp(range.begin), clamp(range.end)};
}

// Keys visible to query i.
constexpr Range visible_keys(const Mask& mask, Index i, Index seq_q, Index seq_k) {
  return clamped(band_of(mask).keys_of(i + position_offset(mask, seq_q, seq_k)), seq_k);
}

// Queries that see key j.
constexpr Range visible_queries(const Mask& mask, Index j, Index seq_q, Index seq_k) {
  return clamped(band_of(mask).positions_of(j - position_offset(mask, seq_q, seq_k)), seq_q);
}

}  // namespace tessera
