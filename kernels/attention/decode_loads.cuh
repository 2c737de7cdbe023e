// Loads of attention/decode.cuh: keys, values and queries, by cp.async of all threads or by TMA of a producer warp.
#pragma once

#include "attention/decode_cta.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"

namespace tessera {

template <AttentionDecodeConfig config>
struct DecodeLoads : DecodeCta<config> {
  using Base = DecodeCta<config>;
  using typename Base::Cache, typename Base::TileK, typename Base::TileQ, typename Base::TileV, Base::cache_k,
      Base::cache_v, Base::empty_barrier, Base::full_barrier, Base::head_in_group, Base::head_kv_of, Base::kAsync,
      Base::kE4m3, Base::kKeyScales, Base::kRows, Base::kThreads, Base::lane, Base::p, Base::query_of, Base::row_of,
      Base::scales, Base::tile_k, Base::tile_q, Base::tile_v, Base::value_scales;
  using DecodeCta<config>::DecodeCta;

  // Where the loads have got to, some tiles ahead of the products.
  struct Loads {
    DecodeWalk walk;
    Cache k, v;
    bool starts;  // the next tile begins a segment, so that its queries are needed
  };

  template <class Tile>
  __forceinline__ static void prefetch_maps_of(const AtomMaps& maps) {
#if __CUDA_ARCH__ >= 900
    if (Tile::kDim >= 64) prefetch_tensor_map(maps.by_width[map_index(64)]);
    if (Tile::kDim & 32) prefetch_tensor_map(maps.by_width[map_index(32)]);
    if (Tile::kDim & 16) prefetch_tensor_map(maps.by_width[map_index(16)]);
#endif
  }

  __forceinline__ void prefetch_tensor_maps() const {
    prefetch_maps_of<TileK>(p.k_maps);
    prefetch_maps_of<TileV>(p.v_maps);
  }

  // Of the producer warp.
  __forceinline__ void produce(DecodeWalk walk) const {
#if __CUDA_ARCH__ >= 900
    PipelineState<config.stages> pipe;
    BoxPages pages;
    bool starts = true;
#pragma unroll 1
    while (!walk.done()) {
      const int page = page_of_box(walk, pages);
      mbarrier_wait_parity(empty_barrier(pipe.index), pipe.parity ^ 1);
      load_boxes(walk, pipe.index, page);
      if constexpr (kKeyScales) {
        load_key_scales<32>(walk, pipe.index, lane, [&](int local, int, bool) {
          return __shfl_sync(0xffffffffu, page, config.paged ? local / config.box_rows % 32 : 0);
        });
      }
      if (starts) load_queries<32>(walk, pipe.index, lane);
      cp_async_mbarrier_arrive(full_barrier(pipe.index));
      starts = walk.ends_segment();
      pipe.advance();
      walk.next();
    }
#endif
  }

  // The pages of 32 boxes of a sequence, one in each lane, and of the 32 after them. A page number that is loaded when its
  // tile's turn comes takes longer than the tile: it waits behind all loads in flight, and the stages leave L1 no room.
  struct BoxPages {
    int batch = -1;
    int first = 0;  // box of lane 0
    int now = 0, next = 0;
  };

  __forceinline__ int boxes_of(const DecodeWalk& walk) const {
    constexpr int kBoxes = config.block_k / config.box_rows;
    static_assert(kBoxes <= 32);
    return min(kBoxes, (walk.sequence.old_length - walk.first_key() + config.box_rows - 1) / config.box_rows);
  }

  // The page, or the row of a contiguous cache, of this lane's box. A page that does not exist is read as the last one.
  __forceinline__ int page_of_box(const DecodeWalk& walk, BoxPages& pages) const {
    const int box = config.paged ? walk.first_key() / config.box_rows : 0;
    const int first = box / 32 * 32;
    if (pages.batch != walk.batch || pages.first != first) {
      const bool follows = pages.batch == walk.batch && pages.first + 32 == first;
      pages.now = follows ? pages.next : page_number(walk, first + lane);
      if constexpr (config.paged) pages.next = page_number(walk, first + 32 + lane);
      pages.batch = walk.batch;
      pages.first = first;
    }
    if constexpr (!config.paged) return pages.now;
    const auto page = static_cast<unsigned>(__shfl_sync(0xffffffffu, pages.now, box - first + lane));
    return static_cast<int>(min(page, p.schedule.num_pages - 1u));
  }

  __forceinline__ int row_of_cache(const DecodeWalk& walk) const {
    return p.schedule.cache_batch_idx ? p.schedule.cache_batch_idx[walk.batch] : walk.batch;
  }

  __forceinline__ int page_number(const DecodeWalk& walk, int box) const {
    const DecodeSchedule& s = p.schedule;
    if constexpr (!config.paged) return row_of_cache(walk);
    const int key = box * config.box_rows;
    return key < walk.sequence.old_length ? s.page_table[walk.batch * s.page_table_stride + page_of(s, key)] : 0;
  }

  // Keys outside of the sequence may arrive as well: mask_scores() and clear_values() remove them.
  __forceinline__ void load_boxes(const DecodeWalk& walk, int stage, int page) const {
#if __CUDA_ARCH__ >= 900
    const int boxes = boxes_of(walk), head = head_kv_of(walk.column);
    const unsigned full = full_barrier(stage);
    if (lane == 0) {
      constexpr int kBoxBytes = config.box_rows * (TileK::kDim + TileV::kDim) * 2;
      mbarrier_arrive_expect_tx(full, max(boxes, 0) * kBoxBytes);
    }
    __syncwarp();
    if (lane < boxes) {
      const int key = walk.first_key() + lane * config.box_rows;
      const int page_size = static_cast<int>(p.schedule.page_size.by);
      const int row = config.paged ? key - page_of(p.schedule, key) * page_size : key;
      load_box(tile_k(stage), p.k_maps, full, lane, row, head, page);
      load_box(tile_v(stage), p.v_maps, full, lane, row, head, page);
    }
#endif
  }

  template <class Tile>
  __forceinline__ static void load_box(const Tile& tile, const AtomMaps& maps, unsigned full, int box, int row,
                                       int head, int outer) {
#if __CUDA_ARCH__ >= 900
#pragma unroll
    for (int column = 0; column < Tile::kDim; column += atom_at(Tile::kDim, Tile::kMinAtom, column).width) {
      const SwizzleAtom atom = atom_at(Tile::kDim, Tile::kMinAtom, column);
      tma_load(tile.base + atom_offset(atom, Tile::kRows) + box * config.box_rows * atom.width * 2,
               maps.by_width[map_index(atom.width)], full, column, row, head, outer);
    }
#endif
  }

  // Scales of a tile's keys: zeros for those that are not in use, whose own may be anything. row_of(local, key, wanted): the
  // key's row or page of the cache; called by whole warps.
  template <int threads, class RowOf>
  __forceinline__ void load_key_scales(const DecodeWalk& walk, unsigned stage, int thread, const RowOf& row_of) const {
#if __CUDA_ARCH__ >= 800
    const int head = head_kv_of(walk.column), page_size = static_cast<int>(p.schedule.page_size.by);
#pragma unroll
    for (int first = 0; first < config.block_k; first += threads) {
      const int local = first + thread, key = walk.first_key() + local;
      const bool mine = local < config.block_k;
      const bool wanted = mine && key >= walk.sequence.begin && key < walk.sequence.old_length;
      const Index row = row_of(local, key, wanted);
      const int in_row = config.paged ? key - page_of(p.schedule, key) * page_size : key;
      const auto load = [&](unsigned to, const float* scale, const Strides& strides) {
        cp_async_4(to + local * 4, scale + row * strides.batch + in_row * strides.seq + head * strides.head, wanted);
      };
      if (!mine) continue;
      load(scales(stage), p.k_scale, p.k_scale_strides);
      load(value_scales(stage), p.v_scale, p.v_scale_strides);
    }
#endif
  }

  // Starts the loads of the next tile, if there is one left, and moves on.
  __forceinline__ void load_tile(Loads& load, unsigned stage) const {
    DecodeWalk& walk = load.walk;
    if (!walk.done()) {
      const int first_key = walk.first_key();
      if (first_key >= walk.sequence.begin && first_key + config.block_k <= walk.sequence.old_length) {
        load_keys_and_values<true>(load, first_key, stage);
      } else {
        load_keys_and_values<false>(load, first_key, stage);
      }
      if constexpr (kKeyScales) {
        load_key_scales<kThreads>(walk, stage, threadIdx.x, [&](int, int key, bool wanted) {
          if constexpr (!config.paged) return row_of_cache(walk);
          const int page = wanted ? load.k.pages[page_of(p.schedule, key)] : 0;
          return static_cast<int>(min(static_cast<unsigned>(page), p.schedule.num_pages - 1u));
        });
      }
      if (load.starts) load_queries<kThreads>(walk, stage, threadIdx.x);
      if constexpr (config.paged) prefetch_pages(p, walk, threadIdx.x == 0);
      load.starts = walk.ends_segment();
      const bool moves = walk.ends_sequence();
      walk.next();
      if (moves && !walk.done()) {
        load.k = cache_k(walk);
        load.v = cache_v(walk);
      }
    }
#if __CUDA_ARCH__ >= 800
    if constexpr (kAsync) cp_async_commit_group();
#endif
  }

  template <bool whole>
  __forceinline__ void load_keys_and_values(const Loads& load, int first_key, unsigned stage) const {
    const int begin = load.walk.sequence.begin, end = load.walk.sequence.old_length;
    const DecodeSchedule& s = p.schedule;
    load_cache_tile<kThreads, config.vector, whole>(s, tile_k(stage), load.k, p.k_strides, first_key, begin, end);
    load_cache_tile<kThreads, config.vector, whole>(s, tile_v(stage), load.v, p.v_strides, first_key, begin, end);
  }

  template <int threads>
  __forceinline__ void load_queries(const DecodeWalk& load, unsigned stage, int thread) const {
    const int head = head_kv_of(load.column) * p.group, first_row = row_of(load.column, 0);
    const Bits16* q = static_cast<const Bits16*>(p.q) + load.batch * p.q_strides.batch;
    for (int index = thread; index < kRows * TileQ::kChunks; index += threads) {
      const int local = index / TileQ::kChunks, chunk = index % TileQ::kChunks;
      const int row = first_row + local;
      const bool wanted = row < p.rows;
      const Bits16* from =
          q + query_of(row) * p.q_strides.seq + (head + head_in_group(row)) * p.q_strides.head + chunk * 8;
      const unsigned to = tile_q(stage).address(local, chunk);
      if constexpr (kAsync) {
#if __CUDA_ARCH__ >= 800
        cp_async_16(to, wanted ? from : q, wanted);
#endif
      } else {
        store_shared_16(to, load_chunk<config.vector>(from, wanted));
      }
    }
    if constexpr (kE4m3 && !kKeyScales) {
#if __CUDA_ARCH__ >= 800
      const auto load_scale = [&](int place, const float* scale, const Strides& strides) {
        if (thread != place) return;
        cp_async_4(scales(stage) + place * 4,
                   scale + load.batch * strides.batch + head_kv_of(load.column) * strides.head, true);
      };
      load_scale(0, p.k_scale, p.k_scale_strides);
      load_scale(1, p.v_scale, p.v_scale_strides);
#endif
    }
  }
};

}  // namespace tessera
