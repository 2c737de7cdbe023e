// The work of one CTA of attention/backward_wide_sm90.cuh: 64 keys of one key head, and the queries that see them.
#pragma once

#include "attention/backward_wide_sm90_config.h"
#include "tile/mask.h"
#include "tile/scheduler.h"
#include "tile/sequence.cuh"

namespace tessera {

// A step is a query tile of one head; the heads of the group follow one another.
struct BackwardWideSm90Work {
  int batch, kv_head;
  int first_k;
  int len_q, len_k;
  int position_offset;  // query i is at position i + position_offset
  QueryTiles tiles;     // the same for each head
  int steps;

  __forceinline__ BackwardWideSm90Work(const AttentionBackwardWideSm90Params& p, unsigned cta) {
    const WorkItem item = work_item(cta, p.k_tiles, p.columns, p.by_heads, p.together);
    batch = static_cast<int>(item.batch);
    kv_head = static_cast<int>(item.head);
    first_k = static_cast<int>(item.tile) * kBackwardWideTile;
    len_q = length_of(p.cu_seqlens_q, item.batch, p.seq_q);
    len_k = length_of(p.cu_seqlens_k, item.batch, p.seq_k);
    position_offset = p.band.position_offset(len_q, len_k);
    const int last_k = min(first_k + kBackwardWideTile, len_k) - 1;
    tiles = first_k < len_k ? query_tiles(p.band, position_offset, first_k, last_k, len_q, kBackwardWideTile)
                            : QueryTiles{0, 0};
    steps = tiles.count * static_cast<int>(p.group);
  }
};

}  // namespace tessera
