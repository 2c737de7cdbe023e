// The producer of attention/forward_fp8_sm90.cuh: one thread that schedules the work tiles and issues the TMA loads.
#pragma once

#include "attention/forward_fp8_sm90_config.h"
#include "attention/forward_fp8_sm90_work_tile.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"
#include "tile/scheduler.h"
#include "tile/sequence.cuh"

namespace tessera {

template <AttentionForwardFp8Sm90Config config>
struct ForwardFp8Sm90Producer {
  using WorkTileInfo = ForwardFp8Sm90WorkTileInfo;
  static constexpr ForwardFp8Sm90Layout kAt = forward_fp8_sm90_layout(config);
  static constexpr int kQkColumns = fp8_columns(config.dim_qk);
  static constexpr int kKeyColumns = fp8_columns(config.block_k);

  const AttentionForwardFp8Sm90Params& p;
  unsigned shared;
  PipelineState<config.q_stages> q_pipe = {};
  PipelineState<config.stages> k_pipe = {}, v_pipe = {};
  PipelineState<kWorkTileSlots> work_pipe = {};

  // The keys of a work tile: where TMA finds them.
  struct Keys {
    int head;
    RowOrigin k;
    RowOrigin v;  // y is on the axis of columns
  };

  // All swizzle atoms of a tile of `rows` rows and `columns` 16-bit columns, from column x and row y on.
  template <int rows, int columns>
  __forceinline__ void load(unsigned destination, const AtomMaps& maps, unsigned full, int x, int y, int head, int z) {
    mbarrier_arrive_expect_tx(full, rows * padded_dim(columns, kFp8MinAtom) * 2);
#pragma unroll
    for (int column = 0; column < padded_dim(columns, kFp8MinAtom);
         column += atom_at(columns, kFp8MinAtom, column).width) {
      const SwizzleAtom atom = atom_at(columns, kFp8MinAtom, column);
      tma_load(destination + atom_offset(atom, rows), maps.by_width[map_index(atom.width)], full, x + column, y, head,
               z);
    }
  }

  // Waits until the next stage of Q is empty and returns its full barrier.
  __forceinline__ unsigned acquire_q() {
    mbarrier_wait_parity(shared + kAt.q_empty + q_pipe.index * kMbarrierBytes, q_pipe.parity ^ 1);
    return shared + kAt.q_full + q_pipe.index * kMbarrierBytes;
  }
  __forceinline__ void load_q(const WorkTileInfo& info, unsigned full) {
    const RowOrigin origin = row_origin(p.cu_seqlens_q, info.batch, p.seq_q, info.len_q);
    load<block_q_of(config), kQkColumns>(shared + kAt.q + q_pipe.index * kAt.q_stage, p.q, full, 0,
                                         origin.y + info.first_q, static_cast<int>(info.head), origin.z);
  }
  __forceinline__ Keys keys_of(const WorkTileInfo& info) const {
    Keys keys = {};
    keys.head = static_cast<int>(p.by_group.quotient(info.head));
    keys.k = keys.v = row_origin(p.cu_seqlens_k, info.batch, p.seq_k, info.len_k);
    // The map of V moves by 16-bit columns, and on its last axis by groups of keys.
    if (p.cu_seqlens_k) {
      const int length = static_cast<int>(value_length(info.len_k));
      const RowOrigin origin = row_origin(static_cast<int>(value_length(p.seq_k)), length,
                                          static_cast<int>(value_start(p.cu_seqlens_k[info.batch], info.batch)));
      keys.v = {origin.y / 2, origin.z / kValueGroup};
    }
    return keys;
  }
  __forceinline__ void load_k(int tile, const Keys& keys) {
    const unsigned full = shared + kAt.k_full + k_pipe.index * kMbarrierBytes;
    mbarrier_wait_parity(shared + kAt.k_empty + k_pipe.index * kMbarrierBytes, k_pipe.parity ^ 1);
    load<config.block_k, kQkColumns>(shared + kAt.k + k_pipe.index * kAt.k_stage, p.k, full, 0,
                                     keys.k.y + tile * config.block_k, keys.head, keys.k.z);
    k_pipe.advance();
  }
  __forceinline__ void load_v(int tile, const Keys& keys) {
    const unsigned full = shared + kAt.v_full + v_pipe.index * kMbarrierBytes;
    mbarrier_wait_parity(shared + kAt.v_empty + v_pipe.index * kMbarrierBytes, v_pipe.parity ^ 1);
    load<config.dim_v, kKeyColumns>(shared + kAt.v + v_pipe.index * kAt.v_stage, p.v, full,
                                    keys.v.y + tile * kKeyColumns, 0, keys.head, keys.v.z);
    v_pipe.advance();
  }

  // Static persistent scheduler, or with dynamic_scheduler a global counter, which is read ahead: while the current
  // work tile is being loaded.
  __forceinline__ unsigned next_index(unsigned round) {
    return config.dynamic_scheduler ? gridDim.x + atomicAdd(p.tile_counter, 1u)
                                    : own_index(round, blockIdx.x, gridDim.x);
  }

  __forceinline__ WorkTileInfo info_of(unsigned index) const {
    const WorkItem item = work_item(index, p.q_tiles, p.columns, p.by_heads, p.together);
    WorkTileInfo info = {};
    info.batch = item.batch;
    info.head = item.head;
    info.first_q = static_cast<int>(p.q_tiles - 1 - item.tile) * block_q_of(config);
    info.len_q = length_of(p.cu_seqlens_q, item.batch, p.seq_q);
    info.len_k = length_of(p.cu_seqlens_k, item.batch, p.seq_k);
    const KeyRange keys = info.keys_of<config.masked>(p, info.first_q, block_q_of(config));
    info.first_tile = keys.first_tile(config.block_k);
    info.last_tile = keys.last_tile(config.block_k);
    return info;
  }
  __forceinline__ void write(const WorkTileInfo& info) {
    const unsigned slot = shared + kAt.work_tiles + work_pipe.index * kWorkTileBytes;
    const Words4(&words)[2] = reinterpret_cast<const Words4(&)[2]>(info);
    store_shared_16(slot, words[0]);
    store_shared_16(slot + 16, words[1]);
    work_pipe.advance();
  }

  __forceinline__ void init_mbarriers() const {
    constexpr unsigned kWarps = config.consumers * 4;
    for (int i = 0; i < config.q_stages; ++i) {
      mbarrier_init(shared + kAt.q_full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.q_empty + i * kMbarrierBytes, kWarps * 32);
    }
    for (int i = 0; i < config.stages; ++i) {
      mbarrier_init(shared + kAt.k_full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.k_empty + i * kMbarrierBytes, kWarps);
      mbarrier_init(shared + kAt.v_full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.v_empty + i * kMbarrierBytes, kWarps);
    }
    fence_mbarrier_init();
  }
  __forceinline__ void prefetch_tensor_maps() const {
    prefetch_tensor_map(p.q.by_width[map_index(atom_at(kQkColumns, kFp8MinAtom, 0).width)]);
    prefetch_tensor_map(p.k.by_width[map_index(atom_at(kQkColumns, kFp8MinAtom, 0).width)]);
    prefetch_tensor_map(p.v.by_width[map_index(atom_at(kKeyColumns, kFp8MinAtom, 0).width)]);
  }

  __forceinline__ void run() {
    pdl_wait_and_launch_dependents();
    unsigned index = blockIdx.x;
    for (unsigned round = 1; index < p.columns * p.q_tiles; ++round) {
      const WorkTileInfo info = info_of(index);
      index = next_index(round);
      const unsigned q_full = acquire_q();
      write(info);
      if (!info.has_keys()) {
        mbarrier_arrive(q_full);
        q_pipe.advance();
        continue;
      }
      const Keys keys = keys_of(info);
      load_q(info, q_full);
      q_pipe.advance();
      for (int tile = info.last_tile + 1; tile >= info.first_tile; --tile) {
        if (tile - 1 >= info.first_tile) load_k(tile - 1, keys);
        if (tile <= info.last_tile) load_v(tile, keys);
      }
    }
    WorkTileInfo end = {};
    end.first_q = WorkTileInfo::kNoWork;
    const unsigned q_full = acquire_q();
    write(end);
    mbarrier_arrive(q_full);
  }
};

}  // namespace tessera
