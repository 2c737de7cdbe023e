// Which tiles blocks take, in what order, and the keys that a tile of queries needs.
#pragma once

#include "contract/band.h"

namespace tessera {

// Division of numbers below 2^31 by a product and a shift: before anything can be loaded, a block divides three times,
// and that is time that a small problem feels.
struct Divisor {
  unsigned by;
  unsigned multiplier;
  unsigned shift;

  constexpr unsigned quotient(unsigned dividend) const {
    if (by == 1) return dividend;
    return static_cast<unsigned>(static_cast<unsigned long long>(dividend) * multiplier >> 32) >> shift;
  }
};
// by: 1 to 2^31. With 2^(s - 1) < by <= 2^s the multiplier is 2^(31 + s) / by, rounded up by less than one; the
// quotient is then too large by less than dividend / 2^(31 + s), too little to reach the next number.
constexpr Divisor divisor(unsigned by) {
  unsigned s = 0;
  while (1ull << s < by) ++s;
  if (s == 0) return {by, 0, 0};
  return {by, static_cast<unsigned>(((1ull << (31 + s)) + by - 1) / by), s - 1};
}

struct WorkItem {
  unsigned batch;
  unsigned head;
  unsigned tile;
};

// Tiles of a head's queries, or of its keys, in the order they are taken. Of the `columns` = batch x heads, as many as
// `together` are worked on at a time, so that what their tiles share stays in the L2 cache; among those, tile 0 of each
// first. Where the mask is causal, that is to be the longest: the last queries, the first keys.
constexpr WorkItem work_item(unsigned index, unsigned tiles, unsigned columns, const Divisor& heads,
                             const Divisor& together) {
  const unsigned at_a_time = together.by * tiles;
  const unsigned first = index < at_a_time ? 0 : index / at_a_time * together.by;
  const unsigned width = columns - first < together.by ? columns - first : together.by;
  const unsigned within = index - first * tiles;
  const unsigned row = width == together.by ? together.quotient(within) : within / width;
  const unsigned column = first + within - row * width;
  const unsigned batch = heads.quotient(column);
  return {batch, column - batch * heads.by, row};
}

// A block's own tiles, there and back: of tiles that get shorter, each block then has long and short ones.
constexpr unsigned own_index(unsigned round, unsigned block, unsigned blocks) {
  return round % 2 == 0 ? round * blocks + block : (round + 1) * blocks - 1 - block;
}

// Keys [begin, end) that some of the queries from first_q to last_q see, and those that all of them see.
struct KeyRange {
  int begin, end;
  int clear_begin, clear_end;

  constexpr int first_tile(int block_k) const { return begin / block_k; }
  // Less than first_tile where no key is seen.
  constexpr int last_tile(int block_k) const { return end > begin ? (end - 1) / block_k : first_tile(block_k) - 1; }
};

constexpr KeyRange key_range(const Band& band, int position_offset, int first_q, int last_q, int len_k) {
  if (last_q < first_q) return {0, 0, 0, 0};
  const int first = first_q + position_offset;
  const int last = last_q + position_offset;
  const int begin = first - band.left;
  const int end = last + band.right + 1;
  const int clear_end = first + band.right + 1;
  return {begin > 0 ? begin : 0, end < len_k ? end : len_k, last - band.left, clear_end < len_k ? clear_end : len_k};
}

}  // namespace tessera
