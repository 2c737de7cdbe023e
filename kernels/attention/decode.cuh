// Attention of a few queries against a KV cache, on mma.sync, for every architecture since Turing.
// Entry point: attention_decode, below.
//
// A decode step has to read the keys and values in use once, and nothing else takes time. So
//  - the queries of all heads that share a key head are the rows of one tile (packed GQA), 16 for each row warp;
//  - the keys of all sequences are divided evenly among CTAs, whatever the lengths are (decode_schedule.cuh). A CTA
//    walks over its tiles; if it has only a part of a sequence's keys, it leaves a partial result, and
//    attention/decode_combine.cuh, launched after it, combines these. On Hopper, if there are few sequences, a cluster
//    of CTAs shares the keys of one instead and combines its results through distributed shared memory: one launch;
//  - key warps share the keys of a tile, 16 or more each, and have a softmax and an output of their own. Their results
//    are merged at the end of a sequence or of the CTA's part of it.
//
//   loads (cp.async):   tile j + stages - 1  |  tile j + stages      |  ...      across the ends of sequences
//   each warp:          S = Q K(j)^T, softmax, O = O * rescale + P V(j)          its keys of tile j
//   end of a segment:   O, max and sum of all key warps -> shared memory -> merged, divided, stored
//
//   shared memory:      Q [16 * row_warps, Dqk]    stages of { K [block_k, Dqk], V [block_k, Dv], Q of a first tile }
//
// New keys are in no tile of the cache yet: the CTA that has their tile copies them into it, and into the cache, before
// its products. No other CTA reads those rows, so no one waits.
#pragma once

#include "attention/decode_cache.cuh"
#include "attention/decode_schedule.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "tile/online_softmax.cuh"
#include "tile/probability.cuh"
#include "tile/products.cuh"

namespace tessera {

template <AttentionDecodeConfig config>
struct AttentionDecode;

template <AttentionDecodeConfig config>
__forceinline__ void attention_decode(const AttentionDecodeParams& p) {
  pdl_wait_and_launch_dependents();
  AttentionDecode<config>(p).run();
}

template <AttentionDecodeConfig config>
struct AttentionDecode {
  static constexpr DType kType = config.dtype;
  static constexpr int kWarps = config.row_warps * config.key_warps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kRows = config.row_warps * 16;
  static constexpr int kKeysPerWarp = config.block_k / config.key_warps;
  static constexpr int kKeyTiles = kKeysPerWarp / 8;
  static constexpr int kValueTiles = config.dim_v / 8;
  // Q stays in registers if the output leaves room for it.
  static constexpr int kKeptSteps = decode_keeps_queries(config) ? (config.dim_qk + 15) / 16 : 0;
  // Scores are summed in two halves, which is more accurate, if there are registers for it.
  static constexpr bool kInHalves = kKeyTiles <= 4;
  static_assert(kKeysPerWarp % 16 == 0);

  using TileQ = SharedTile<kRows, config.dim_qk>;
  using TileK = SharedTile<config.block_k, config.dim_qk>;
  using TileV = SharedTile<config.block_k, config.dim_v>;
  using Cache = CacheRows<config.paged>;
  static constexpr bool kAsync = config.stages > 1;
  static_assert(!kAsync || TileLoader<TileK, kThreads, config.vector>::kAsync);

  const AttentionDecodeParams& p;
  unsigned queries, exchange, stages;  // addresses in shared memory
  int lane, row_warp, key_warp;

  // Of the segment at hand.
  int batch, head_kv, row_block;
  int query[2];           // of a lane's two rows
  Interval<int> keys[2];  // that they see
  float slope[2];
  int clear_begin, clear_end;  // keys that all rows see
  int first_unit;

  unsigned kept[kKeptSteps > 0 ? kKeptSteps : 1][1][4];
  float scores[1][kKeyTiles][4];
  float output[1][kValueTiles][4];
  OnlineSoftmax<kKeyTiles> softmax;

  __forceinline__ explicit AttentionDecode(const AttentionDecodeParams& params) : p(params) {
    extern __shared__ __align__(128) unsigned char shared[];
    queries = shared_address(shared);
    exchange = queries + decode_own_query_bytes(config);
    stages = exchange + decode_exchange_bytes(config);
    const int thread = threadIdx.x;
    lane = thread % 32;
    row_warp = thread / 32 % config.row_warps;
    key_warp = thread / 32 / config.row_warps;
  }

  __forceinline__ TileK tile_k(unsigned stage) const { return {stages + stage * decode_stage_bytes(config)}; }
  __forceinline__ TileV tile_v(unsigned stage) const {
    return {stages + stage * decode_stage_bytes(config) + TileK::kBytes};
  }
  __forceinline__ TileQ tile_q(unsigned stage) const {
    return {stages + stage * decode_stage_bytes(config) + decode_tiles_bytes(config)};
  }
  __forceinline__ Cache cache_k(const DecodeWalk& at) const {
    return {p, p.k, p.k_strides, at.batch, at.column / p.row_blocks};
  }
  __forceinline__ Cache cache_v(const DecodeWalk& at) const {
    return {p, p.v, p.v_strides, at.batch, at.column / p.row_blocks};
  }

  // Where the loads have got to, some tiles ahead of the products.
  struct Loads {
    DecodeWalk walk;
    Cache k, v;
    bool starts;  // the next tile begins a segment, so that its queries are needed
  };

  __forceinline__ void run() {
    const DecodeSchedule& s = p.schedule;
    if constexpr (config.cluster > 1) {
      const int rank = blockIdx.x % config.cluster, which = blockIdx.x / config.cluster;
      run(DecodeWalk(s, config.cluster, rank, which), rank);
    } else {
      const DecodeShares shares(units_before(s, s.batch), s.ctas);
      run(DecodeWalk(s, shares, blockIdx.x), 0);
    }
  }

  __forceinline__ void run(DecodeWalk at, int rank) {
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
      multiply(at.first_key(), stage);
      starts = at.ends_segment();
      if (starts) end_segment(at, stage);
      if (++stage == config.stages) stage = 0;
    }
    if constexpr (config.cluster > 1) combine_cluster(rank);
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
      if (load.starts) load_queries(walk, stage);
      if constexpr (config.paged) prefetch_pages(p, walk);
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

  // Row r of a group's queries is query r % Sq of its head r / Sq.
  __forceinline__ void load_queries(const DecodeWalk& load, unsigned stage) const {
    const int seq_q = p.schedule.seq_q;
    const int head = load.column / p.row_blocks * p.group, first_row = load.column % p.row_blocks * kRows;
    const Bits16* q = static_cast<const Bits16*>(p.q) + load.batch * p.q_strides.batch;
    for (int index = threadIdx.x; index < kRows * TileQ::kChunks; index += kThreads) {
      const int local = index / TileQ::kChunks, chunk = index % TileQ::kChunks;
      const int row = first_row + local;
      const bool wanted = row < p.rows;
      const Bits16* from = q + row % seq_q * p.q_strides.seq + (head + row / seq_q) * p.q_strides.head + chunk * 8;
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

  __forceinline__ int row_of(int row) const { return row_block * kRows + row; }

  __forceinline__ void begin_segment(const DecodeWalk& at, unsigned stage) {
    const int seq_q = p.schedule.seq_q;
    batch = at.batch;
    head_kv = at.column / p.row_blocks;
    row_block = at.column % p.row_blocks;
    first_unit = at.tile / p.schedule.unit_tiles;
    const int offset = at.sequence.length - seq_q;  // query i is at position i + offset
    const Band& band = p.schedule.band;
    const Interval<int> seen_by_all = band.keys_of_all(offset, at.sequence.length - 1);
    clear_begin = max(seen_by_all.begin, at.sequence.begin);
    clear_end = min(seen_by_all.end, at.sequence.length);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(row_warp * 16 + half * 8 + lane / 4);
      query[half] = row % seq_q + offset;
      const Interval<int> seen = band.keys_of(query[half]);
      keys[half] = {max(seen.begin, at.sequence.begin), min(seen.end, at.sequence.length)};
      slope[half] = 0;
      if (config.score_mod && p.alibi_slopes && row < p.rows) {
        slope[half] = p.alibi_slopes[batch * p.alibi_batch_stride + head_kv * p.group + row / seq_q];
      }
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) output[0][n][i] = 0;
    }
    softmax.reset();
    softmax.scale_log2 = (config.score_mod ? 1.0f : p.scale) * kLog2E;
    if (p.status && at.tile == 0 && at.column == 0 && threadIdx.x == 0) p.status[batch] = at.sequence.refused ? 1 : 0;
    keep_queries(at, stage);
  }

  // Into registers, or to where they stay while the stage is reused; with rotary embedding, if that is asked for.
  __forceinline__ void keep_queries(const DecodeWalk& at, unsigned stage) {
    const bool rotates = config.append && p.rotary_dim > 0 && !at.sequence.refused;
    if (kKeptSteps > 0 && !rotates) {
      rows(tile_q(stage)).keep(lane);
      return;
    }
    const int position = rotates ? rotary_position(at) : 0;
    for (int index = threadIdx.x; index < kRows * TileQ::kChunks; index += kThreads) {
      const int local = index / TileQ::kChunks, chunk = index % TileQ::kChunks;
      const int which = row_of(local) % p.schedule.seq_q;
      Words4 words;
      if (rotates) {
        const auto value = [&](int column) {
          const unsigned pair = load_shared_4(tile_q(stage).address(local, column / 8) + column % 8 / 2 * 4);
          return column % 2 == 0 ? low_to_float<kType>(pair) : high_to_float<kType>(pair);
        };
        words = rotated_chunk<kType>(p, value, chunk, position + (p.rotary_advances ? which : 0));
      } else {
        words = load_shared_16(tile_q(stage).address(local, chunk));
      }
      store_shared_16(TileQ{queries}.address(local, chunk), words);
    }
    __syncthreads();
    rows(TileQ{queries}).keep(lane);
  }

  __forceinline__ RowOperand<TileQ, 1, kKeptSteps> rows(TileQ tile) { return {tile, row_warp * 16, kept}; }

  __forceinline__ int rotary_position(const DecodeWalk& at) const {
    return p.schedule.rotary_seqlens ? p.schedule.rotary_seqlens[at.batch] : at.sequence.old_length;
  }

  __forceinline__ void append_new_keys(const DecodeWalk& at, unsigned stage) {
    const int first_key = at.first_key();
    if (first_key + config.block_k <= at.sequence.old_length || at.sequence.old_length == at.sequence.length) return;
    const bool writes = row_block == 0;
    const auto* k_new =
        static_cast<const Bits16*>(p.k_new) + batch * p.k_new_strides.batch + head_kv * p.k_new_strides.head;
    const auto* v_new =
        static_cast<const Bits16*>(p.v_new) + batch * p.v_new_strides.batch + head_kv * p.v_new_strides.head;
    const int position = p.rotary_dim > 0 ? rotary_position(at) : 0;
    append_to_tile<kType, kThreads, config.vector, true>(p, tile_k(stage), cache_k(at), p.k_strides, k_new,
                                                         p.k_new_strides.seq, at.sequence, first_key, position, writes);
    append_to_tile<kType, kThreads, config.vector, false>(p, tile_v(stage), cache_v(at), p.v_strides, v_new,
                                                          p.v_new_strides.seq, at.sequence, first_key, 0, writes);
    __syncthreads();
  }

  __forceinline__ void multiply(int first_key, unsigned stage) {
    const int row = key_warp * kKeysPerWarp;
    rows_by_rows<kType, kInHalves>(scores, rows(TileQ{queries}), tile_k(stage), row, FromZero{}, recomputed(lane));
    first_key += row;
    modify_scores(first_key);
    if (first_key < clear_begin || first_key + kKeysPerWarp > clear_end) mask_scores(first_key);
    online_softmax();
    unsigned probabilities[1][kKeyTiles / 2][4];
    pack_operand<kType>(probabilities[0], scores[0]);
    add_by_columns<kType>(output, probabilities, tile_v(stage), row, recomputed(lane));
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

  __forceinline__ void mask_scores(int first_key) {
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
    float sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) sum[half] = softmax.total(0, half);
    if constexpr (config.key_warps > 1) merge_key_warps(sum, stage);

    const bool whole = first_unit == 0 && at.ends_sequence();
    const Index slot = partial_slot(p.schedule, blockIdx.x, first_unit == 0, batch, at.column, first_unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int local = row_warp * 16 + half * 8 + lane / 4;
      const int row = row_of(local);
      const float inverse = sum[half] == 0.0f ? 0.0f : 1.0f / sum[half];
      const float lse = softmax.log_sum_exp(sum[half], 0, half);
      if constexpr (config.cluster > 1) {
        store_for_cluster(local, half, inverse, lse);
      } else if (row < p.rows && whole) {
        store_result(row, half, inverse, lse);
      } else if (row < p.rows) {
        store_partial(slot * kRows + local, half, inverse, lse);
      }
    }
  }

  // This lane's columns of a row, divided by its sum: those that this key warp has merged.
  template <class Store>
  __forceinline__ void for_columns(int half, float inverse, const Store& store) const {
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      if (n % config.key_warps != key_warp) continue;
      store(n * 8 + lane % 4 * 2, output[0][n][half * 2] * inverse, output[0][n][half * 2 + 1] * inverse);
    }
  }

  __forceinline__ void store_result(int row, int half, float inverse, float lse) const {
    const int head = head_kv * p.group + row / p.schedule.seq_q, which = row % p.schedule.seq_q;
    Bits16* o = output_row(head, which);
    for_columns(half, inverse, [&](int column, float low, float high) { store_pair(o + column, low, high); });
    if (p.lse && key_warp == 0 && lane % 4 == 0) *lse_of(head, which) = lse;
  }

  __forceinline__ void store_partial(Index at, int half, float inverse, float lse) const {
    float* o = p.o_partial + at * config.dim_v;
    for_columns(half, inverse, [&](int column, float low, float high) {
      store_8(o + column, Words2{{bits_from_float(low), bits_from_float(high)}});
    });
    if (key_warp == 0 && lane % 4 == 0) p.lse_partial[at] = lse;
  }

  // Rows of Dv floats, followed by the row's LSE.
  static constexpr int kExchangePitch = (config.dim_v + 4) * 4;

  __forceinline__ void store_for_cluster(int local, int half, float inverse, float lse) const {
    const unsigned to = exchange + local * kExchangePitch;
    for_columns(half, inverse, [&](int column, float low, float high) {
      store_shared_8(to + column * 4, Words2{{bits_from_float(low), bits_from_float(high)}});
    });
    if (key_warp == 0 && lane % 4 == 0) store_shared_4(to + config.dim_v * 4, bits_from_float(lse));
  }

  // The rows' columns, four at a time, are divided among the CTAs of the cluster.
  __forceinline__ void combine_cluster(int rank) {
#if __CUDA_ARCH__ >= 900
    constexpr int kVectors = config.dim_v / 4;
    const int seq_q = p.schedule.seq_q;
    const int which = blockIdx.x / config.cluster;
    batch = which / p.schedule.columns;
    const int column_of_work = which % p.schedule.columns;
    head_kv = column_of_work / p.row_blocks;
    row_block = column_of_work % p.row_blocks;
    const int tiles = sequence_of(p.schedule, batch).tiles;
    const int parts = min(config.cluster, tiles);  // the others had no tile
    cluster_sync();
    for (int index = rank * kThreads + threadIdx.x; index < kRows * kVectors; index += config.cluster * kThreads) {
      const int local = index / kVectors, vector = index % kVectors;
      const int row = row_of(local);
      if (row >= p.rows) break;
      const unsigned from = exchange + local * kExchangePitch;
      float lse[config.cluster], part[config.cluster][4];
      float largest = -infinity();
#pragma unroll
      for (int other = 0; other < config.cluster; ++other) {
        lse[other] = -infinity();
        if (other >= parts) continue;
        const unsigned remote = cluster_address(from, other);
        lse[other] = load_cluster(remote + config.dim_v * 4);
        load_cluster_floats(part[other], remote + vector * 16);
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
      const int head = head_kv * p.group + row / seq_q, query = row % seq_q;
      Bits16* to = output_row(head, query) + vector * 4;
      store_pair(to, o[0] * scale, o[1] * scale);
      store_pair(to + 2, o[2] * scale, o[3] * scale);
      if (p.lse && vector == 0) *lse_of(head, query) = sum == 0.0f ? -infinity() : largest + fast_log2(sum) * kLn2;
    }
    cluster_sync();  // no CTA may end while another reads its shared memory
#endif
  }

  __forceinline__ Bits16* output_row(int head, int which) const {
    return static_cast<Bits16*>(p.o) + batch * p.o_strides.batch + which * p.o_strides.seq + head * p.o_strides.head;
  }
  __forceinline__ float* lse_of(int head, int which) const {
    return p.lse + batch * p.lse_strides.batch + head * p.lse_strides.head + which;
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

  // Afterwards every key warp has the references and sums of all, and the merged output of every key_warps-th tile of
  // eight columns, from its own number on.
  __forceinline__ void merge_key_warps(float (&sum)[2], unsigned stage) {
    __shared__ float row_reference[config.key_warps][kRows];
    __shared__ float row_sum[config.key_warps][kRows];
    constexpr unsigned kWarpBytes = kValueTiles * 32 * 16;
    const unsigned base = tile_k(stage).base + lane * 16;
    const auto place = [&](int other, int n) {
      return base + (other * config.row_warps + row_warp) * kWarpBytes + n * 32 * 16;
    };
    const int row = row_warp * 16 + lane / 4;
    __syncthreads();  // the stage has been read
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      store_shared_floats(place(key_warp, n), output[0][n][0], output[0][n][1], output[0][n][2], output[0][n][3]);
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_reference[key_warp][row + half * 8] = softmax.reference[0][half];
        row_sum[key_warp][row + half * 8] = sum[half];
      }
    }
    __syncthreads();
    float factor[config.key_warps][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float reference = -infinity();
#pragma unroll
      for (int other = 0; other < config.key_warps; ++other) {
        reference = fmaxf(reference, row_reference[other][row + half * 8]);
      }
      softmax.reference[0][half] = reference;
      sum[half] = 0;
#pragma unroll
      for (int other = 0; other < config.key_warps; ++other) {
        factor[other][half] = softmax.factor_between(row_reference[other][row + half * 8], reference);
        sum[half] += row_sum[other][row + half * 8] * factor[other][half];
      }
    }
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      if (n % config.key_warps != key_warp) continue;
      float merged[4] = {};
#pragma unroll
      for (int other = 0; other < config.key_warps; ++other) {
        float part[4];
        load_shared_floats(part, place(other, n));
#pragma unroll
        for (int i = 0; i < 4; ++i) merged[i] += part[i] * factor[other][i / 2];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) output[0][n][i] = merged[i];
    }
  }
};

}  // namespace tessera
