// Which tiles of queries a persistent block takes, one after the other, and the keys that each needs.
#pragma once

#include "contract/band.h"

namespace tessera {

struct WorkItem {
  unsigned batch;
  unsigned head;
  unsigned q_tile;
};

// Tiles in the order they are taken. Of the `columns` = batch x heads_q, as many as `together` are worked on at a time,
// so that their keys and values stay in the L2 cache; among those the last queries first, since they see the most keys
// where the mask is causal.
constexpr WorkItem work_item(unsigned index, unsigned q_tiles, unsigned columns, unsigned heads_q, unsigned together) {
  const unsigned at_a_time = together * q_tiles;
  const unsigned first = index < at_a_time ? 0 : index / at_a_time * together;  // a division is what a small grid feels
  const unsigned width = columns - first < together ? columns - first : together;
  const unsigned within = index - first * q_tiles;
  const unsigned column = first + within % width;
  return {column / heads_q, column % heads_q, q_tiles - 1 - within / width};
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
