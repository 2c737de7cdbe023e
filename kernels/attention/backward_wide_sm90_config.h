// Config, shared-memory layout and Params of attention/backward_wide_sm90.cuh.
#pragma once

#include "attention/backward_config.h"
#include "attention/backward_turns.h"
#include "attention/forward_sm90_config.h"
#include "tile/mask.h"
#include "tile/scheduler.h"
#include "tile/tensor_map.h"
#include "tile/types.h"

namespace tessera {

struct AttentionBackwardWideSm90Config {
  DType dtype;
  int dim_qk;
  int dim_v;
  int cluster;     // 2: pairs of CTAs with neighbouring key tiles exchange dS and share the loads of Q and dO; else 1
  int q_stages;    // of Q
  int d_o_stages;  // of dO
  int p_stages;    // of P
  int ds_stages;   // of dS
  int kept_steps;  // of K and V, 16 columns each, that stay in registers as the A operands of S and dP
  int kept_ds_steps;   // of dS, 16 keys each, that the dQ warpgroup keeps in registers as its A operand
  int dq_columns;      // columns of dQ that are computed at a time, a multiple of 64
  int dq_registers;    // registers per thread of the dQ warpgroup; the P and the dS warpgroup get the rest
  bool masked;         // causal or a window: some tiles are skipped and some masked
  bool deterministic;  // key tiles add to dQ's sums in a fixed order
  bool score_mod;      // softcap, ALiBi or a scale that is not positive
  bool splits_group;   // the query heads of a key head are divided among CTAs, which add dK and dV to fp32 sums
};

template <class Visitor>
constexpr void visit_fields(const AttentionBackwardWideSm90Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("cluster", config.cluster);
  visit("q_stages", config.q_stages);
  visit("d_o_stages", config.d_o_stages);
  visit("p_stages", config.p_stages);
  visit("ds_stages", config.ds_stages);
  visit("kept_steps", config.kept_steps);
  visit("kept_ds_steps", config.kept_ds_steps);
  visit("dq_columns", config.dq_columns);
  visit("dq_registers", config.dq_registers);
  visit("masked", config.masked);
  visit("deterministic", config.deterministic);
  visit("score_mod", config.score_mod);
  visit("splits_group", config.splits_group);
}

// Queries per step and keys per CTA: the rows of one wgmma.
constexpr int kBackwardWideTile = 64;
// Warpgroups: the producer, the dQ warpgroup, the P warpgroup and the dS warpgroup.
constexpr int kBackwardWideThreads = 4 * kWarpgroup;

// Registers per thread. A CTA starts with 128 for all threads. The dQ warpgroup gets dq_registers, the P and the dS
// warpgroup as many as leave 24 for the producer, and the producer the rest.
constexpr int kBackwardWideRegisters = 512;  // of four threads, one of each warpgroup
constexpr int consumer_registers(int dq_registers) {
  const int most = (kBackwardWideRegisters - 24 - dq_registers) / 2 / 8 * 8;
  return most < 240 ? most : 240;
}
constexpr int consumer_registers(const AttentionBackwardWideSm90Config& config) {
  return consumer_registers(config.dq_registers);
}
constexpr int producer_registers(const AttentionBackwardWideSm90Config& config) {
  const int rest = kBackwardWideRegisters - config.dq_registers - 2 * consumer_registers(config);
  return rest < 64 ? rest : 64;
}

// Byte offsets in a CTA's shared memory. Tiles consist of swizzle atoms of 64 columns (tile/tensor_map.h).
struct BackwardWideSm90Layout {
  int k;           // [64, dim_qk]
  int v;           // [64, dim_v]
  int other_k;     // [64, 128], with a cluster: this CTA's columns of dQ, of the other's keys
  int q;           // [q_stages][64, dim_qk]
  int q_stage;     // bytes
  int d_o;         // [d_o_stages][64, dim_v]
  int d_o_stage;   // bytes
  int p;           // [p_stages][64, 64], fp32, in the order of the accumulators: [16-byte chunk][thread]
  int p_stage;     // bytes
  int ds;          // [ds_stages][64 keys, 64 queries], 16 bit; with a cluster, [2][64, 64]: the other CTA's is second
  int ds_stage;    // bytes
  int rows;        // [q_stages]: LSE [64] and delta [64], fp32, and kWideStepWords ints of step info
  int rows_stage;  // bytes
  int k_full;      // mbarriers: K is loaded
  int v_full;
  int q_full;     // [q_stages] Q and the rows are loaded
  int q_empty;    // [q_stages] and may be overwritten
  int d_o_full;   // [d_o_stages]
  int d_o_empty;  // [d_o_stages]
  int p_full;     // [p_stages]
  int p_empty;    // [p_stages]
  int ds_full;    // [ds_stages]
  int ds_empty;   // [ds_stages]
  int turns;      // if deterministic: mbarriers (attention/backward_turns.cuh)
  int bytes;
};

// Slot of a query's LSE and delta: a lane needs two adjacent queries of each 8, and this order lets one load fetch those
// of 16 queries.
constexpr int wide_row_slot(int query) { return query / 16 * 16 + query % 8 / 2 * 4 + query / 8 % 2 * 2 + query % 2; }

// Step info: the distance from the position of the step's first query to the CTA's first key, and the number of keys in
// the sequence from that key on; if score_mod, ALiBi's slope of the head. The last word is padding.
constexpr int kWideStepDistance = 0;
constexpr int kWideStepKeys = 1;
constexpr int kWideStepSlope = 2;
constexpr int kWideStepWords = 4;

constexpr BackwardWideSm90Layout backward_wide_sm90_layout(const AttentionBackwardWideSm90Config& config) {
  BackwardWideSm90Layout at = {};
  at.q_stage = tile_bytes(kBackwardWideTile, config.dim_qk, kWidestAtom);
  at.d_o_stage = tile_bytes(kBackwardWideTile, config.dim_v, kWidestAtom);
  at.p_stage = kBackwardWideTile * kBackwardWideTile * 4;
  at.ds_stage = tile_bytes(kBackwardWideTile, kBackwardWideTile, kWidestAtom) * config.cluster;
  at.rows_stage = (2 * kBackwardWideTile + kWideStepWords) * 4;
  at.k = 0;
  at.v = at.k + tile_bytes(kBackwardWideTile, config.dim_qk, kWidestAtom);
  at.other_k = at.v + tile_bytes(kBackwardWideTile, config.dim_v, kWidestAtom);
  at.q = at.other_k + (config.cluster > 1 ? tile_bytes(kBackwardWideTile, 2 * kWidestAtom, kWidestAtom) : 0);
  at.d_o = at.q + config.q_stages * at.q_stage;
  at.p = at.d_o + config.d_o_stages * at.d_o_stage;
  at.ds = at.p + config.p_stages * at.p_stage;
  at.rows = at.ds + config.ds_stages * at.ds_stage;
  at.k_full = at.rows + config.q_stages * at.rows_stage;
  at.v_full = at.k_full + 8;
  at.q_full = at.v_full + 8;
  at.q_empty = at.q_full + 8 * config.q_stages;
  at.d_o_full = at.q_empty + 8 * config.q_stages;
  at.d_o_empty = at.d_o_full + 8 * config.d_o_stages;
  at.p_full = at.d_o_empty + 8 * config.d_o_stages;
  at.p_empty = at.p_full + 8 * config.p_stages;
  at.ds_full = at.p_empty + 8 * config.p_stages;
  at.ds_empty = at.ds_full + 8 * config.ds_stages;
  at.turns = at.ds_empty + 8 * config.ds_stages;
  at.bytes = at.turns + (config.deterministic ? kTurnBytes : 0);
  return at;
}

// Which CTA of a cluster computes which columns of dQ, by swizzle atoms: of four, each computes two in every step; of three,
// CTA 0 computes two in even steps and CTA 1 in odd ones. In turns, `step` is the query tile, so that all clusters agree.
struct DqAtoms {
  int first;
  int count;
};
constexpr int dq_atoms(const AttentionBackwardWideSm90Config& config) {
  return padded_dim(config.dim_qk, kWidestAtom) / kWidestAtom;
}
constexpr DqAtoms own_dq_atoms(const AttentionBackwardWideSm90Config& config, int rank, int step) {
  const int all = dq_atoms(config), of_first = config.cluster == 1 ? all : (all + 1 - step % 2) / 2;
  return rank == 0 ? DqAtoms{0, of_first} : DqAtoms{of_first, all - of_first};
}
// The first one of two that hold all that a CTA ever computes.
constexpr int first_dq_atom(const AttentionBackwardWideSm90Config& config, int rank) {
  return rank == 0 ? 0 : dq_atoms(config) - 2;
}

struct alignas(64) AttentionBackwardWideSm90Params {
  TensorMap q;  // boxes of 64 x 64
  TensorMap d_o;
  TensorMap k;
  TensorMap v;
  const float* lse_log2;  // [B, Hq, Sq], from backward_preprocess.cuh
  const float* delta;     // likewise
  void* dk;               // [B, Sk, Hkv, Dqk], or [total_k, Hkv, Dqk]
  void* dv;
  void* dq;  // [B, Sq, Hq, Dqk], or [total_q, Hq, Dqk]; only if deterministic, as dq_strides
  DqSums dq_sums;
  const int* cu_seqlens_q;  // [B + 1], null: every sequence has seq_q queries
  const int* cu_seqlens_k;
  Strides dq_strides;
  Strides dk_strides;
  Strides dv_strides;
  RowStrides row_strides;  // of lse_log2 and delta
  int seq_q;               // of the longest sequence if packed
  int seq_k;
  unsigned heads_q;
  unsigned group;    // query heads that share a key head
  unsigned k_tiles;  // of the longest sequence; with clusters, of two tiles each
  unsigned columns;  // heads of all sequences: B Hkv; parts of groups if they are split: B Hkv parts
  Divisor together;  // of them, how many are processed together: their Q, dO and dQ sums fit the L2 cache
  Divisor by_heads;  // Hkv; if groups are split, Hkv parts
  Band band;
  float scale;  // positive, unless score_mod
  // [cluster, rows of dQ's sums / 64] for each head: key tiles that have added to a query tile, with clusters to the
  // columns of each rank; 0 at the start. Only if deterministic.
  unsigned* dq_turns;
  // Only if groups are split. Sums as dQ's: [B, Hkv, rows / 16, dim / 8] tiles; packed sequences start at multiples of 64
  // rows.
  DqSums dk_sums;
  DqSums dv_sums;
  unsigned* dk_turns;  // [rows of the sums / 16]: parts that have added; 0 at the start. Only if deterministic, too.
  unsigned* dv_turns;
  unsigned part_heads;  // query heads of a part; of the last one of a group, at most so many
  Divisor by_parts;     // parts of a group
  // Only if score_mod.
  float softcap;              // 0: none
  const float* alibi_slopes;  // [Hq] or [B, Hq], may be null
  Index alibi_batch_stride;
};

}  // namespace tessera
