// Which units of work a CTA of attention/decode.cuh has, and which CTAs share a sequence: the main kernel and the one
// that combines its partial results compute the same schedule from the lengths in device memory. A graph that was
// captured once is therefore right, and balanced, for any lengths.
#pragma once

#include "attention/decode_config.h"
#include "ptx/convert.cuh"

namespace tessera {

// What the lengths say of one sequence.
struct DecodeSequence {
  int old_length;  // keys in the cache before this call's are appended
  int length;      // and after
  int begin;       // the first key that a query sees; `length` or more if there is none
  int first_tile;  // of those that are processed: with a visible or a new key
  int tiles;       // at least 1, so that every output is written
  bool refused;    // lengths or indices do not fit the cache

  __forceinline__ int units(const DecodeSchedule& s) const { return (tiles + s.unit_tiles - 1) / s.unit_tiles; }
};

__forceinline__ int page_of(const DecodeSchedule& s, int key) {
  return s.page_shift >= 0 ? key >> s.page_shift : key / s.page_size;
}

// New keys must not be written outside the cache, whatever the table says.
__forceinline__ bool has_pages(const DecodeSchedule& s, int batch, int first_key, int last_key) {
  bool valid = true;
  for (int page = page_of(s, first_key); page <= page_of(s, last_key); ++page) {
    valid &=
        static_cast<unsigned>(s.page_table[batch * s.page_table_stride + page]) < static_cast<unsigned>(s.num_pages);
  }
  return valid;
}

__forceinline__ DecodeSequence sequence_of(const DecodeSchedule& s, int batch) {
  DecodeSequence sequence;
  int old_length = s.cache_seqlens ? s.cache_seqlens[batch] : s.capacity;
  const int leftpad = s.leftpad_k ? s.leftpad_k[batch] : 0;
  const int row = s.cache_batch_idx ? s.cache_batch_idx[batch] : 0;
  const int position = s.rotary_rows == 0 ? 0 : s.rotary_seqlens ? s.rotary_seqlens[batch] : old_length;
  bool fits = old_length >= 0 && old_length <= s.capacity - s.seq_new && leftpad >= 0;
  if (s.cache_batch_idx) fits &= row >= 0 && row < s.cache_rows;
  if (s.rotary_rows != 0) {
    fits &= position >= 0 && position <= s.rotary_rows - (s.seq_new > s.seq_q ? s.seq_new : s.seq_q);
  }
  if (fits && s.page_table && s.seq_new > 0) fits = has_pages(s, batch, old_length, old_length + s.seq_new - 1);
  sequence.refused = !fits;
  sequence.old_length = fits ? old_length : 0;
  sequence.length = fits ? old_length + s.seq_new : 0;
  const int first_seen = s.band.keys_of(sequence.length - s.seq_q).begin;
  sequence.begin = max(first_seen, leftpad);
  const int from = max(0, min(sequence.begin, s.seq_new > 0 ? sequence.old_length : sequence.length));
  sequence.first_tile = from / s.block_k;
  sequence.tiles = max(1, (sequence.length + s.block_k - 1) / s.block_k - sequence.first_tile);
  return sequence;
}

// Units of all sequences before `batch`, times the columns. Called by whole warps.
__forceinline__ Index units_before(const DecodeSchedule& s, int batch) {
  const int lane = threadIdx.x % 32;
  Index units = 0;
  for (int b = lane; b < batch; b += 32) units += sequence_of(s, b).units(s);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) units += __shfl_xor_sync(0xffffffffu, units, step);
  return units * s.columns;
}

// All units are divided among the CTAs as evenly as possible: the first `longer` have one more than the others.
struct DecodeShares {
  unsigned each;
  unsigned longer;

  __forceinline__ DecodeShares(Index units, unsigned ctas) {
    if (units >> 32 == 0) {
      each = static_cast<unsigned>(units) / ctas;
      longer = static_cast<unsigned>(units) % ctas;
    } else {
      each = static_cast<unsigned>(units / ctas);
      longer = static_cast<unsigned>(units % ctas);
    }
  }
  __forceinline__ Index first_of(unsigned cta) const {
    return static_cast<Index>(cta) * each + (cta < longer ? cta : longer);
  }
  __forceinline__ unsigned count_of(unsigned cta) const { return each + (cta < longer ? 1 : 0); }
  __forceinline__ unsigned owner_of(Index unit) const {
    const Index in_longer = static_cast<Index>(longer) * (each + 1);
    const Index rest = unit < in_longer ? unit : unit - in_longer;
    const unsigned by = unit < in_longer ? each + 1 : each;
    const unsigned at = rest >> 32 == 0 ? static_cast<unsigned>(rest) / by : static_cast<unsigned>(rest / by);
    return unit < in_longer ? at : longer + at;
  }
};

// Where a partial result is kept. A CTA has at most two: of a sequence whose first units another CTA has, and of one
// whose last units another CTA has.
__forceinline__ Index partial_slot(const DecodeSchedule& s, unsigned cta, bool from_first_unit, int batch, int column,
                                   int unit) {
  if (s.every_unit) return (static_cast<Index>(batch) * s.columns + column) * s.most_units + unit;
  return static_cast<Index>(cta) * 2 + (from_first_unit ? 1 : 0);
}

// Walks over a CTA's tiles: all of a row block of a key head, then the next, then the next sequence.
struct DecodeWalk {
  const DecodeSchedule& s;
  unsigned units_left;
  int batch, column;
  int tile;  // counted from the sequence's first one
  DecodeSequence sequence;

  __forceinline__ DecodeWalk(const DecodeSchedule& schedule, const DecodeShares& shares, unsigned cta)
      : s(schedule), units_left(shares.count_of(cta)), batch(0), column(0), tile(0) {
    if (units_left == 0) return;
    Index unit = shares.first_of(cta);
    find_sequence(unit);
    const int units = sequence.units(s);
    if (s.columns > 1) {
      column = static_cast<int>(static_cast<unsigned>(unit) / units);
      unit -= static_cast<Index>(column) * units;
    }
    tile = static_cast<int>(unit) * s.unit_tiles;
  }

  // One CTA of `cluster` that share a row block of a key head of a sequence. It may have no tile at all.
  __forceinline__ DecodeWalk(const DecodeSchedule& schedule, int cluster, int rank, int which)
      : s(schedule), batch(which / schedule.columns), column(which % schedule.columns) {
    sequence = sequence_of(s, batch);
    const int each = sequence.tiles / cluster, longer = sequence.tiles % cluster;
    units_left = static_cast<unsigned>(each + (rank < longer ? 1 : 0));
    tile = rank * each + min(rank, longer);
  }

  __forceinline__ bool done() const { return units_left == 0; }
  __forceinline__ int first_key() const { return (sequence.first_tile + tile) * s.block_k; }
  __forceinline__ bool ends_sequence() const { return tile + 1 == sequence.tiles; }
  __forceinline__ bool ends_unit() const { return ((tile + 1) & (s.unit_tiles - 1)) == 0 || ends_sequence(); }
  // The last tile of a result, whole or partial.
  __forceinline__ bool ends_segment() const {
    return ends_sequence() || (ends_unit() && (units_left == 1 || s.every_unit));
  }

  __forceinline__ void next() {
    if (ends_unit()) --units_left;
    if (!ends_sequence()) {
      ++tile;
      return;
    }
    tile = 0;
    if (++column < s.columns) return;
    column = 0;
    ++batch;
    if (!done()) sequence = sequence_of(s, batch);
  }

 private:
  // Moves `unit`, counted from the first sequence, to its own sequence. Called by whole warps.
  __forceinline__ void find_sequence(Index& unit) {
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < s.batch; first += 32) {
      const int mine = first + lane;
      const Index own = mine < s.batch ? static_cast<Index>(sequence_of(s, mine).units(s)) * s.columns : 0;
      Index up_to = own;  // and including this lane's
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const Index below = __shfl_up_sync(0xffffffffu, up_to, step);
        if (lane >= step) up_to += below;
      }
      const unsigned beyond = __ballot_sync(0xffffffffu, up_to > unit);
      const int at = beyond == 0 ? 31 : __ffs(static_cast<int>(beyond)) - 1;
      const Index all = __shfl_sync(0xffffffffu, up_to, at);
      if (beyond == 0) {
        unit -= all;
        continue;
      }
      unit -= all - __shfl_sync(0xffffffffu, own, at);
      batch = first + at;
      break;
    }
    sequence = sequence_of(s, batch);
  }
};

}  // namespace tessera
