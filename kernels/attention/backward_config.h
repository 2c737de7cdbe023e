// Config, shared-memory layout and Params of attention/backward.cuh; backward_dq.cuh takes the same Params.
#pragma once

#include "tile/mask.h"
#include "tile/types.h"

namespace tessera {

// A CTA owns block_k keys and loops over the queries.
struct AttentionBackwardConfig {
  DType dtype;
  int dim_qk;
  int dim_v;
  int block_q;      // queries per tile
  int block_k;      // keys per CTA
  int warps;        // half of them compute dV, half dK; each owns 2 * block_k / warps keys, 16 or 32
  int stages;       // of Q, dO and dS: 1 or 2
  int kept_steps;   // of K and V, 16 columns each, that stay in registers as the A operands of S and dP
  bool adds_dq;     // dQ is summed in fp32 in global memory; else backward_dq.cuh computes it
  int dq_unroll;    // steps of dQ's product that ptxas may overlap: fewer steps save registers
  int ctas_per_sm;  // resident at a time
  int vector;       // as in the forward
  bool masked;
  bool score_mod;
};

template <class Visitor>
constexpr void visit_fields(const AttentionBackwardConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("block_q", config.block_q);
  visit("block_k", config.block_k);
  visit("warps", config.warps);
  visit("stages", config.stages);
  visit("kept_steps", config.kept_steps);
  visit("adds_dq", config.adds_dq);
  visit("dq_unroll", config.dq_unroll);
  visit("ctas_per_sm", config.ctas_per_sm);
  visit("vector", config.vector);
  visit("masked", config.masked);
  visit("score_mod", config.score_mod);
}

// Byte offsets in a CTA's shared memory.
struct BackwardLayout {
  int k;         // [block_k, dim_qk]; reused for dK
  int v;         // [block_k, dim_v]; reused for dV
  int weights;   // [block_k, block_q], in mma fragment order
  int ds;        // [stages][block_k, block_q]
  int q;         // [stages][block_q, dim_qk]
  int d_o;       // [stages][block_q, dim_v]
  int rows;      // [stages][2][block_q] floats: LSE and delta
  int uniforms;  // [kBackwardUniforms] ints: CTA-uniform values
  int bytes;
};

constexpr int kBackwardUniforms = 8;

constexpr bool keeps_all_of_v(const AttentionBackwardConfig& config) { return config.kept_steps * 16 >= config.dim_v; }

constexpr BackwardLayout backward_layout(const AttentionBackwardConfig& config) {
  BackwardLayout at = {};
  const int tile = config.block_k * config.block_q * 2;
  const int v_bytes = config.block_k * config.dim_v * 2;
  const int work_bytes = tile * (1 + (config.adds_dq ? config.stages : 0));
  at.k = 0;
  at.v = config.block_k * config.dim_qk * 2;
  // Once V is in registers, its shared memory is reused.
  at.weights = at.v + (keeps_all_of_v(config) ? 0 : v_bytes);
  at.ds = at.weights + tile;
  at.q = at.weights + (keeps_all_of_v(config) && v_bytes > work_bytes ? v_bytes : work_bytes);
  at.d_o = at.q + config.stages * config.block_q * config.dim_qk * 2;
  at.rows = at.d_o + config.stages * config.block_q * config.dim_v * 2;
  at.uniforms = at.rows + config.stages * 2 * config.block_q * 4;
  at.bytes = at.uniforms + kBackwardUniforms * 4;
  return at;
}

// fp32 sums of dQ before rounding: [B, Hq, rows / 16, Dqk / 8] tiles of 16 x 8 in the order of mma's accumulators, so
// that a warp adds full cache lines. With packed sequences, [Hq, rows / 16, ...], and every sequence starts at a
// multiple of block_q rows.
struct DqSums {
  float* data;
  Index rows;  // per head
};

constexpr Index padded_start(Index start, Index sequence, Index block_q) {
  return (start + sequence * block_q) / block_q * block_q;
}

struct AttentionBackwardParams {
  const void* q;
  const void* k;
  const void* v;
  const void* d_o;
  const float* lse_log2;    // [B, Hq, Sq], from backward_preprocess.cuh
  const float* delta;       // likewise
  void* dq;                 // written by backward_dq.cuh
  void* dk;                 // written by backward.cuh
  void* dv;                 // likewise
  DqSums dq_sums;           // backward.cuh, if Config::adds_dq
  const int* cu_seqlens_q;  // [B + 1], null: every sequence has seq_q queries
  const int* cu_seqlens_k;
  const float* alibi_slopes;
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides d_o_strides;
  Strides dq_strides;
  Strides dk_strides;
  Strides dv_strides;
  RowStrides row_strides;  // of lse_log2 and delta
  Index alibi_batch_stride;
  int seq_q;
  int seq_k;
  unsigned heads_q;
  unsigned group;  // query heads that share a key head
  float scale;
  float softcap;   // 0: none
  unsigned tiles;  // CTAs of the longest sequence
  Band band;
};

}  // namespace tessera
