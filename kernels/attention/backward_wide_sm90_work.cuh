// The work of one CTA of attention/backward_wide_sm90.cuh: 64 keys of one key head, and the queries that see them.
#pragma once

#include "attention/backward_wide_sm90_config.h"
#include "tile/mask.h"
#include "tile/scheduler.h"
#include "tile/sequence.cuh"

namespace tessera {

// A step is a query tile of one head; the heads of the group, or of a part of it, follow one another.
template <AttentionBackwardWideSm90Config config>
struct BackwardWideSm90Work {
  static constexpr int kClusterKeys = config.cluster * kBackwardWideTile;

  int batch, kv_head;
  int part;  // of the group
  int first_k;
  int first_cluster_k;  // of the cluster's keys
  int len_q, len_k;
  int position_offset;  // query i is at position i + position_offset
  QueryTiles tiles;     // the same for each head, and for each CTA of a cluster
  int steps;

  __forceinline__ BackwardWideSm90Work(const AttentionBackwardWideSm90Params& p, unsigned cta) {
    const WorkItem item = work_item(cta / config.cluster, p.k_tiles, p.columns, p.by_heads, p.together);
    batch = static_cast<int>(item.batch);
    kv_head = static_cast<int>(config.splits_group ? p.by_parts.quotient(item.head) : item.head);
    part = config.splits_group ? static_cast<int>(item.head) - kv_head * static_cast<int>(p.by_parts.by) : 0;
    first_cluster_k = static_cast<int>(in_reverse(p) ? p.k_tiles - 1 - item.tile : item.tile) * kClusterKeys;
    first_k = first_cluster_k + static_cast<int>(cta % config.cluster) * kBackwardWideTile;
    len_q = length_of(p.cu_seqlens_q, item.batch, p.seq_q);
    len_k = length_of(p.cu_seqlens_k, item.batch, p.seq_k);
    position_offset = p.band.position_offset(len_q, len_k);
    const int last_k = min(first_cluster_k + kClusterKeys, len_k) - 1;
    tiles = first_cluster_k < len_k
                ? query_tiles(p.band, position_offset, first_cluster_k, last_k, len_q, kBackwardWideTile)
                : QueryTiles{0, 0};
    steps = tiles.count * heads(p);
  }

  // Query heads of this CTA: the first one, and how many there are.
  __forceinline__ int first_head(const AttentionBackwardWideSm90Params& p) const {
    const int first = kv_head * static_cast<int>(p.group);
    return config.splits_group ? first + part * static_cast<int>(p.part_heads) : first;
  }
  __forceinline__ int heads(const AttentionBackwardWideSm90Params& p) const {
    const int all = static_cast<int>(p.group);
    if constexpr (!config.splits_group) return all;
    const int each = static_cast<int>(p.part_heads);
    return min(each, all - part * each);
  }

  static __forceinline__ bool in_reverse(const AttentionBackwardWideSm90Params& p) {
    return config.deterministic && config.masked && comes_in_reverse(p.band);
  }
  // Of this cluster's keys at a query tile, if deterministic.
  __forceinline__ unsigned turn(const AttentionBackwardWideSm90Params& p, int query_tile) const {
    return turn_of(p.band, position_offset, first_cluster_k / kClusterKeys, query_tile, len_q, len_k, kBackwardWideTile,
                   kClusterKeys);
  }
  __forceinline__ TurnEnds turn_ends(const AttentionBackwardWideSm90Params& p, int query_tile) const {
    if constexpr (!config.masked) return {first_cluster_k == 0, first_cluster_k + kClusterKeys >= len_k};
    return tessera::turn_ends(p.band, position_offset, first_cluster_k, query_tile, len_q, len_k, kBackwardWideTile,
                              kClusterKeys);
  }
};

}  // namespace tessera
