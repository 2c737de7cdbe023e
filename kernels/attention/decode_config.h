// Config, shared-memory layout and Params of attention/decode.cuh and attention/decode_combine.cuh.
#pragma once

#include "tile/mask.h"
#include "tile/scheduler.h"
#include "tile/tensor_map.h"
#include "tile/types.h"

namespace tessera {

struct AttentionDecodeConfig {
  DType dtype;  // of queries, new keys and the output
  int dim_qk;
  int dim_v;
  int block_k;    // keys per tile
  int row_warps;  // each has 16 rows: the queries of all heads that share a key head
  int key_warps;  // share the keys of a tile
  int stages;     // tiles of K and V in shared memory; 1: loads and products alternate, as without cp.async
  int cluster;    // CTAs of a cluster that share a sequence's keys and combine their results; 1: no clusters
  int ctas_per_sm;
  int vector;      // elements per load: 8 (16 bytes), or 1 if a pointer or a stride does not allow it
  bool score_mod;  // softcap, ALiBi or a scale that is not positive
  bool paged;
  bool append;      // new keys, with or without rotary embedding
  bool e4m3_cache;  // else the cache is of `dtype`
  bool key_scales;  // of an e4m3 cache: each key has a scale, or each page; else each head
  int box_rows;     // sm_90: keys of a TMA box, with which a producer warp loads K and V; 0: cp.async
};

template <class Visitor>
constexpr void visit_fields(const AttentionDecodeConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("block_k", config.block_k);
  visit("row_warps", config.row_warps);
  visit("key_warps", config.key_warps);
  visit("stages", config.stages);
  visit("cluster", config.cluster);
  visit("ctas_per_sm", config.ctas_per_sm);
  visit("vector", config.vector);
  visit("score_mod", config.score_mod);
  visit("paged", config.paged);
  visit("append", config.append);
  visit("e4m3_cache", config.e4m3_cache);
  visit("key_scales", config.key_scales);
  visit("box_rows", config.box_rows);
}

// Shared memory: Q; what the CTAs of a cluster exchange; and the stages, each with K, V and, for the first tile of a
// sequence, its queries and, of an e4m3 cache, the scales of K and V; those of keys for every tile. The warps that share keys
// merge their outputs in the stage that they have consumed last.
constexpr int decode_rows(const AttentionDecodeConfig& config) { return config.row_warps * 16; }
constexpr int decode_query_bytes(const AttentionDecodeConfig& config) {
  return decode_rows(config) * config.dim_qk * 2;
}
// Q stays in shared memory if the output leaves no registers for it.
constexpr bool decode_keeps_queries(const AttentionDecodeConfig& config) {
  return config.dim_qk <= 128 && config.dim_v <= 128;
}
constexpr int decode_own_query_bytes(const AttentionDecodeConfig& config) {
  return decode_keeps_queries(config) ? 0 : decode_query_bytes(config);
}
constexpr int decode_exchange_bytes(const AttentionDecodeConfig& config) {
  const int rows = (decode_rows(config) + config.cluster - 1) / config.cluster;  // that a CTA combines
  return config.cluster > 1 ? rows * config.cluster * (config.dim_v + 4) * 4 : 0;
}
// 16-bit columns that a row of the cache takes.
constexpr int decode_columns(const AttentionDecodeConfig& config, int dim) { return config.e4m3_cache ? dim / 2 : dim; }
constexpr int decode_tile_bytes(const AttentionDecodeConfig& config, int dim) {
  const int columns = decode_columns(config, dim);
  return config.box_rows > 0 ? tile_bytes(config.block_k, columns, 16) : config.block_k * columns * 2;
}
constexpr int decode_tiles_bytes(const AttentionDecodeConfig& config) {
  const int tiles = decode_tile_bytes(config, config.dim_qk) + decode_tile_bytes(config, config.dim_v);
  const int merged = config.key_warps > 1 ? config.key_warps * decode_rows(config) * config.dim_v * 4 : 0;
  return tiles > merged ? tiles : merged;
}
constexpr int decode_scale_bytes(const AttentionDecodeConfig& config) {
  return config.key_scales ? config.block_k * 8 : config.e4m3_cache ? 128 : 0;
}
constexpr int decode_stage_bytes(const AttentionDecodeConfig& config) {
  const int bytes = decode_tiles_bytes(config) + decode_query_bytes(config) + decode_scale_bytes(config);
  return config.box_rows > 0 ? (bytes + kTileAlignment - 1) / kTileAlignment * kTileAlignment : bytes;
}
constexpr int decode_barrier_bytes(const AttentionDecodeConfig& config) {
  return config.box_rows > 0 ? config.stages * 16 : 0;
}
constexpr int decode_shared_bytes(const AttentionDecodeConfig& config) {
  return config.stages * decode_stage_bytes(config) + decode_own_query_bytes(config) + decode_exchange_bytes(config) +
         decode_barrier_bytes(config);
}

// How the work is divided among CTAs, from lengths that only the device knows. A sequence's keys are cut into tiles,
// and these, for every row block of every key head of every sequence, into units of 2^unit_shift. All units in this order,
// the tiles innermost, are divided evenly among the CTAs.
struct DecodeSchedule {
  const int* cache_seqlens;    // [B], null: all sequences have `capacity` keys
  const int* leftpad_k;        // [B], may be null
  const int* cache_batch_idx;  // [B], may be null
  const int* rotary_seqlens;   // [B], may be null
  const int* page_table;       // [B, pages of a sequence], if paged
  Index page_table_stride;
  int batch;
  int columns;    // row blocks of all key heads
  Divisor seq_q;  // queries of each sequence
  int capacity;
  int cache_rows;
  int seq_new;
  int rotary_rows;  // 0: no rotary embedding
  Divisor page_size;
  int num_pages;
  int tile_shift;  // log2 of the keys of a tile
  int unit_shift;  // log2 of the tiles of a unit
  int every_unit;  // 1: each unit has a partial result of its own, so that no result depends on the rest of the batch
  int most_units;  // of a sequence, by its capacity
  int end_cost;    // of a sequence's end, in units
  int equal;       // 1: all sequences have as many units
  int from_host;   // 1: nothing of the schedule is in device memory
  Divisor ctas;
  Band band;
};

struct AttentionDecodeParams {
  DecodeSchedule schedule;
  const void* q;  // [B, Sq, Hq, Dqk]
  void* k;        // [rows, capacity, Hkv, Dqk], or [pages, page_size, Hkv, Dqk]; written if keys are appended
  void* v;
  // Of an e4m3 cache, the factors that it was divided by: [B or 1, Hkv or 1]; with key_scales [rows, Hkv, capacity], or
  // [pages, Hkv, page_size] or [pages, Hkv or 1, 1]. Those of keys are written if keys are appended.
  float* k_scale;
  float* v_scale;
  void* o;                 // [B, Sq, Hq, Dv]
  float* lse;              // [B, Hq, Sq], natural log, may be null
  float* o_partial;        // [slots, rows of a row block, Dv]
  float* lse_partial;      // [slots, rows of a row block]
  const void* k_new;       // [B, Sn, Hkv, Dqk]
  const void* v_new;       // [B, Sn, Hkv, Dv]
  const void* rotary_cos;  // [positions, rotary_dim / 2]
  const void* rotary_sin;
  int* status;                // [B], may be null
  const float* alibi_slopes;  // [Hq] or [B, Hq], may be null
  Strides q_strides;
  Strides k_strides;  // .batch: of a page, if paged; in 16-bit columns, for e4m3 as well
  Strides v_strides;
  Strides o_strides;
  Strides k_new_strides;
  Strides v_new_strides;
  RowStrides lse_strides;
  Strides k_scale_strides;  // .seq: 0 if a page has one scale
  Strides v_scale_strides;
  Index rotary_cos_stride;
  Index rotary_sin_stride;
  Index alibi_batch_stride;
  int rotary_dim;
  int rotary_interleaved;
  int rotary_advances;  // query i is at the first new key's position plus i, else at that position
  int group;            // query heads that share a key head
  int rows;             // group * seq_q
  Divisor row_blocks;   // of a key head
  float scale;
  float softcap;            // 0: none
  AtomMaps k_maps, v_maps;  // of the cache, [rows or pages, Hkv, keys, D], with boxes of box_rows keys; if TMA loads it
};

struct DecodeCombineConfig {
  DType dtype;
  int dim_v;
  int threads;
};

template <class Visitor>
constexpr void visit_fields(const DecodeCombineConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_v", config.dim_v);
  visit("threads", config.threads);
}

struct DecodeCombineParams {
  DecodeSchedule schedule;
  const float* o_partial;
  const float* lse_partial;
  void* o;
  float* lse;
  Strides o_strides;
  RowStrides lse_strides;
  int rows_per_block;  // of the main kernel
  int rows_together;   // of a CTA
  int rows;
  Divisor row_blocks;
  int group;
};

}  // namespace tessera
