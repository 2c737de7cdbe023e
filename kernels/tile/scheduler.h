// Tile schedulers: which tiles a CTA processes, and in what order.
#pragma once

namespace tessera {

// Division of numbers below 2^31 by a multiplication and a shift: a CTA divides three times before its first load, and
// on a small problem that latency is noticeable.
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
// quotient is then too large by less than dividend / 2^(31 + s), which is too little to reach the next integer.
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

// Tiles of a head's queries, or of its keys, in scheduling order. Of the `columns` = batch x heads, `together` are
// processed at a time, so that the data their tiles share stays in the L2 cache; among those, tile 0 of each comes
// first. If the mask is causal, tile 0 should be the longest: the last queries, or the first keys.
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

// Static persistent scheduler: a CTA's tiles in boustrophedon order. If tiles get shorter with their index, every CTA
// then has long and short ones.
constexpr unsigned own_index(unsigned round, unsigned cta, unsigned ctas) {
  return round % 2 == 0 ? round * ctas + cta : (round + 1) * ctas - 1 - cta;
}

}  // namespace tessera
