// Which tile of queries a persistent block takes next, and what there is to do for it.
#pragma once

#include "contract/attention_forward.h"
#include "ptx/math.cuh"
#include "tile/sequence.cuh"

namespace tessera {

// Tiles in the order they are taken: heads whose keys and values fit the L2 cache together, among those the last
// queries first, since they see the most keys where the mask is causal.
struct WorkItem {
  unsigned batch;
  unsigned head;
  unsigned q_tile;
};
template <class Params>
__forceinline__ WorkItem work_item(const Params& p, unsigned index) {
  const unsigned section = index / (p.together * p.q_tiles);
  const unsigned first = section * p.together;
  const unsigned width = min(p.together, p.columns - first);
  const unsigned within = index - first * p.q_tiles;
  const unsigned column = first + within % width;
  return {column / p.heads_q, column % p.heads_q, p.q_tiles - 1 - within / width};
}

// A block's own tiles, there and back: of tiles that get shorter, each block then has long and short ones.
__forceinline__ unsigned own_index(unsigned round) {
  return round % 2 == 0 ? round * gridDim.x + blockIdx.x : (round + 1) * gridDim.x - 1 - blockIdx.x;
}

// Keys that some of the queries [first_q, last_q] see, and those that all of them see.
struct KeyRange {
  int begin, end;
  int clear_begin, clear_end;

  __forceinline__ int first_tile(int block_k) const { return begin / block_k; }
  // Less than first_tile where no key is seen.
  __forceinline__ int last_tile(int block_k) const {
    return end > begin ? (end - 1) / block_k : first_tile(block_k) - 1;
  }
};
template <bool banded>
__forceinline__ KeyRange key_range(const Band& band, int position_offset, int first_q, int last_q, int len_k) {
  if (last_q < first_q) return {0, 0, 0, 0};
  if constexpr (!banded) return {0, len_k, 0, len_k};
  const int first = first_q + position_offset;
  const int last = last_q + position_offset;
  return {max(0, first - band.left), min(len_k, last + band.right + 1), last - band.left,
          min(len_k, first + band.right + 1)};
}

}  // namespace tessera
