// The work of one CTA of attention/backward_sm90.cuh: block_k keys of one key head, and the queries that see them. Also
// how a warpgroup writes a gradient.
#pragma once

#include "attention/backward_sm90_config.h"
#include "ptx/acquire_release.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "tile/mask.h"
#include "tile/quad.cuh"
#include "tile/scheduler.h"
#include "tile/sequence.cuh"

namespace tessera {

// The work of a CTA. A step is a query tile of one head; the heads of the group, or of a part of it, follow one another.
template <AttentionBackwardSm90Config config>
struct BackwardSm90Work {
  int batch, kv_head;
  int part;        // of the group
  QuerySlice own;  // of the queries
  int first_k;
  int len_q, len_k;
  int position_offset;  // query i is at position i + position_offset
  QueryTiles tiles;     // the same for each head
  int steps;
  int start = 0;  // the first step's tile, if in_step: the tiles before it come last

  __forceinline__ BackwardSm90Work(const AttentionBackwardSm90Params& p, unsigned cta) {
    if constexpr (config.splits_queries) {
      own = query_slice(p.slices, cta);
      cta = own.item;
    }
    const WorkItem item = work_item(cta, p.k_tiles, p.columns, p.by_heads, p.together);
    batch = static_cast<int>(item.batch);
    kv_head = static_cast<int>(config.splits_group ? p.by_parts.quotient(item.head) : item.head);
    part = config.splits_group ? static_cast<int>(item.head) - kv_head * static_cast<int>(p.by_parts.by) : 0;
    first_k = static_cast<int>(in_reverse(p) ? p.k_tiles - 1 - item.tile : item.tile) * block_k_of(config);
    len_q = length_of(p.cu_seqlens_q, item.batch, p.seq_q);
    len_k = length_of(p.cu_seqlens_k, item.batch, p.seq_k);
    position_offset = p.band.position_offset(len_q, len_k);
    const int last_k = min(first_k + block_k_of(config), len_k) - 1;
    tiles = first_k < len_k ? query_tiles(p.band, position_offset, first_k, last_k, len_q, config.block_q)
                            : QueryTiles{0, 0};
    if constexpr (config.splits_queries) tiles = own.of(tiles, p.slices);
    steps = tiles.count * heads(p);
  }

  // In_step: the tile that the CTAs at work have reached on average, counted from this CTA's first; 0 if it is not one of
  // this CTA's.
  __forceinline__ int reached(const AttentionBackwardSm90Params& p) const {
    const unsigned all = static_cast<unsigned>((len_q + config.block_q - 1) / config.block_q);
    const int tile = static_cast<int>(load_relaxed(p.progress) / p.ctas_at_once % all) - tiles.first;
    return tile >= 0 && tile < tiles.count ? tile : 0;
  }

  // Query heads of this CTA: the first one, and how many there are.
  __forceinline__ int first_head(const AttentionBackwardSm90Params& p) const {
    const int first = kv_head * static_cast<int>(p.group);
    return config.splits_group ? first + part * static_cast<int>(p.part_heads) : first;
  }
  __forceinline__ int heads(const AttentionBackwardSm90Params& p) const {
    const int all = static_cast<int>(p.group);
    if constexpr (!config.splits_group) return all;
    const int each = static_cast<int>(p.part_heads);
    return min(each, all - part * each);
  }

  static __forceinline__ bool in_reverse(const AttentionBackwardSm90Params& p) {
    return config.deterministic && config.masked && comes_in_reverse(p.band);
  }
  // Of this CTA's keys at a query tile, if deterministic.
  __forceinline__ unsigned turn(const AttentionBackwardSm90Params& p, int query_tile) const {
    return turn_of(p.band, position_offset, first_k / block_k_of(config), query_tile, len_q, len_k, config.block_q,
                   block_k_of(config));
  }
  __forceinline__ TurnEnds turn_ends(const AttentionBackwardSm90Params& p, int query_tile) const {
    if constexpr (!config.masked) return {first_k == 0, first_k + block_k_of(config) >= len_k};
    return tessera::turn_ends(p.band, position_offset, first_k, query_tile, len_q, len_k, config.block_q,
                              block_k_of(config));
  }
};

// Rounds and writes 64 rows by `dim` columns that a warpgroup has as an accumulator; rows from `rows` on are left out.
// thread: of the warpgroup. The lanes of a quad hold a row in pieces of two columns; they exchange them so that each lane
// has 16 bytes.
template <DType dtype, int dim, int values>
__forceinline__ void store_gradient(const float (&sums)[values], Bits16* out, Index row_stride, int rows, float factor,
                                    int thread) {
  static_assert(dim <= 2 * values);
  const int lane = thread % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = thread / 32 * 16 + lane / 4 + half * 8;
#pragma unroll
    for (int n = 0; n < dim / 8; n += 4) {
      unsigned words[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (n + j >= dim / 8) continue;
        const float* const pair = sums + (n + j) * 4 + half * 2;
        words[j] = pack<dtype>(pair[0] * factor, pair[1] * factor);
      }
      transpose_quad(words, lane);
      if (row < rows && n + lane % 4 < dim / 8) {
        store_16(out + row * row_stride + (n + lane % 4) * 8, {words[0], words[1], words[2], words[3]});
      }
    }
  }
}

// dQ of the query tiles that see no key of the sequence; p and work are of a Hopper backward. thread: of `threads`.
template <int block_q, int dim, class Params, class Work>
__forceinline__ void write_zeros(const Params& p, const Work& work, int thread, int threads) {
  constexpr int kChunks = dim / 8;
  const QueryTiles seeing = work.len_k > 0
                                ? query_tiles(p.band, work.position_offset, 0, work.len_k - 1, work.len_q, block_q)
                                : QueryTiles{0, 0};
  const int begin = seeing.first * block_q, end = begin + seeing.count * block_q;
  if (begin == 0 && end >= work.len_q) return;
#pragma unroll 1
  for (int head = 0; head < work.heads(p); ++head) {
    Bits16* const out = rows_of(p.dq, p.dq_strides, p.cu_seqlens_q, work.batch, work.first_head(p) + head);
#pragma unroll 1
    for (Index i = thread; i < static_cast<Index>(work.len_q) * kChunks; i += threads) {
      const Index row = i / kChunks;
      if (row >= begin && row < end) continue;
      store_16(out + row * p.dq_strides.seq + i % kChunks * 8, Words4{});
    }
  }
}

}  // namespace tessera
