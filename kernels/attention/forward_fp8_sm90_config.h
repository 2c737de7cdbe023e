// Config, shared-memory layout and Params of attention/forward_fp8_sm90.cuh.
#pragma once

#include "attention/forward_sm90_config.h"
#include "attention/fp8.h"
#include "tile/mask.h"
#include "tile/scheduler.h"
#include "tile/tensor_map.h"
#include "tile/types.h"

namespace tessera {

struct AttentionForwardFp8Sm90Config {
  DType dtype;  // of O
  int dim_qk;
  int dim_v;
  int consumers;           // consumer warpgroups, 2 or 3, of 64 query rows each; there is one producer besides
  int block_k;             // keys per tile, a multiple of 32
  int stages;              // of K and of V, 2 or more
  int q_stages;            // of Q: 2 to load the next work tile's Q ahead
  bool ping_pong;          // ping-pong barriers order the consumers' products
  bool dynamic_scheduler;  // CTAs take work tiles from a global counter, else statically
  bool masked;             // causal or a window: some tiles are skipped and some masked
  bool score_mod;          // softcap, ALiBi or a negative scale: every score is modified before the softmax
  bool k_blocks;           // K has a scale for each block of 64 or 128 keys; block_k is then a multiple of 64
  bool v_blocks;           // V has one for each block of keys, which block_k divides
  bool promotes;           // the product with each tile of V is added to O in fp32
  int polynomial;          // one of so many exponentials is a polynomial, to relieve the special function unit; 0: none
};

template <class Visitor>
constexpr void visit_fields(const AttentionForwardFp8Sm90Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("consumers", config.consumers);
  visit("block_k", config.block_k);
  visit("stages", config.stages);
  visit("q_stages", config.q_stages);
  visit("ping_pong", config.ping_pong);
  visit("dynamic_scheduler", config.dynamic_scheduler);
  visit("masked", config.masked);
  visit("score_mod", config.score_mod);
  visit("k_blocks", config.k_blocks);
  visit("v_blocks", config.v_blocks);
  visit("promotes", config.promotes);
  visit("polynomial", config.polynomial);
}

constexpr int block_q_of(const AttentionForwardFp8Sm90Config& config) { return config.consumers * kConsumerRows; }
constexpr int threads_of(const AttentionForwardFp8Sm90Config& config) { return (config.consumers + 1) * kWarpgroup; }
constexpr RegisterSplit register_split(const AttentionForwardFp8Sm90Config& config) {
  // Together no more than a CTA starts with.
  return config.consumers == 3 ? RegisterSplit{32, 160} : RegisterSplit{40, 232};
}

constexpr int kFp8MinAtom = 16;

// Byte offsets in a CTA's shared memory.
struct ForwardFp8Sm90Layout {
  int q;  // [q_stages][block_q, dim_qk]
  int q_stage;
  int k;  // [stages][block_k, dim_qk]
  int k_stage;
  int v;  // [stages][dim_v, block_k]
  int v_stage;
  int q_full, q_empty;  // mbarriers, one per stage
  int k_full, k_empty;
  int v_full, v_empty;
  int work_tiles;  // [kWorkTileSlots] ForwardFp8Sm90WorkTileInfo
  int bytes;
};

constexpr ForwardFp8Sm90Layout forward_fp8_sm90_layout(const AttentionForwardFp8Sm90Config& config) {
  ForwardFp8Sm90Layout at = {};
  at.q_stage = tile_bytes(block_q_of(config), fp8_columns(config.dim_qk), kFp8MinAtom);
  at.k_stage = tile_bytes(config.block_k, fp8_columns(config.dim_qk), kFp8MinAtom);
  at.v_stage = tile_bytes(config.dim_v, fp8_columns(config.block_k), kFp8MinAtom);
  at.k = config.q_stages * at.q_stage;
  at.v = at.k + config.stages * at.k_stage;
  at.q_full = at.v + config.stages * at.v_stage;
  at.q_empty = at.q_full + 8 * config.q_stages;
  at.k_full = at.q_empty + 8 * config.q_stages;
  at.k_empty = at.k_full + 8 * config.stages;
  at.v_full = at.k_empty + 8 * config.stages;
  at.v_empty = at.v_full + 8 * config.stages;
  at.work_tiles = (at.v_empty + 8 * config.stages + 15) / 16 * 16;
  at.bytes = at.work_tiles + kWorkTileSlots * kWorkTileBytes;
  return at;
}

struct alignas(64) AttentionForwardFp8Sm90Params {
  AtomMaps q;               // boxes of block_q rows
  AtomMaps k;               // boxes of block_k rows
  AtomMaps v;               // of V transposed: boxes of dim_v rows
  void* o;                  // [B, Sq, Hq, Dv], or [total_q, Hq, Dv]
  float* lse;               // [B, Hq, Sq], natural log, may be null
  const int* cu_seqlens_q;  // [B + 1], null: every sequence has seq_q queries
  const int* cu_seqlens_k;
  const float* alibi_slopes;  // [Hq] or [B, Hq], may be null
  unsigned* tile_counter;     // 0 at the start; only if Config::dynamic_scheduler
  Strides o_strides;
  RowStrides lse_strides;
  Index alibi_batch_stride;
  RowScales q_scale, k_scale, v_scale;
  int seq_q;  // of the longest sequence if packed
  int seq_k;
  unsigned heads_q;
  unsigned group;  // query heads that share a key head
  float scale;
  float softcap;     // 0: none
  unsigned q_tiles;  // of the longest sequence
  unsigned columns;  // heads of all sequences
  Divisor together;  // of them, how many are processed together: their K and V fit the L2 cache
  Divisor by_heads;
  Divisor by_group;
  Band band;
};

}  // namespace tessera
