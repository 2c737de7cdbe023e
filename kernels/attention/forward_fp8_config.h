// Config, shared-memory size and Params of attention/forward_fp8.cuh.
#pragma once

#include "attention/fp8.h"
#include "tile/mask.h"
#include "tile/types.h"

namespace tessera {

struct AttentionForwardFp8Config {
  DType dtype;  // of O
  int dim_qk;
  int dim_v;
  int block_q;     // query rows per CTA
  int warps;       // each owns block_q / warps rows, 16 or 32
  bool masked;     // causal or a window: some tiles are skipped and some masked
  bool score_mod;  // softcap, ALiBi or a negative scale: every score is modified before the softmax
  bool v_blocks;   // V has a scale for each block of keys
};

template <class Visitor>
constexpr void visit_fields(const AttentionForwardFp8Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("block_q", config.block_q);
  visit("warps", config.warps);
  visit("masked", config.masked);
  visit("score_mod", config.score_mod);
  visit("v_blocks", config.v_blocks);
}

// Q and O share their memory. O has 16 bits.
constexpr int forward_fp8_query_bytes(const AttentionForwardFp8Config& config) {
  return config.block_q * (config.dim_qk > 2 * config.dim_v ? config.dim_qk : 2 * config.dim_v);
}
// A tile has kScaleKeys keys, so that K and V have one scale each in it.
constexpr int forward_fp8_shared_bytes(const AttentionForwardFp8Config& config) {
  return forward_fp8_query_bytes(config) + kScaleKeys * (config.dim_qk + config.dim_v);
}

struct AttentionForwardFp8Params {
  const void* q;  // [B, Sq, Hq, Dqk], or [total_q, Hq, Dqk]; strides of q, k and v are in pairs of elements
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
  RowScales q_scale, k_scale, v_scale;
  int seq_q;
  int seq_k;
  unsigned heads_q;
  unsigned group;  // query heads that share a key head
  float scale;
  float softcap;     // 0: none
  unsigned q_tiles;  // of the longest sequence
  Band band;
};

}  // namespace tessera
