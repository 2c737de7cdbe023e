// The work tiles of gemm/dense_sm90.cuh, in the order in which every role of a CTA visits them.
#pragma once

#include "gemm/dense_sm90_config.h"
#include "ptx/cluster.cuh"

namespace tessera {

template <GemmDenseSm90Config config>
using GemmDenseSm90ParamsOf = GemmDenseSm90Params<gemm_sm90::m_groups(config), gemm_sm90::k_groups(config)>;

struct GemmDenseSm90Work {
  int row;      // first row of the tile; kStridedM: among those with its residue
  int end_row;  // rows of out from here on do not exist, or are of another group
  int column;   // first column of out; below 0 if rows of out are shifted
  int residue;  // kStridedM, kStridedK: the index of its rows, or terms, modulo 8; else 0
  int group;
  int layer;                 // of out
  int first_step, end_step;  // of K
  int first_k, end_k;        // terms of the group, if sums are ragged; step 0 begins at first_k
};

// Which CTA computes what follows from the grid alone; if groups are ragged, from their offsets, too, which every role
// reads by itself. whole_warp: all lanes call it, and the compiler is to know that they get the same.
template <GemmDenseSm90Config config, bool whole_warp>
struct GemmDenseSm90Tiles {
  using Params = GemmDenseSm90ParamsOf<config>;
  using Work = GemmDenseSm90Work;

  const Params& p;
  unsigned index = blockIdx.x / config.cluster;
  int group = 0;       // ragged rows: the one of the last tile
  unsigned first = 0;  // and the index of its first tile
  int steps_done = 0;  // kStridedK: of the part `index`

  static __forceinline__ GroupRange range_of(const Params& p, int group, int rows) {
    GroupRange range = group_range(p.offsets, group, rows);
    if constexpr (whole_warp) {
      range.begin = __shfl_sync(0xffffffffu, range.begin, 0);
      range.end = __shfl_sync(0xffffffffu, range.end, 0);
    }
    return range;
  }

  // False if there are no more.
  __forceinline__ bool next(Work& work) {
    TileOrder order = p.order;
    unsigned tile = index;
    GroupRange range = {0, p.m};
    work.group = work.layer = work.residue = 0;
    work.first_k = 0;
    work.end_k = p.k;
    if constexpr (config.grouping == kRaggedRows) {
      constexpr int kRows = config.block_m * config.cluster;
      for (;; ++group) {
        if (group >= p.groups) return false;
        range = range_of(p, group, p.m);
        order.row_tiles = static_cast<unsigned>((range.end - range.begin + kRows - 1) / kRows);
        const unsigned tiles = order.row_tiles * order.column_tiles;
        if (index - first < tiles) break;
        first += tiles;
      }
      work.group = group;
      tile = index - first;
    } else {
      if (index >= p.work_tiles) return false;
      if constexpr (config.grouping != kUngrouped) {  // the tiles of a group are adjacent work
        const unsigned tiles = order.row_tiles * order.column_tiles;
        work.group = work.layer = static_cast<int>(index / tiles);
        tile = index - work.group * tiles;
      }
    }
    work.first_step = 0;
    work.end_step = p.k_steps;
    if constexpr (config.grouping == kRaggedSums) {
      const GroupRange terms = range_of(p, work.group, p.k);
      work.first_k = terms.begin;
      work.end_k = terms.end;
      // An empty group has one step, all of whose terms are cleared.
      work.end_step = max(1, (terms.end - terms.begin + gemm_sm90::kBlockK - 1) / gemm_sm90::kBlockK);
    }
    // The steps of a tile's groups of terms, one after the other, are divided into parts. Where a part has steps of several
    // groups, each is work of its own: its sums are shifted differently. Layers are numbered in this order, with a gap
    // where a part and a group begin together.
    if constexpr (config.strided == kStridedK) {
      tile = index / p.splits;
      const int part = static_cast<int>(index - tile * p.splits);
      const int end = min((part + 1) * p.k_steps_per_split, gemm_sm90::kRowGroups * p.k_steps);
      const int at = part * p.k_steps_per_split + steps_done;
      work.residue = at / p.k_steps;
      work.layer = part + work.residue;
      work.first_step = at - work.residue * p.k_steps;
      work.end_step = min(work.first_step + end - at, p.k_steps);
      const int steps = work.end_step - work.first_step;
      steps_done = at + steps < end ? steps_done + steps : 0;
    } else if constexpr (config.split) {  // partial sums of a tile are adjacent work
      tile = index / p.splits;
      work.layer = static_cast<int>(index - tile * p.splits);
      work.first_step = work.layer * p.k_steps_per_split;
      work.end_step = min(work.first_step + p.k_steps_per_split, p.k_steps);
    }
    const TilePosition at = tile_position(order, tile);
    unsigned row = at.row;
    if constexpr (config.strided == kStridedM) {  // tiles of the same rows of memory are adjacent
      work.residue = static_cast<int>(row % gemm_sm90::kRowGroups);
      row /= gemm_sm90::kRowGroups;
    }
    unsigned column = at.column;
    if constexpr (config.cluster > 1) (config.shares_a ? column : row) *= config.cluster;
    if constexpr (config.cluster > 1) (config.shares_a ? column : row) += cluster_cta_rank();
    work.row = range.begin + static_cast<int>(row) * config.block_m;
    work.end_row = range.end;
    work.column = static_cast<int>(column) * gemm_sm90::out_columns(config);
    if constexpr (config.edges) work.column -= p.out_shift[work.residue];
    if (config.strided != kStridedK || steps_done == 0) index += gridDim.x / config.cluster;
    return true;
  }
};

}  // namespace tessera
