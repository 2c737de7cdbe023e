// The work tiles of gemm/dense_sm90.cuh, in the order in which every role of a CTA visits them.
#pragma once

#include "gemm/dense_sm90_config.h"
#include "ptx/cluster.cuh"

namespace tessera {

template <GemmDenseSm90Config config>
using GemmDenseSm90ParamsOf = GemmDenseSm90Params<gemm_sm90::m_groups(config), gemm_sm90::k_groups(config)>;

struct GemmDenseSm90Work {
  int row;     // first row of the tile
  int column;  // first column of out
  int split;
  int first_step, end_step;  // of K
};

// Partial sums of a tile are adjacent work.
template <GemmDenseSm90Config config>
__forceinline__ GemmDenseSm90Work gemm_dense_sm90_work(const GemmDenseSm90ParamsOf<config>& p, unsigned index) {
  unsigned tile = index, split = 0;
  if constexpr (config.split) {
    tile = index / p.splits;
    split = index - tile * p.splits;
  }
  const TilePosition at = tile_position(p.order, tile);
  unsigned row = at.row;
  if constexpr (config.cluster > 1) row = row * config.cluster + cluster_cta_rank();
  GemmDenseSm90Work work;
  work.row = static_cast<int>(row) * config.block_m;
  work.column = static_cast<int>(at.column) * gemm_sm90::out_columns(config);
  work.split = static_cast<int>(split);
  work.first_step = config.split ? static_cast<int>(split) * p.k_steps_per_split : 0;
  work.end_step = config.split ? min(work.first_step + p.k_steps_per_split, p.k_steps) : p.k_steps;
  return work;
}

}  // namespace tessera
