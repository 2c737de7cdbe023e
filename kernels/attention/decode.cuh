// Attention of a few queries against a KV cache, on mma.sync, for every architecture since Turing.
// Entry point: attention_decode, below.
//
// A decode step has to read the keys and values in use once, and nothing else takes time. So
//  - the queries of all heads that share a key head are the rows of one tile (packed GQA), 16 for each row warp;
//  - the keys of all sequences are divided evenly among CTAs, whatever the lengths are (decode_schedule.cuh). A CTA
//    walks over its tiles; if it has only a part of a sequence's keys, it leaves a partial result, and
//    attention/decode_combine.cuh, launched after it, combines these. On Hopper, if there are few sequences, a cluster
//    of CTAs shares the keys of one instead and sends its results through distributed shared memory: one launch;
//  - key warps share the keys of a tile, 16 or more each, and have a softmax and an output of their own. Their results
//    are merged at the end of a sequence or of the CTA's part of it.
//
//   loads:              tile j + stages - 1  |  tile j + stages      |  ...      across the ends of sequences
//   each warp:          S = Q K(j)^T, softmax, O = O * rescale + P V(j)          its keys of tile j
//   end of a segment:   O, max and sum of all key warps -> shared memory -> merged, divided, stored
//
//   shared memory:      stages of { K [block_k, Dqk], V [block_k, Dv], Q of a first tile }    Q [16 * row_warps, Dqk]
//
// Loads are cp.async by all threads and a CTA-wide barrier for each tile. On Hopper a producer warp may load with TMA
// instead, in boxes that have the keys of a tile or of a page, with mbarriers: no warp then waits for another.
//
// New keys are in no tile of the cache yet: the CTA that has their tile copies them into it, and into the cache, before
// its products. No other CTA reads those rows, so no one waits.
#pragma once

#include "attention/decode_cache.cuh"
#include "attention/decode_schedule.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "tile/online_softmax.cuh"
#include "tile/pipeline.cuh"
#include "tile/probability.cuh"
#include "tile/products.cuh"

namespace tessera {

template <AttentionDecodeConfig config>
struct AttentionDecode;

template <AttentionDecodeConfig config>
__forceinline__ void attention_decode(const AttentionDecodeParams& p) {
  AttentionDecode<config>(p).run();
}

template <bool tma, int rows, int dim>
struct DecodeTile {
  using Type = SharedTile<rows, dim>;
};
template <int rows, int dim>
struct DecodeTile<true, rows, dim> {
  using Type = AtomTile<rows, dim>;
};

template <AttentionDecodeConfig config>
struct AttentionDecode {
  static constexpr DType kType = config.dtype;
  static constexpr int kWarps = config.row_warps * config.key_warps;
  static constexpr int kThreads = kWarps * 32;  // of the warps that compute
  static constexpr bool kTma = config.box_rows > 0;
  static constexpr int kAllThreads = kThreads + (kTma ? 32 : 0);  // and of the producer warp
  static constexpr int kRows = config.row_warps * 16;
  static constexpr int kKeysPerWarp = config.block_k / config.key_warps;
  static constexpr int kKeyTiles = kKeysPerWarp / 8;
  static constexpr int kValueTiles = config.dim_v / 8;
  // Of these, that a warp has after the key warps' outputs have been merged.
  static constexpr int kMergedTiles = (kValueTiles + config.key_warps - 1) / config.key_warps;
  // Q stays in registers if the output leaves room for it.
  static constexpr int kKeptSteps = decode_keeps_queries(config) ? (config.dim_qk + 15) / 16 : 0;
  // Scores are summed in two halves, which is more accurate, if there are registers for it.
  static constexpr bool kInHalves = kKeyTiles <= 4;
  static_assert(kKeysPerWarp % 16 == 0);

  using TileQ = SharedTile<kRows, config.dim_qk>;
  using TileK = typename DecodeTile<kTma, config.block_k, config.dim_qk>::Type;
  using TileV = typename DecodeTile<kTma, config.block_k, config.dim_v>::Type;
  using Cache = CacheRows<config.paged>;
  static constexpr bool kAsync = config.stages > 1;
  static_assert(!kAsync || kTma || TileLoader<TileK, kThreads, config.vector>::kAsync);

  const AttentionDecodeParams& p;
  unsigned stages;  // address in shared memory
  int lane, row_warp, key_warp;

  // Of the segment at hand.
  int query[2];  // positions of a lane's two rows
  float slope[2];
  int first_unit;

  unsigned kept[kKeptSteps > 0 ? kKeptSteps : 1][1][4];
  float scores[1][kKeyTiles][4];
  float output[1][kValueTiles][4];
  OnlineSoftmax<kKeyTiles> softmax;

  __forceinline__ explicit AttentionDecode(const AttentionDecodeParams& params) : p(params) {
    extern __shared__ __align__(kTileAlignment) unsigned char shared[];
    stages = shared_address(shared);
    const int thread = threadIdx.x;
    lane = thread % 32;
    row_warp = thread / 32 % config.row_warps;
    key_warp = thread / 32 / config.row_warps;
  }

  __forceinline__ TileQ queries() const { return {stages + config.stages * decode_stage_bytes(config)}; }
  __forceinline__ unsigned exchange() const { return queries().base + decode_own_query_bytes(config); }
  __forceinline__ unsigned barriers() const { return exchange() + decode_exchange_bytes(config); }
  __forceinline__ TileK tile_k(unsigned stage) const { return {stages + stage * decode_stage_bytes(config)}; }
  __forceinline__ TileV tile_v(unsigned stage) const {
    return {stages + stage * decode_stage_bytes(config) + TileK::kBytes};
  }
  __forceinline__ TileQ tile_q(unsigned stage) const {
    return {stages + stage * decode_stage_bytes(config) + decode_tiles_bytes(config)};
  }
  __forceinline__ Cache cache_k(const DecodeWalk& at) const {
    return {p, p.k, p.k_strides, at.batch, head_kv_of(at.column)};
  }
  __forceinline__ Cache cache_v(const DecodeWalk& at) const {
    return {p, p.v, p.v_strides, at.batch, head_kv_of(at.column)};
  }

  // Where the loads have got to, some tiles ahead of the products.
  struct Loads {
    DecodeWalk walk;
    Cache k, v;
    bool starts;  // the next tile begins a segment, so that its queries are needed
  };

  // For addresses that are not worth a register across the loop. The compiler sees the range, so that divisions are
  // shifts.
  __forceinline__ int lane_again() const { return recomputed(lane) & 31; }

  // TMA: a stage is full when its bytes have arrived, and empty again when every warp is done with it.
  __forceinline__ unsigned full_barrier(int stage) const { return barriers() + stage * 2 * kMbarrierBytes; }
  __forceinline__ unsigned empty_barrier(int stage) const { return full_barrier(stage) + kMbarrierBytes; }

  __forceinline__ void init_barriers() const {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < config.stages; ++stage) {
        mbarrier_init(full_barrier(stage), 1 + 32);  // the bytes, and the queries of each lane of the producer
        mbarrier_init(empty_barrier(stage), kWarps);
      }
      fence_mbarrier_init();
    }
    __syncthreads();
#endif
  }

  template <class Tile>
  __forceinline__ static void prefetch_tensor_maps(const AtomMaps& maps) {
#if __CUDA_ARCH__ >= 900
    if (Tile::kDim >= 64) prefetch_tensor_map(maps.by_width[map_index(64)]);
    if (Tile::kDim & 32) prefetch_tensor_map(maps.by_width[map_index(32)]);
    if (Tile::kDim & 16) prefetch_tensor_map(maps.by_width[map_index(16)]);
#endif
  }

  __forceinline__ void sync_warps() const { kTma ? named_barrier_sync(1, kThreads) : __syncthreads(); }

  __forceinline__ void run() {
    if constexpr (kTma) {
      if (threadIdx.x == kThreads) {
        prefetch_tensor_maps<TileK>(p.k_maps);
        prefetch_tensor_maps<TileV>(p.v_maps);
      }
      init_barriers();
    }
    if constexpr (config.cluster > 1) {
#if __CUDA_ARCH__ >= 900
      cluster_arrive_relaxed();
      pdl_wait_and_launch_dependents();
      const DecodeWalk at(p.schedule, config.cluster, cluster_rank(), blockIdx.x / config.cluster);
      cluster_wait();  // all CTAs have started, so that their shared memory may be written
      run(at);
      combine_cluster(at);
#endif
    } else {
      pdl_wait_and_launch_dependents();
      run(DecodeWalk(p.schedule, blockIdx.x));
    }
  }

  __forceinline__ static int cluster_rank() { return blockIdx.x % config.cluster; }

  __forceinline__ void run(const DecodeWalk& at) {
    if constexpr (kTma) {
      threadIdx.x >= kThreads ? produce(at) : consume(at);
    } else {
      load_and_consume(at);
    }
  }

  // Of the producer warp.
  __forceinline__ void produce(DecodeWalk walk) const {
#if __CUDA_ARCH__ >= 900
    PipelineState<config.stages> pipe;
    bool starts = true;
#pragma unroll 1
    for (; !walk.done(); walk.next()) {
      mbarrier_wait_parity(empty_barrier(pipe.index), pipe.parity ^ 1);
      load_boxes(walk, pipe.index);
      if (starts) load_queries<32>(walk, pipe.index, lane);
      cp_async_mbarrier_arrive(full_barrier(pipe.index));
      if constexpr (config.paged) prefetch_pages(p, walk, lane == 0);
      starts = walk.ends_segment();
      pipe.advance();
    }
#endif
  }

  // Keys outside of the sequence may arrive as well: mask_scores() and clear_values() remove them.
  __forceinline__ void load_boxes(const DecodeWalk& walk, int stage) const {
#if __CUDA_ARCH__ >= 900
    constexpr int kBoxes = config.block_k / config.box_rows;
    const DecodeSchedule& s = p.schedule;
    const int first_key = walk.first_key(), head = head_kv_of(walk.column);
    const int boxes = min(kBoxes, (walk.sequence.old_length - first_key + config.box_rows - 1) / config.box_rows);
    const unsigned full = full_barrier(stage);
    if (lane == 0) {
      constexpr int kBoxBytes = config.box_rows * (config.dim_qk + config.dim_v) * 2;
      mbarrier_arrive_expect_tx(full, max(boxes, 0) * kBoxBytes);
    }
    __syncwarp();
    if (lane < boxes) {
      const int key = first_key + lane * config.box_rows;
      int row = key, outer;
      if constexpr (config.paged) {
        const int page = page_of(s, key);
        const int entry = s.page_table[walk.batch * s.page_table_stride + page];
        outer = static_cast<int>(min(static_cast<unsigned>(entry), s.num_pages - 1u));
        row = key - page * s.page_size;
      } else {
        outer = s.cache_batch_idx ? s.cache_batch_idx[walk.batch] : walk.batch;
      }
      load_box(tile_k(stage), p.k_maps, full, lane, row, head, outer);
      load_box(tile_v(stage), p.v_maps, full, lane, row, head, outer);
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

  __forceinline__ void consume(DecodeWalk at) {
#if __CUDA_ARCH__ >= 900
    PipelineState<config.stages> pipe;
    bool starts = true;
#pragma unroll 1
    for (; !at.done(); at.next()) {
      mbarrier_wait_parity(full_barrier(pipe.index), pipe.parity);
      if (starts) begin_segment(at, pipe.index);
      if constexpr (config.append) append_new_keys(at, pipe.index);
      const bool cleared = clear_values(at, pipe.index);
      multiply(at, pipe.index);
      starts = at.ends_segment();
      if (starts) end_segment(at, pipe.index);
      // What was written to the stage comes before what TMA writes to it.
      if (starts || config.append || cleared) fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty_barrier(pipe.index));
      pipe.advance();
    }
#endif
  }

  // Values of keys that are not in use may be NaN, which a probability of 0 does not remove. Each warp clears its own.
  __forceinline__ bool clear_values(const DecodeWalk& at, unsigned stage) const {
    const int first_key = at.first_key() + key_warp * kKeysPerWarp;
    const int begin = at.sequence.begin, end = at.sequence.length;
    if (first_key >= begin && first_key + kKeysPerWarp <= end) return false;
    for (int index = lane_again(); index < kKeysPerWarp * TileV::kChunks; index += 32) {
      const int row = index / TileV::kChunks, chunk = index % TileV::kChunks;
      if (first_key + row >= begin && first_key + row < end) continue;
      store_shared_16(tile_v(stage).address(key_warp * kKeysPerWarp + row, chunk), Words4{});
    }
    __syncwarp();
    return true;
  }

  __forceinline__ void load_and_consume(DecodeWalk at) {
    Loads load{at, cache_k(at), cache_v(at), true};
    if constexpr (kAsync) {
#pragma unroll 1
      for (unsigned stage = 0; stage + 1 < config.stages; ++stage) load_tile(load, stage);
    }
    bool starts = true;
    unsigned stage = 0;
#pragma unroll 1
    for (; !at.done(); at.next()) {
      // After this barrier the tile is complete, and all warps are done with the one before, whose stage is free.
      if constexpr (kAsync) {
#if __CUDA_ARCH__ >= 800
        cp_async_wait_group<config.stages - 2>();
#endif
        __syncthreads();
        load_tile(load, stage == 0 ? config.stages - 1 : stage - 1);
      } else {
        __syncthreads();
        load_tile(load, 0);
        __syncthreads();
      }
      if (starts) begin_segment(at, stage);
      if constexpr (config.append) append_new_keys(at, stage);
      multiply(at, stage);
      starts = at.ends_segment();
      if (starts) end_segment(at, stage);
      if (++stage == config.stages) stage = 0;
    }
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
  }

  // A column of the schedule is a row block of a key head. Row r of a group's queries is query r % Sq of its head r / Sq.
  __forceinline__ int head_kv_of(int column) const { return static_cast<int>(p.row_blocks.quotient(column)); }
  __forceinline__ int row_of(int column, int local) const {
    return (column - head_kv_of(column) * static_cast<int>(p.row_blocks.by)) * kRows + local;
  }
  __forceinline__ int head_in_group(int row) const { return static_cast<int>(p.schedule.seq_q.quotient(row)); }
  __forceinline__ int query_of(int row) const {
    return row - head_in_group(row) * static_cast<int>(p.schedule.seq_q.by);
  }
  __forceinline__ int head_of(int column, int row) const { return head_kv_of(column) * p.group + head_in_group(row); }

  __forceinline__ void begin_segment(const DecodeWalk& at, unsigned stage) {
    const int seq_q = static_cast<int>(p.schedule.seq_q.by);
    first_unit = at.tile >> p.schedule.unit_shift;
    const int offset = at.sequence.length - seq_q;  // query i is at position i + offset
    const int quad = lane_again() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(at.column, row_warp * 16 + half * 8 + quad);
      query[half] = query_of(row) + offset;
      slope[half] = 0;
      if (config.score_mod && p.alibi_slopes && row < p.rows) {
        slope[half] = p.alibi_slopes[at.batch * p.alibi_batch_stride + head_of(at.column, row)];
      }
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[0][n][i] = 0;
    }
    softmax.reset();
    softmax.scale_log2 = (config.score_mod ? 1.0f : p.scale) * kLog2E;
    if (p.status && at.tile == 0 && at.column == 0 && threadIdx.x == 0) {
      p.status[at.batch] = at.sequence.refused ? 1 : 0;
    }
    keep_queries(at, stage);
  }

  // Into registers, or to where they stay while the stage is reused.
  __forceinline__ void keep_queries(const DecodeWalk& at, unsigned stage) {
    if (config.append && p.rotary_dim > 0 && !at.sequence.refused) rotate_queries(at, stage);
    if constexpr (kKeptSteps > 0) {
      rows(tile_q(stage)).keep(lane_again());
    } else {
      if constexpr (kTma) sync_warps();  // the queries before are no longer needed
      for (int index = threadIdx.x; index < kRows * TileQ::kChunks; index += kThreads) {
        const int local = index / TileQ::kChunks, chunk = index % TileQ::kChunks;
        store_shared_16(queries().address(local, chunk), load_shared_16(tile_q(stage).address(local, chunk)));
      }
      sync_warps();
    }
  }

  // Rotary embedding in place: a warp has whole rows, and a lane a chunk of each.
  __forceinline__ void rotate_queries(const DecodeWalk& at, unsigned stage) const {
    static_assert(TileQ::kChunks <= 32);
    const int position = rotary_position(at), chunk = lane_again();
    const bool mine = chunk < TileQ::kChunks;
#pragma unroll 1
    for (int local = threadIdx.x / 32; local < kRows; local += kWarps) {
      const int which = query_of(row_of(at.column, local));
      const auto value = [&](int column) {
        const unsigned pair = load_shared_4(tile_q(stage).address(local, column / 8) + column % 8 / 2 * 4);
        return column % 2 == 0 ? low_to_float<kType>(pair) : high_to_float<kType>(pair);
      };
      Words4 words = {};
      if (mine) words = rotated_chunk<kType>(p, value, chunk, position + (p.rotary_advances ? which : 0));
      __syncwarp();
      if (mine) store_shared_16(tile_q(stage).address(local, chunk), words);
    }
    sync_warps();
  }

  __forceinline__ RowOperand<TileQ, 1, kKeptSteps> rows(TileQ tile) { return {tile, row_warp * 16, kept}; }

  __forceinline__ int rotary_position(const DecodeWalk& at) const {
    return p.schedule.rotary_seqlens ? p.schedule.rotary_seqlens[at.batch] : at.sequence.old_length;
  }

  __forceinline__ void append_new_keys(const DecodeWalk& at, unsigned stage) {
    const int first_key = at.first_key();
    if (first_key + config.block_k <= at.sequence.old_length || at.sequence.old_length == at.sequence.length) return;
    const int head = head_kv_of(at.column);
    const bool writes = row_of(at.column, 0) == 0;
    const auto* k_new =
        static_cast<const Bits16*>(p.k_new) + at.batch * p.k_new_strides.batch + head * p.k_new_strides.head;
    const auto* v_new =
        static_cast<const Bits16*>(p.v_new) + at.batch * p.v_new_strides.batch + head * p.v_new_strides.head;
    const int position = p.rotary_dim > 0 ? rotary_position(at) : 0;
    append_to_tile<kType, kThreads, config.vector, true>(p, tile_k(stage), cache_k(at), p.k_strides, k_new,
                                                         p.k_new_strides.seq, at.sequence, first_key, position, writes);
    append_to_tile<kType, kThreads, config.vector, false>(p, tile_v(stage), cache_v(at), p.v_strides, v_new,
                                                          p.v_new_strides.seq, at.sequence, first_key, 0, writes);
    sync_warps();
  }

  __forceinline__ void multiply(const DecodeWalk& at, unsigned stage) {
    const int row = key_warp * kKeysPerWarp;
    rows_by_rows<kType, kInHalves>(scores, rows(queries()), tile_k(stage), row, FromZero{}, lane_again());
    const int first_key = at.first_key() + row;
    modify_scores(first_key);
    if (!all_see(at.sequence, first_key)) mask_scores(at.sequence, first_key);
    online_softmax();
    unsigned probabilities[1][kKeyTiles / 2][4];
    pack_operand<kType>(probabilities[0], scores[0]);
    add_by_columns<kType>(output, probabilities, tile_v(stage), row, lane_again());
  }

  __forceinline__ void modify_scores(int first_key) {
    if constexpr (config.score_mod) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
          modify_score(scores[0][n][i], p.scale, p.softcap, slope[i / 2], query[i / 2] - key);
        }
      }
    }
  }

  // Whether all rows see all of this warp's keys.
  __forceinline__ bool all_see(const DecodeSequence& sequence, int first_key) const {
    const int seq_q = static_cast<int>(p.schedule.seq_q.by);
    const Interval<int> seen = p.schedule.band.keys_of_all(sequence.length - seq_q, sequence.length - 1);
    return first_key >= max(seen.begin, sequence.begin) && first_key + kKeysPerWarp <= min(seen.end, sequence.length);
  }

  __forceinline__ void mask_scores(const DecodeSequence& sequence, int first_key) {
    Interval<int> keys[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Interval<int> seen = p.schedule.band.keys_of(query[half]);
      keys[half] = {max(seen.begin, sequence.begin), min(seen.end, sequence.length)};
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + n * 8 + lane % 4 * 2 + i % 2;
        if (!keys[i / 2].contains(key)) scores[0][n][i] = -infinity();
      }
    }
  }

  __forceinline__ void online_softmax() {
    auto& rows = reinterpret_cast<float(&)[1][kKeyTiles * 4]>(scores);
    softmax.raise_references(rows, [&](int, int half, float factor) {
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        output[0][n][half * 2] *= factor;
        output[0][n][half * 2 + 1] *= factor;
      }
    });
    softmax.template exponentiate<false>(rows);
  }

  // Merges the key warps' results and stores them: O and LSE if the segment has all of the sequence's keys, else a
  // partial result.
  __forceinline__ void end_segment(const DecodeWalk& at, unsigned stage) {
    lane = lane_again();  // nothing of what follows is worth a register before
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = softmax.total(0, half);
    const int halves = row_of(at.column, row_warp * 16 + 8) < p.rows ? 2 : 1;  // that have rows
    if constexpr (config.key_warps > 1) merge_key_warps(sum, halves, stage);

    const bool whole = first_unit == 0 && at.ends_sequence();
    const Index slot = partial_slot(p.schedule, blockIdx.x, first_unit == 0, at.batch, at.column, first_unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= halves) break;
      const int local = row_warp * 16 + half * 8 + lane / 4;
      const int row = row_of(at.column, local);
      const float inverse = sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
      const float lse = softmax.log_sum_exp(sum[half], 0, half);
      if (row >= p.rows) continue;
      if constexpr (config.cluster > 1) {
        send_to_cluster(local, half, inverse, lse);
      } else if (whole) {
        store_result(at, row, half, inverse, lse);
      } else {
        store_partial(slot * kRows + local, half, inverse, lse);
      }
    }
  }

  // This lane's columns of a row, divided by its sum: those that this key warp has merged.
  template <class Store>
  __forceinline__ void for_columns(int half, float inverse, const Store& store) const {
#pragma unroll
    for (int i = 0; i < kMergedTiles; ++i) {
      const int n = i * config.key_warps + key_warp;
      if (n >= kValueTiles) break;
      store(n * 8 + lane % 4 * 2, output[0][i][half * 2] * inverse, output[0][i][half * 2 + 1] * inverse);
    }
  }

  __forceinline__ void store_result(const DecodeWalk& at, int row, int half, float inverse, float lse) const {
    const int head = head_of(at.column, row), query = query_of(row);
    Bits16* o = output_row(at.batch, head, query);
    for_columns(half, inverse, [&](int column, float low, float high) { store_pair(o + column, low, high); });
    if (p.lse && key_warp == 0 && lane % 4 == 0) *lse_of(at.batch, head, query) = lse;
  }

  __forceinline__ void store_partial(Index at, int half, float inverse, float lse) const {
    float* o = p.o_partial + at * config.dim_v;
    for_columns(half, inverse, [&](int column, float low, float high) {
      store_8(o + column, Words2{{bits_from_float(low), bits_from_float(high)}});
    });
    if (key_warp == 0 && lane % 4 == 0) p.lse_partial[at] = lse;
  }

  // Row r is combined by CTA r % cluster, which has a place for each CTA's part of it: Dv floats, then its LSE.
  static constexpr int kExchangeRows = (kRows + config.cluster - 1) / config.cluster;
  static constexpr int kExchangePitch = (config.dim_v + 4) * 4;

  __forceinline__ unsigned exchange_row(int part, int local) const {
    return exchange() + (part * kExchangeRows + local / config.cluster) * kExchangePitch;
  }

  __forceinline__ void send_to_cluster(int local, int half, float inverse, float lse) const {
#if __CUDA_ARCH__ >= 900
    const unsigned to = cluster_address(exchange_row(cluster_rank(), local), local % config.cluster);
    for_columns(half, inverse,
                [&](int column, float low, float high) { store_cluster_floats(to + column * 4, low, high); });
    if (key_warp == 0 && lane % 4 == 0) store_cluster(to + config.dim_v * 4, lse);
#endif
  }

  // Four columns of a row for each thread.
  __forceinline__ void combine_cluster(const DecodeWalk& at) const {
#if __CUDA_ARCH__ >= 900
    constexpr int kVectors = config.dim_v / 4;
    const int parts = min(config.cluster, at.sequence.tiles);  // the other CTAs had no tile
    cluster_sync();
    for (int index = threadIdx.x; index < kExchangeRows * kVectors; index += kAllThreads) {
      const int local = index / kVectors * config.cluster + cluster_rank(), vector = index % kVectors;
      const int row = row_of(at.column, local);
      if (row >= p.rows) break;
      float lse[config.cluster], part[config.cluster][4];
      float largest = -infinity();
#pragma unroll
      for (int other = 0; other < config.cluster; ++other) {
        lse[other] = -infinity();
        if (other >= parts) continue;
        const unsigned from = exchange_row(other, local);
        lse[other] = float_from_bits(load_shared_4(from + config.dim_v * 4));
        load_shared_floats(part[other], from + vector * 16);
      }
#pragma unroll
      for (int other = 0; other < config.cluster; ++other) largest = fmaxf(largest, lse[other]);
      float sum = 0, o[4] = {};
#pragma unroll
      for (int other = 0; other < config.cluster; ++other) {
        if (lse[other] == -infinity()) continue;
        const float weight = fast_exp2((lse[other] - largest) * kLog2E);
        sum += weight;
#pragma unroll
        for (int i = 0; i < 4; ++i) o[i] += weight * part[other][i];
      }
      const float scale = sum == 0.0f ? 0.0f : fast_reciprocal(sum);
      const int head = head_of(at.column, row), query = query_of(row);
      Bits16* to = output_row(at.batch, head, query) + vector * 4;
      store_pair(to, o[0] * scale, o[1] * scale);
      store_pair(to + 2, o[2] * scale, o[3] * scale);
      if (p.lse && vector == 0) {
        *lse_of(at.batch, head, query) = sum == 0.0f ? -infinity() : largest + fast_log2(sum) * kLn2;
      }
    }
#endif
  }

  __forceinline__ Bits16* output_row(int batch, int head, int query) const {
    return static_cast<Bits16*>(p.o) + batch * p.o_strides.batch + query * p.o_strides.seq + head * p.o_strides.head;
  }
  __forceinline__ float* lse_of(int batch, int head, int query) const {
    return p.lse + batch * p.lse_strides.batch + head * p.lse_strides.head + query;
  }

  __forceinline__ static void store_pair(Bits16* to, float low, float high) {
    const unsigned pair = pack<kType>(low, high);
    if constexpr (config.vector == 8) {
      *reinterpret_cast<unsigned*>(to) = pair;
    } else {
      to[0] = static_cast<Bits16>(pair);
      to[1] = static_cast<Bits16>(pair >> 16);
    }
  }

  // Afterwards every key warp has the references and sums of all, and in output[0][i] the merged output of tile
  // i * key_warps + key_warp of eight columns.
  __forceinline__ void merge_key_warps(float (&sum)[2], int halves, unsigned stage) {
    __shared__ float row_reference[config.key_warps][kRows];
    __shared__ float row_sum[config.key_warps][kRows];
    constexpr unsigned kRowsBytes = 32 * 8;  // of eight rows of a tile: two columns for each lane
    const unsigned base = tile_k(stage).base + row_warp * kValueTiles * 2 * kRowsBytes + lane * 8;
    const auto place = [&](int other, int n, int half) {
      return base + ((other * config.row_warps * kValueTiles + n) * 2 + half) * kRowsBytes;
    };
    const int row = row_warp * 16 + lane / 4;
    sync_warps();  // the stage has been read
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= halves) break;
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        store_shared_floats(place(key_warp, n, half), output[0][n][half * 2], output[0][n][half * 2 + 1]);
      }
      if (lane % 4 == 0) {
        row_reference[key_warp][row + half * 8] = softmax.reference[0][half];
        row_sum[key_warp][row + half * 8] = sum[half];
      }
    }
    sync_warps();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half >= halves) break;
      float references[config.key_warps], factor[config.key_warps];
      float reference = -infinity();
#pragma unroll
      for (int other = 0; other < config.key_warps; ++other) {
        references[other] = row_reference[other][row + half * 8];
        reference = fmaxf(reference, references[other]);
      }
      softmax.reference[0][half] = reference;
      sum[half] = 0;
#pragma unroll
      for (int other = 0; other < config.key_warps; ++other) {
        factor[other] = softmax.factor_between(references[other], reference);
        sum[half] += row_sum[other][row + half * 8] * factor[other];
      }
#pragma unroll
      for (int i = 0; i < kMergedTiles; ++i) {
        const int n = i * config.key_warps + key_warp;
        if (n >= kValueTiles) break;
        float merged[2] = {};
#pragma unroll
        for (int other = 0; other < config.key_warps; ++other) {
          float part[2];
          load_shared_floats(part, place(other, n, half));
          merged[0] += part[0] * factor[other];
          merged[1] += part[1] * factor[other];
        }
        output[0][i][half * 2] = merged[0];
        output[0][i][half * 2 + 1] = merged[1];
      }
    }
  }
};

}  // namespace tessera
