// The producer of attention/forward_sm90.cuh and attention/forward_fp8_sm90.cuh: one thread that schedules the work tiles
// and issues the TMA loads. If K and V are in pages, it is a warp, whose first thread does that: each lane reads the page
// table for one box of the next tile.
#pragma once

#include "attention/forward_sm90_config.h"
#include "attention/forward_sm90_work_tile.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/tma_prefetch.cuh"
#include "tile/kv_cache.cuh"
#include "tile/mask.h"
#include "tile/pipeline.cuh"
#include "tile/scheduler.h"
#include "tile/sequence.cuh"

namespace tessera {

template <auto config, class Params>
struct ForwardSm90Producer {
  using WorkTileInfo = ForwardSm90WorkTileInfo;
  static constexpr ForwardSm90Layout kAt = layout_of(config);
  static constexpr int kMinAtom = config.min_atom;
  // Number of K tiles that are loaded before the first V tile: one for each consumer that starts with S.
  static constexpr int kAhead = config.intra_cta_split ? config.consumers : 1;
  static constexpr bool kLoadsQLate = loads_q_late(config);  // with kAhead = 1

  const Params& p;
  unsigned shared;
  PipelineState<config.q_stages> q_pipe = {};
  PipelineState<config.stages> k_pipe = {}, v_pipe = {};
  PipelineState<kWorkTileSlots> work_pipe = {};
  int k_page = 0, v_page = 0;  // paged: the lane's entry of the page table for the next tile of K and of V

  // The keys of a work tile: where TMA finds them.
  struct Keys {
    int head;
    RowOrigin k, v;    // V transposed: y is on the axis of columns
    const int* pages;  // paged: of the sequence
    int length;        // paged
    int fill;          // paged: the first key of the last box that ends within the sequence, 0 if there is none
  };

  // All swizzle atoms of a tile, from column x and row y on.
  template <TileShape shape>
  __forceinline__ void load(unsigned destination, const AtomMaps& maps, unsigned full, int x, int y, int head, int z) {
    mbarrier_arrive_expect_tx(full, shape.rows * padded_dim(shape.columns, kMinAtom) * 2);
    load_atoms<shape>(destination, maps, full, x, y, head, z);
  }
  template <TileShape shape>
  __forceinline__ void load_atoms(unsigned destination, const AtomMaps& maps, unsigned full, int x, int y, int head,
                                  int z) {
#pragma unroll
    for (int column = 0; column < padded_dim(shape.columns, kMinAtom);
         column += atom_at(shape.columns, kMinAtom, column).width) {
      const SwizzleAtom atom = atom_at(shape.columns, kMinAtom, column);
      tma_load(destination + atom_offset(atom, shape.rows), maps.by_width[map_index(atom.width)], full, x + column, y,
               head, z);
    }
  }

  // The thread that issues loads and writes. Without pages there is no other.
  __forceinline__ bool is_leader() const { return config.page_box == 0 || threadIdx.x == 0; }

  // Keys beyond the sequence's length get probability 0, and any finite V will do: rows of the sequence are loaded in
  // their place, so that nothing else of the cache reaches a product. Those of its last whole box are taken.
  static __forceinline__ int key_of_box(int key, const Keys& keys) { return key < keys.length ? key : keys.fill; }
  // This lane's entry of the page table for a tile of keys: lane i's is that of box i.
  __forceinline__ int page_of(int tile, const Keys& keys) const {
    static_assert(config.block_k / config.page_box <= 32);
    const int key = max(tile, 0) * config.block_k + static_cast<int>(threadIdx.x) * config.page_box;
    return keys.pages[p.cache.by_page.quotient(key_of_box(key, keys))];
  }
  // The rows of a box of `maps` from `in_page` on, to row `row` of a tile of keys.
  template <int dim>
  __forceinline__ void load_box(unsigned destination, const AtomMaps& maps, unsigned full, int row, int in_page,
                                int page, const Keys& keys) {
#pragma unroll
    for (int column = 0; column < padded_dim(dim, kMinAtom); column += atom_at(dim, kMinAtom, column).width) {
      const SwizzleAtom atom = atom_at(dim, kMinAtom, column);
      tma_load(destination + atom_offset(atom, config.block_k) + row * static_cast<unsigned>(atom.width) * 2,
               maps.by_width[map_index(atom.width)], full, column, in_page, keys.head, page);
    }
  }
  // The same as load() for a tile of keys of a paged cache, in boxes that are within a page; `entry` is this lane's page_of
  // the tile. The box in which the sequence ends is loaded row by row, with its last key repeated.
  template <int dim>
  __forceinline__ void load_pages(unsigned destination, const AtomMaps& boxes, const AtomMaps& rows, unsigned full,
                                  int tile, int entry, const Keys& keys) {
    if (is_leader()) mbarrier_arrive_expect_tx(full, config.block_k * padded_dim(dim, kMinAtom) * 2);
    const int own = key_of_box(tile * config.block_k + static_cast<int>(threadIdx.x) * config.page_box, keys);
    const int size = static_cast<int>(p.cache.by_page.by);
    const int own_in_page = own - static_cast<int>(p.cache.by_page.quotient(own)) * size;
    const int own_page = physical_page(p.cache, entry);
#pragma unroll 1
    for (int box = 0; box < config.block_k / config.page_box; ++box) {
      const int in_page = __shfl_sync(0xffffffffu, own_in_page, box);
      const int page = __shfl_sync(0xffffffffu, own_page, box);
      const int row = box * config.page_box;
      const int key = key_of_box(tile * config.block_k + row, keys);
      if (!is_leader()) continue;
      if (key + config.page_box <= keys.length) {
        load_box<dim>(destination, boxes, full, row, in_page, page, keys);
      } else {
#pragma unroll 1
        for (int i = 0; i < config.page_box; ++i) {
          load_box<dim>(destination, rows, full, row + i, in_page + min(i, keys.length - 1 - key), page, keys);
        }
      }
    }
  }

  // Waits until the next stage of Q is empty and returns its full barrier.
  __forceinline__ unsigned acquire_q() {
    mbarrier_wait_parity(shared + kAt.q_empty + q_pipe.index * kMbarrierBytes, q_pipe.parity ^ 1);
    // If the producer is a warp, no lane passes the stage on before all have seen it empty.
    if constexpr (config.page_box > 0) __syncwarp();
    return shared + kAt.q_full + q_pipe.index * kMbarrierBytes;
  }
  // With packed GQA, the map has heads on its second axis and queries on its third, and a box holds all heads of a
  // group.
  __forceinline__ void load_q(const WorkTileInfo& info, unsigned full, const RowOrigin& origin) {
    const unsigned destination = shared + kAt.q + q_pipe.index * kAt.q_stage;
    const int head = static_cast<int>(info.head);
    if constexpr (config.pack_gqa) {
      const int query = origin.y + WorkTileInfo::query_at<config>(p, info.first_q);
      load<q_tile_of(config)>(destination, p.q, full, 0, head, query, origin.z);
    } else if constexpr (q_boxes_of(config) > 1) {
      constexpr TileShape kBox = q_tile_of(config);
      constexpr int kBoxes = q_boxes_of(config);
      mbarrier_arrive_expect_tx(full, kBoxes * kBox.rows * padded_dim(kBox.columns, kMinAtom) * 2);
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box) {
        load_atoms<kBox>(destination + box * (kAt.q_stage / kBoxes), p.q, full, 0,
                         origin.y + info.first_q + box * kBox.rows, head, origin.z);
      }
    } else {
      load<q_tile_of(config)>(destination, p.q, full, 0, origin.y + info.first_q, head, origin.z);
    }
  }
  // loads_q_late: the load is short once the stage is free.
  __forceinline__ void prefetch_q(const WorkTileInfo& info, const RowOrigin& origin) const {
    constexpr TileShape kBox = q_tile_of(config);
#pragma unroll 1
    for (int box = 0; box < q_boxes_of(config); ++box) {
#pragma unroll
      for (int column = 0; column < padded_dim(kBox.columns, kMinAtom);
           column += atom_at(kBox.columns, kMinAtom, column).width) {
        tma_prefetch_l2(p.q.by_width[map_index(atom_at(kBox.columns, kMinAtom, column).width)], column,
                        origin.y + info.first_q + box * kBox.rows, static_cast<int>(info.head), origin.z);
      }
    }
  }
  __forceinline__ Keys keys_of(const WorkTileInfo& info) const {
    Keys keys = {};
    keys.head = static_cast<int>(p.by_group.quotient(info.head));
    if constexpr (config.page_box > 0) {
      keys.pages = p.cache.page_table + info.batch * p.cache.page_table_stride;
      keys.length = info.len_k;
      keys.fill = max(keys.length / config.page_box - 1, 0) * config.page_box;
    } else if constexpr (config.cache) {
      const CachedSequence cached = cached_sequence(p.cache, info.batch);
      keys.k = row_origin(p.cache.capacity, info.len_k, cached.row * p.k_pitch + cached.leftpad);
      keys.v = row_origin(p.cache.capacity, info.len_k, cached.row * p.v_pitch + cached.leftpad);
    } else {
      keys.k = keys.v = row_origin(p.cu_seqlens_k, info.batch, p.seq_k, info.len_k);
    }
    if constexpr (has_transposed_v(config)) {
      if (p.cu_seqlens_k) keys.v = transposed_v_origin(p, info);
    }
    return keys;
  }
  __forceinline__ void load_k(int tile, const Keys& keys) {
    const unsigned full = shared + kAt.k_full + k_pipe.index * kMbarrierBytes;
    mbarrier_wait_parity(shared + kAt.k_empty + k_pipe.index * kMbarrierBytes, k_pipe.parity ^ 1);
    const unsigned destination = shared + kAt.k + k_pipe.index * kAt.k_stage;
    if constexpr (config.page_box > 0) {
      const int entry = k_page;
      k_page = page_of(tile - 1, keys);
      load_pages<config.dim_qk>(destination, p.k, p.k_rows, full, tile, entry, keys);
    } else {
      load<k_tile_of(config)>(destination, p.k, full, 0, keys.k.y + tile * config.block_k, keys.head, keys.k.z);
    }
    k_pipe.advance();
  }
  __forceinline__ void load_v(int tile, const Keys& keys) {
    const unsigned full = shared + kAt.v_full + v_pipe.index * kMbarrierBytes;
    mbarrier_wait_parity(shared + kAt.v_empty + v_pipe.index * kMbarrierBytes, v_pipe.parity ^ 1);
    const unsigned destination = shared + kAt.v + v_pipe.index * kAt.v_stage;
    if constexpr (config.page_box > 0) {
      const int entry = v_page;
      v_page = page_of(tile - 1, keys);
      load_pages<config.dim_v>(destination, p.v, p.v_rows, full, tile, entry, keys);
    } else if constexpr (has_transposed_v(config)) {
      load<v_tile_of(config)>(destination, p.v, full, keys.v.y + tile * v_tile_of(config).columns, 0, keys.head,
                              keys.v.z);
    } else {
      load<v_tile_of(config)>(destination, p.v, full, 0, keys.v.y + tile * config.block_k, keys.head, keys.v.z);
    }
    v_pipe.advance();
  }

  // Static persistent scheduler, or with dynamic_scheduler a global counter, which is read ahead: while the current
  // work tile is being loaded.
  __forceinline__ unsigned next_index(unsigned round) {
    if constexpr (config.dynamic_scheduler) {
      unsigned index = 0;
      if (is_leader()) index = gridDim.x + atomicAdd(p.tile_counter, 1u);
      return config.page_box > 0 ? __shfl_sync(0xffffffffu, index, 0) : index;
    } else {
      return own_index(round, blockIdx.x, gridDim.x);
    }
  }

  __forceinline__ WorkTileInfo info_of(unsigned index) const {
    const WorkItem item = work_item(index, p.q_tiles, p.columns, p.by_heads, p.together);
    WorkTileInfo info = {};
    info.batch = item.batch;
    info.head = config.pack_gqa ? item.head * p.group : item.head;
    info.first_q = static_cast<int>(p.q_tiles - 1 - item.tile) * block_q_of(config);
    info.len_q = length_of(p.cu_seqlens_q, item.batch, p.seq_q);
    if constexpr (config.cache) {
      const CachedSequence cached = cached_sequence(p.cache, item.batch);
      info.len_k = cached.length;
      if (p.cache.status && info.head == 0 && info.first_q == 0 && is_leader()) {
        p.cache.status[item.batch] = cached.refused;
      }
    } else {
      info.len_k = length_of(p.cu_seqlens_k, item.batch, p.seq_k);
    }
    const KeyRange keys = info.keys_of<config>(p, info.first_q, block_q_of(config));
    info.first_tile = keys.first_tile(config.block_k);
    info.last_tile = keys.last_tile(config.block_k);
    if constexpr (config.intra_cta_split) info.first_consumer = static_cast<short>(k_pipe.index % config.consumers);
    return info;
  }
  __forceinline__ void write(const WorkTileInfo& info) {
    const unsigned slot = shared + kAt.work_tiles + work_pipe.index * kWorkTileBytes;
    const Words4(&words)[2] = reinterpret_cast<const Words4(&)[2]>(info);
    if (is_leader()) {
      store_shared_16(slot, words[0]);
      store_shared_16(slot + 16, words[1]);
    }
    work_pipe.advance();
  }

  __forceinline__ void init_mbarriers() const {
    constexpr unsigned kWarps = config.consumers * 4;
    constexpr unsigned kWarpsPerStage = config.intra_cta_split ? 4 : kWarps;  // that read a stage of K or V
    for (int i = 0; i < config.q_stages; ++i) {
      mbarrier_init(shared + kAt.q_full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.q_empty + i * kMbarrierBytes, kWarps * 32);
    }
    for (int i = 0; i < config.stages; ++i) {
      mbarrier_init(shared + kAt.k_full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.k_empty + i * kMbarrierBytes, kWarpsPerStage);
      mbarrier_init(shared + kAt.v_full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.v_empty + i * kMbarrierBytes, kWarpsPerStage);
    }
    if constexpr (config.intra_cta_split) {
      mbarrier_init(shared + kAt.parts_full, (config.consumers - 1) * kWarpgroup);
      mbarrier_init(shared + kAt.parts_empty, kWarpgroup);
    }
    fence_mbarrier_init();
  }
  __forceinline__ void prefetch_tensor_maps() const {
    prefetch_tensor_map(p.q.by_width[map_index(atom_at(q_tile_of(config).columns, kMinAtom, 0).width)]);
    prefetch_tensor_map(p.k.by_width[map_index(atom_at(k_tile_of(config).columns, kMinAtom, 0).width)]);
    prefetch_tensor_map(p.v.by_width[map_index(atom_at(v_tile_of(config).columns, kMinAtom, 0).width)]);
  }

  // few_keys: all work tiles, those of a head one after the other, are divided evenly among the CTAs.
  __forceinline__ void load_few_keys() {
    const unsigned tiles = p.columns * p.q_tiles, each = tiles / gridDim.x, longer = tiles - each * gridDim.x;
    const unsigned first = blockIdx.x * each + min(blockIdx.x, longer);
    unsigned column = first / p.q_tiles, tile = first - column * p.q_tiles;
    unsigned loaded = p.columns;  // the key head, of all sequences', whose keys were loaded last
    for (unsigned left = each + (blockIdx.x < longer ? 1 : 0); left > 0; --left) {
      const unsigned key_column = p.by_group.quotient(column);
      WorkTileInfo info = {};
      info.batch = p.by_heads.quotient(column);
      info.head = column - info.batch * p.by_heads.by;
      info.first_q = static_cast<int>(tile) * block_q_of(config);
      info.len_q = length_of(p.cu_seqlens_q, info.batch, p.seq_q);
      info.len_k = length_of(p.cu_seqlens_k, info.batch, p.seq_k);
      const bool ends_head = info.first_q + block_q_of(config) >= info.len_q;
      info.ends_keys = ends_head && p.by_group.quotient(column + 1) != key_column;
      if (info.first_q < info.len_q) {
        const unsigned q_full = acquire_q();
        write(info);
        load_q(info, q_full, row_origin(p.cu_seqlens_q, info.batch, p.seq_q, info.len_q));
        q_pipe.advance();
        if (loaded != key_column) {
          const Keys keys = keys_of(info);
          load_k(0, keys);
          load_v(0, keys);
          loaded = key_column;
        }
      }
      if (++tile == p.q_tiles) {
        tile = 0;
        ++column;
      }
    }
  }

  __forceinline__ void load_keys_in_tiles() {
    unsigned index = blockIdx.x;
    for (unsigned round = 1; index < p.columns * p.q_tiles; ++round) {
      const WorkTileInfo info = info_of(index);
      index = next_index(round);
      if constexpr (kLoadsQLate) {
        if (info.has_keys()) {
          prefetch_q(info, row_origin(p.cu_seqlens_q, info.batch, p.seq_q, info.len_q));
          load_k(info.last_tile, keys_of(info));  // while the previous work tile still holds the stage of Q
        }
      }
      const unsigned q_full = acquire_q();
      write(info);
      if (!info.has_keys()) {
        if (is_leader()) mbarrier_arrive(q_full);
        q_pipe.advance();
        continue;
      }
      const RowOrigin q_origin = row_origin(p.cu_seqlens_q, info.batch, p.seq_q, info.len_q);
      const Keys keys = keys_of(info);
      if (is_leader()) load_q(info, q_full, q_origin);
      q_pipe.advance();
      if constexpr (config.page_box > 0) k_page = v_page = page_of(info.last_tile, keys);
      for (int tile = info.last_tile + (kLoadsQLate ? 0 : kAhead); tile >= info.first_tile; --tile) {
        if (tile - kAhead >= info.first_tile) load_k(tile - kAhead, keys);
        if (tile <= info.last_tile) load_v(tile, keys);
      }
    }
  }

  __forceinline__ void run() {
    pdl_wait_and_launch_dependents();
    if constexpr (config.few_keys) {
      load_few_keys();
    } else {
      load_keys_in_tiles();
    }
    WorkTileInfo end = {};
    end.first_q = WorkTileInfo::kNoWork;
    const unsigned q_full = acquire_q();
    write(end);
    if (is_leader()) mbarrier_arrive(q_full);
  }
};

}  // namespace tessera
