// Which keys a query sees, written once for the CPU backend and for every kernel.
#pragma once

#include "contract/types.h"

namespace tessera {

struct Mask {
  bool causal = false;
  bool bottom_right = false;  // query i stands at key i + Sk - Sq instead of i
  Index window_left = -1;     // -1: no bound
  Index window_right = -1;

  constexpr bool everything() const { return !causal && window_left < 0 && window_right < 0; }
};

struct Range {
  Index begin = 0;
  Index end = 0;  // exclusive; empty where end <= begin

  constexpr bool empty() const { return end <= begin; }
};

constexpr Index position_offset(const Mask& mask, Index seq_q, Index seq_k) {
  return mask.bottom_right ? seq_k - seq_q : 0;
}

// Keys visible to query i.
constexpr Range visible_keys(const Mask& mask, Index i, Index seq_q, Index seq_k) {
  const Index position = i + position_offset(mask, seq_q, seq_k);
  Range range{0, seq_k};
  if (mask.window_left >= 0 && position - mask.window_left > range.begin) range.begin = position - mask.window_left;
  if (mask.window_right >= 0 && position + mask.window_right + 1 < range.end) {
    range.end = position + mask.window_right + 1;
  }
  if (mask.causal && position + 1 < range.end) range.end = position + 1;
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

// Queries that see key j: the same relation, read the other way.
constexpr Range visible_queries(const Mask& mask, Index j, Index seq_q, Index seq_k) {
  const Index row = j - position_offset(mask, seq_q, seq_k);  // the query that stands on key j
  Range range{0, seq_q};
  if (mask.causal && row > range.begin) range.begin = row;
  if (mask.window_right >= 0 && row - mask.window_right > range.begin) range.begin = row - mask.window_right;
  if (mask.window_left >= 0 && row + mask.window_left + 1 < range.end) range.end = row + mask.window_left + 1;
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

}  // namespace tessera
