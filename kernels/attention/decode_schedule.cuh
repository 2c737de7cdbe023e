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

  __forceinline__ int units(const DecodeSchedule& s) const { return (tiles - 1 >> s.unit_shift) + 1; }
  __forceinline__ DecodeSequence of_lane(int lane) const {
    const auto from = [lane](int mine) { return __shfl_sync(0xffffffffu, mine, lane); };
    return {from(old_length), from(length), from(begin), from(first_tile), from(tiles), from(refused) != 0};
  }
  // What the schedule counts: the end of a sequence takes time, too.
  __forceinline__ int cost(const DecodeSchedule& s) const { return units(s) + s.end_cost; }
};

__forceinline__ int page_of(const DecodeSchedule& s, int key) { return static_cast<int>(s.page_size.quotient(key)); }

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
    fits &= position >= 0 && position <= s.rotary_rows - max(s.seq_new, static_cast<int>(s.seq_q.by));
  }
  if (fits && s.page_table && s.seq_new > 0) fits = has_pages(s, batch, old_length, old_length + s.seq_new - 1);
  sequence.refused = !fits;
  sequence.old_length = fits ? old_length : 0;
  sequence.length = fits ? old_length + s.seq_new : 0;
  const int first_seen = s.band.keys_of(sequence.length - static_cast<int>(s.seq_q.by)).begin;
  sequence.begin = max(first_seen, leftpad);
  const int from = max(0, min(sequence.begin, s.seq_new > 0 ? sequence.old_length : sequence.length));
  sequence.first_tile = from >> s.tile_shift;
  sequence.tiles = max(1, (sequence.length - 1 >> s.tile_shift) + 1 - sequence.first_tile);
  return sequence;
}

// All units are divided among the CTAs as evenly as possible: the first `longer` have one more than the others.
struct DecodeShares {
  unsigned each;
  unsigned longer;

  __forceinline__ DecodeShares(const DecodeSchedule& s, unsigned units)
      : each(s.ctas.quotient(units)), longer(units - each * s.ctas.by) {}

  __forceinline__ unsigned first_of(unsigned cta) const { return cta * each + min(cta, longer); }
  __forceinline__ unsigned count_of(unsigned cta) const { return each + (cta < longer ? 1 : 0); }
  __forceinline__ unsigned owner_of(unsigned unit) const {
    const unsigned in_longer = longer * (each + 1);
    return unit < in_longer ? unit / (each + 1) : longer + (unit - in_longer) / each;
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

  // The CTA's share of all units. Called by whole warps: a lane looks at every 32nd sequence.
  __forceinline__ DecodeWalk(const DecodeSchedule& schedule, unsigned cta)
      : s(schedule), units_left(0), batch(0), column(0), tile(0), sequence{} {
    unsigned unit = 0;  // of all, the CTA's first
    if (!find_share(cta, unit)) return;
    const unsigned cost = sequence.cost(s);
    const unsigned blocks = unit / cost;  // before it, of this sequence or, if all are equal, of all
    column = static_cast<int>(blocks);
    if (s.equal && s.batch > 1) {
      batch = static_cast<int>(blocks / s.columns);
      column -= batch * s.columns;
    }
    unit -= blocks * cost;
    const int beyond = static_cast<int>(unit) - sequence.units(s);
    if (beyond >= 0) {  // another CTA has this sequence's end
      units_left -= min(units_left, static_cast<unsigned>(s.end_cost - beyond));
      next_column();
    } else {
      tile = static_cast<int>(unit) << s.unit_shift;
    }
  }

  // One CTA of `cluster` that share a row block of a key head of a sequence. It may have no tile at all.
  __forceinline__ DecodeWalk(const DecodeSchedule& schedule, int cluster, int rank, int which)
      : s(schedule), batch(which / schedule.columns), column(which - batch * schedule.columns) {
    sequence = sequence_of(s, batch);
    const int each = sequence.tiles / cluster, longer = sequence.tiles % cluster;
    units_left = static_cast<unsigned>(each + (rank < longer ? 1 : 0));
    tile = rank * each + min(rank, longer);
  }

  __forceinline__ bool done() const { return units_left == 0; }
  __forceinline__ int first_key() const { return (sequence.first_tile + tile) << s.tile_shift; }
  __forceinline__ bool ends_sequence() const { return tile + 1 == sequence.tiles; }
  __forceinline__ bool ends_unit() const { return ((tile + 1) & ((1 << s.unit_shift) - 1)) == 0 || ends_sequence(); }
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
    units_left -= min(units_left, static_cast<unsigned>(s.end_cost));
    next_column();
  }

 private:
  __forceinline__ bool take_share(unsigned units, unsigned cta, unsigned& first) {
    const DecodeShares shares(s, units);
    units_left = shares.count_of(cta);
    first = shares.first_of(cta);
    return units_left > 0;
  }

  __forceinline__ void next_column() {
    tile = 0;
    if (++column < s.columns) return;
    column = 0;
    ++batch;
    if (!done()) sequence = sequence_of(s, batch);
  }

  // Sets units_left, and batch and sequence to those of the CTA's first unit, which is then counted from that sequence's
  // first one. Returns false if there is none. First the number of all units is needed, then the sequence that has this one: a
  // second look at the lengths, unless a warp has seen all of them at once. If all sequences are equal, one is looked at.
  __forceinline__ bool find_share(unsigned cta, unsigned& unit) {
    const int lane = threadIdx.x % 32;
    unsigned before = 0;
    bool finds = false;
#pragma unroll 1
    for (int first = 0; first < s.batch; first += 32) {
      const DecodeSequence mine = sequence_of(s, min(first + lane, s.batch - 1));
      const unsigned cost = mine.cost(s) * s.columns;
      if (s.equal) {
        sequence = mine;
        return take_share(cost * s.batch, cta, unit);
      }
      const unsigned own = first + lane < s.batch ? cost : 0;
      unsigned up_to = before + own;  // of all sequences up to and including this lane's
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const unsigned below = __shfl_up_sync(0xffffffffu, up_to - before, step);
        if (lane >= step) up_to += below;
      }
      const unsigned all = __shfl_sync(0xffffffffu, up_to, 31);
      if (!finds && first + 32 >= s.batch) {
        if (!take_share(all, cta, unit)) return false;
        finds = true;
        if (s.batch > 32) {
          first = -32;
          before = 0;
          continue;
        }
      }
      const unsigned beyond = __ballot_sync(0xffffffffu, up_to > unit);
      if (finds && beyond != 0) {
        const int at = __ffs(static_cast<int>(beyond)) - 1;
        batch = first + at;
        sequence = mine.of_lane(at);
        unit -= __shfl_sync(0xffffffffu, up_to - own, at);
        return true;
      }
      before = all;
    }
    units_left = 0;
    return false;
  }
};

}  // namespace tessera
