// Config, shared-memory layout and Params of attention/backward_sm90.cuh.
#pragma once

#include "attention/backward_config.h"
#include "attention/backward_slices.h"
#include "attention/backward_turns.h"
#include "attention/forward_sm90_config.h"
#include "tile/mask.h"
#include "tile/scheduler.h"
#include "tile/tensor_map.h"
#include "tile/types.h"

namespace tessera {

struct AttentionBackwardSm90Config {
  DType dtype;
  int dim_qk;
  int dim_v;
  int consumers;  // consumer warpgroups of 64 keys each, 1 or 2; there are a producer and a dQ warpgroup besides
  int ctas_per_sm;
  int block_q;           // queries per step: 64
  int stages;            // of Q and dO: 2 or more, 3 or more with two accumulators
  int ds_stages;         // of dS
  int accumulators;      // 1: S^T and dP^T share one; 2: they have one each
  bool keeps_p;          // with one accumulator: P^T is kept in fp16 for dS, else dS is computed from the rounded P^T
  bool ping_pong;        // with two: ping-pong barriers order the consumers' products dV and S
  bool prefetches_rows;  // a consumer loads LSE and delta before it waits for what they are used with
  int kept_k_steps;      // of a consumer's rows of K, 16 columns each, that stay in registers
  bool keeps_v;          // its rows of V stay there, too, all columns
  int kept_ds_steps;     // of dS, 16 keys each, that the dQ warpgroup keeps in registers as its A operand
  int dq_columns;        // columns of dQ that are computed at a time: all, or 64 of up to 128
  int dq_registers;      // registers per thread of the dQ warpgroup; the consumers get the rest
  bool masked;           // causal or a window: some tiles are skipped and some masked
  bool deterministic;    // key tiles add to dQ's sums in a fixed order
  bool writes_dq;        // all keys of a sequence are in one CTA: its dQ is complete and is written, not added
  bool score_mod;        // softcap, ALiBi or a scale that is not positive; one accumulator
  bool splits_group;     // the query heads of a key head are divided among CTAs, which add dK and dV to fp32 sums
  bool splits_queries;   // so are the queries of the last key tiles, but the last CTA to add writes dK and dV
  bool in_step;          // CTAs begin at the query tile that the others have reached; no mask, one query head per CTA
};

template <class Visitor>
constexpr void visit_fields(const AttentionBackwardSm90Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("consumers", config.consumers);
  visit("ctas_per_sm", config.ctas_per_sm);
  visit("block_q", config.block_q);
  visit("stages", config.stages);
  visit("ds_stages", config.ds_stages);
  visit("accumulators", config.accumulators);
  visit("keeps_p", config.keeps_p);
  visit("ping_pong", config.ping_pong);
  visit("prefetches_rows", config.prefetches_rows);
  visit("kept_k_steps", config.kept_k_steps);
  visit("keeps_v", config.keeps_v);
  visit("kept_ds_steps", config.kept_ds_steps);
  visit("dq_columns", config.dq_columns);
  visit("dq_registers", config.dq_registers);
  visit("masked", config.masked);
  visit("deterministic", config.deterministic);
  visit("writes_dq", config.writes_dq);
  visit("score_mod", config.score_mod);
  visit("splits_group", config.splits_group);
  visit("splits_queries", config.splits_queries);
  visit("in_step", config.in_step);
}

constexpr int block_k_of(const AttentionBackwardSm90Config& config) { return config.consumers * kConsumerRows; }
constexpr int threads_of(const AttentionBackwardSm90Config& config) { return (config.consumers + 2) * kWarpgroup; }

// Registers per thread. A CTA starts with the same number for all threads. The dQ warpgroup gets dq_registers, the
// consumers as many as leave 24 for the producer, and the producer the rest.
constexpr int registers_of_all(int consumers, int ctas_per_sm) {  // of one thread of each warpgroup
  const int warpgroups = consumers + 2;
  return 65536 / (ctas_per_sm * warpgroups * kWarpgroup) / 8 * 8 * warpgroups;
}
constexpr int consumer_registers(int dq_registers, int consumers, int ctas_per_sm) {
  const int most = (registers_of_all(consumers, ctas_per_sm) - 24 - dq_registers) / consumers / 8 * 8;
  return most < 240 ? most : 240;
}
constexpr int consumer_registers(const AttentionBackwardSm90Config& config) {
  return consumer_registers(config.dq_registers, config.consumers, config.ctas_per_sm);
}
constexpr int producer_registers(const AttentionBackwardSm90Config& config) {
  const int rest = registers_of_all(config.consumers, config.ctas_per_sm) - config.dq_registers -
                   config.consumers * consumer_registers(config);
  return rest < 64 ? rest : 64;
}

// Byte offsets in a CTA's shared memory. Tiles consist of swizzle atoms of 64 columns (tile/tensor_map.h).
struct BackwardSm90Layout {
  int k;           // [block_k, dim_qk]
  int v;           // [block_k, dim_v]
  int q;           // [stages][block_q, dim_qk]
  int q_stage;     // bytes
  int d_o;         // [stages][block_q, dim_v]
  int d_o_stage;   // bytes
  int ds;          // [ds_stages][block_k, block_q], 16 bit
  int ds_stage;    // bytes
  int weights;     // [consumers][block_q / 8][128 threads][4], fp32, if score_mod: dS is computed from them, not from P
  int rows;        // [stages]: LSE [block_q] and delta [block_q], fp32, and kStepWords ints of step info
  int rows_stage;  // bytes
  int k_full;      // mbarriers: K is loaded
  int v_full;
  int q_full;    // [stages] Q and the rows are loaded
  int d_o_full;  // [stages]
  int empty;     // [stages] Q, dO and the rows may be overwritten
  int ds_full;   // [ds_stages]
  int ds_empty;  // [ds_stages]
  int steps;     // of the CTA
  int start;     // the first step's tile, if in_step
  int turns;     // if deterministic: mbarriers (attention/backward_turns.cuh)
  int dq_rows;   // likewise, [4 warps]: address of dQ's first row and head of the CTA's sequence
  int bytes;
};

// Slot of a query's LSE and delta within block_q: a lane needs two adjacent queries of each 8, and this order lets one
// load fetch those of 16 queries.
constexpr int row_slot(int query) { return query / 16 * 16 + query % 8 / 2 * 4 + query / 8 % 2 * 2 + query % 2; }

// Step info: the distance from the position of the step's first query to the CTA's first key, and the number of keys in
// the sequence from that key on; if score_mod, ALiBi's slope of the head. The last word is padding.
constexpr int kStepDistance = 0;
constexpr int kStepKeys = 1;
constexpr int kStepSlope = 2;
constexpr int kStepWords = 4;

constexpr BackwardSm90Layout backward_sm90_layout(const AttentionBackwardSm90Config& config) {
  BackwardSm90Layout at = {};
  at.q_stage = tile_bytes(config.block_q, config.dim_qk, kWidestAtom);
  at.d_o_stage = tile_bytes(config.block_q, config.dim_v, kWidestAtom);
  at.ds_stage = tile_bytes(block_k_of(config), config.block_q, kWidestAtom);
  at.rows_stage = (2 * config.block_q + kStepWords) * 4;
  at.k = 0;
  at.v = at.k + tile_bytes(block_k_of(config), config.dim_qk, kWidestAtom);
  at.q = at.v + tile_bytes(block_k_of(config), config.dim_v, kWidestAtom);
  at.d_o = at.q + config.stages * at.q_stage;
  at.ds = at.d_o + config.stages * at.d_o_stage;
  at.weights = at.ds + config.ds_stages * at.ds_stage;
  at.rows = at.weights + (config.score_mod ? block_k_of(config) * config.block_q * 4 : 0);
  at.k_full = at.rows + config.stages * at.rows_stage;
  at.v_full = at.k_full + 8;
  at.q_full = at.v_full + 8;
  at.d_o_full = at.q_full + 8 * config.stages;
  at.empty = at.d_o_full + 8 * config.stages;
  at.ds_full = at.empty + 8 * config.stages;
  at.ds_empty = at.ds_full + 8 * config.ds_stages;
  at.steps = at.ds_empty + 8 * config.ds_stages;
  at.start = at.steps + 4;
  at.turns = at.steps + 8;
  at.dq_rows = at.turns + (config.deterministic ? kTurnBytes : 0);
  at.bytes = at.dq_rows + (config.deterministic ? 4 * 8 : 0);
  return at;
}

struct alignas(64) AttentionBackwardSm90Params {
  TensorMap q;  // boxes of block_q x 64
  TensorMap d_o;
  TensorMap k;  // boxes of block_k x 64
  TensorMap v;
  const float* lse_log2;  // [B, Hq, Sq], from backward_preprocess.cuh
  const float* delta;     // likewise
  void* dk;               // [B, Sk, Hkv, Dqk], or [total_k, Hkv, Dqk]
  void* dv;
  void* dq;  // [B, Sq, Hq, Dqk], or [total_q, Hq, Dqk]; only if it is written or deterministic, as dq_strides
  DqSums dq_sums;
  // [rows of dQ's sums / block_q]: key tiles that have added to a query tile; 0 at the start. Only if deterministic.
  unsigned* dq_turns;
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
  unsigned k_tiles;  // of the longest sequence
  unsigned columns;  // heads of all sequences: B Hkv; parts of groups if they are split: B Hkv parts
  Divisor together;  // of them, how many are processed together: their Q, dO and dQ sums fit the L2 cache
  Divisor by_heads;  // Hkv; if groups are split, Hkv parts
  Band band;
  float scale;  // positive, unless score_mod
  // Only if groups are split. Sums as dQ's: [B, Hkv, rows / 16, dim / 8] tiles; packed sequences start at multiples of
  // block_k rows.
  DqSums dk_sums;
  DqSums dv_sums;
  unsigned* dk_turns;  // [rows of the sums / 16]: parts that have added; 0 at the start. Only if deterministic, too.
  unsigned* dv_turns;
  unsigned part_heads;  // query heads of a part; of the last one of a group, at most so many
  Divisor by_parts;     // parts of a group
  // Only if queries are split.
  QuerySlices slices;
  // Only if in_step.
  unsigned* progress;     // steps of all CTAs so far; 0 at the start
  unsigned ctas_at_once;  // that run at the same time
  // Only if score_mod.
  float softcap;              // 0: none
  const float* alibi_slopes;  // [Hq] or [B, Hq], may be null
  Index alibi_batch_stride;
};

}  // namespace tessera
