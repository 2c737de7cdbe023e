// Config, shared-memory size and Params of attention/forward.cuh.
#pragma once

#include "tile/kv_cache.h"
#include "tile/mask.h"
#include "tile/types.h"

namespace tessera {

struct AttentionForwardConfig {
  DType dtype;
  int dim_qk;
  int dim_v;
  int block_q;     // query rows per CTA
  int block_k;     // keys per tile
  int warps;       // each owns block_q / warps rows, 16 or 32
  bool in_halves;  // scores are summed in two halves: more accurate, more registers
  int vector;      // elements per load and store: 8 (16 bytes), or 1 if a pointer or a stride does not allow it
  bool masked;     // causal or a window: some tiles are skipped and some masked
  bool score_mod;  // softcap, ALiBi or a negative scale: every score is modified before the softmax
  bool chunked;    // the mask has chunks
  bool cache;      // K and V are a KV cache, whose lengths only the device knows
  bool paged;      // and in pages
};

template <class Visitor>
constexpr void visit_fields(const AttentionForwardConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("block_q", config.block_q);
  visit("block_k", config.block_k);
  visit("warps", config.warps);
  visit("in_halves", config.in_halves);
  visit("vector", config.vector);
  visit("masked", config.masked);
  visit("score_mod", config.score_mod);
  visit("chunked", config.chunked);
  visit("cache", config.cache);
  visit("paged", config.paged);
}

constexpr int forward_shared_bytes(const AttentionForwardConfig& config) {
  const int q_or_o = config.block_q * (config.dim_qk > config.dim_v ? config.dim_qk : config.dim_v);
  return 2 * (q_or_o + config.block_k * (config.dim_qk + config.dim_v));
}

struct AttentionForwardParams {
  const void* q;  // [B, Sq, Hq, Dqk], or [total_q, Hq, Dqk]
  const void* k;
  const void* v;
  void* o;                  // [B, Sq, Hq, Dv]
  float* lse;               // [B, Hq, Sq], natural log, may be null
  const int* cu_seqlens_q;  // [B + 1], null: every sequence has seq_q queries
  const int* cu_seqlens_k;
  const float* alibi_slopes;  // [Hq] or [B, Hq], may be null
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides o_strides;
  RowStrides lse_strides;
  Index alibi_batch_stride;
  int seq_q;
  int seq_k;
  unsigned heads_q;
  unsigned group;  // query heads that share a key head
  float scale;
  float softcap;     // 0: none
  unsigned q_tiles;  // of the longest sequence
  Band band;
  KvCache cache;  // if Config::cache
};

}  // namespace tessera
