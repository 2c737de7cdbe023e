// Arguments and tile shapes of attention/backward_sm90.cuh.
#pragma once

#include "contract/attention_backward.h"
#include "contract/attention_forward_sm90.h"
#include "contract/band.h"
#include "contract/tensor_map.h"
#include "contract/types.h"
#include "contract/work_order.h"

namespace tessera {

struct AttentionBackwardSm90Config {
  DType dtype;
  int dim_qk;
  int dim_v;
  int consumers;     // warpgroups of 64 keys each, 2; one more loads, and one makes dQ
  int block_q;       // queries of a step: 64 or 128
  int stages;        // of Q and dO: 2 or more, 3 or more where it overlaps
  int ds_stages;     // of dS
  bool overlaps;     // S of the next step is made under the gradients of this one: one more accumulator
  bool keeps_k;      // K's own rows stay in a consumer's registers
  bool keeps_v;      // likewise V's
  int dq_columns;    // of dQ that are made at a time: all, or 64 of up to 128
  int dq_registers;  // of a thread that makes dQ; what is left goes to the consumers
  bool banded;       // causal or a window: some tiles are skipped and some masked
};

template <class Visitor>
constexpr void visit_fields(const AttentionBackwardSm90Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("consumers", config.consumers);
  visit("block_q", config.block_q);
  visit("stages", config.stages);
  visit("ds_stages", config.ds_stages);
  visit("overlaps", config.overlaps);
  visit("keeps_k", config.keeps_k);
  visit("keeps_v", config.keeps_v);
  visit("dq_columns", config.dq_columns);
  visit("dq_registers", config.dq_registers);
  visit("banded", config.banded);
}

constexpr int block_k_of(const AttentionBackwardSm90Config& config) { return config.consumers * kConsumerRows; }
constexpr int threads_of(const AttentionBackwardSm90Config& config) { return (config.consumers + 2) * kWarpgroup; }

// Registers of a thread. A block starts with the same number for all; the dQ maker has what it is told, the consumers
// take as many as leave the producer 24, and that has the rest.
constexpr int kBackwardSm90Registers = 512;  // of one thread of each of four warpgroups
constexpr int consumer_registers(int dq_registers, int consumers) {
  const int most = (kBackwardSm90Registers - 24 - dq_registers) / consumers / 8 * 8;
  return most < 240 ? most : 240;
}
constexpr int consumer_registers(const AttentionBackwardSm90Config& config) {
  return consumer_registers(config.dq_registers, config.consumers);
}
constexpr int producer_registers(const AttentionBackwardSm90Config& config) {
  const int rest = kBackwardSm90Registers - config.dq_registers - config.consumers * consumer_registers(config);
  return rest < 64 ? rest : 64;
}

// Byte offsets in a block's shared memory. Tiles are cut into panels of 64 columns (contract/tensor_map.h).
struct BackwardSm90Layout {
  int k;           // [block_k, dim_qk]
  int v;           // [block_k, dim_v]
  int q;           // [stages][block_q, dim_qk]
  int q_stage;     // bytes
  int d_o;         // [stages][block_q, dim_v]
  int d_o_stage;   // bytes
  int ds;          // [ds_stages][block_k, block_q], 16 bit
  int ds_stage;    // bytes
  int rows;        // [stages]: LSE [block_q] and delta [block_q], fp32, and what the step is (kStepWords ints)
  int rows_stage;  // bytes
  int k_full;      // barriers: K is there
  int v_full;
  int q_full;    // [stages] Q is there, and the rows
  int d_o_full;  // [stages]
  int empty;     // [stages] Q, dO and the rows are used up
  int ds_full;   // [ds_stages]
  int ds_empty;  // [ds_stages]
  int bytes;
};

// Where a query's LSE and delta are among block_q: a lane wants two neighbouring queries of each 8, and gets those of
// two eights at once.
constexpr int row_slot(int query) { return query / 16 * 16 + query % 8 / 2 * 4 + query / 8 % 2 * 2 + query % 2; }

// What the step is: where the block's first key stands from its first query, and how many keys there are from that one
// on in the sequence. The others fill up.
constexpr int kStepDistance = 0;
constexpr int kStepKeys = 1;
constexpr int kStepWords = 4;

constexpr BackwardSm90Layout backward_sm90_layout(const AttentionBackwardSm90Config& config) {
  BackwardSm90Layout at = {};
  at.q_stage = tile_bytes(config.block_q, config.dim_qk, kWidestPanel);
  at.d_o_stage = tile_bytes(config.block_q, config.dim_v, kWidestPanel);
  at.ds_stage = tile_bytes(block_k_of(config), config.block_q, kWidestPanel);
  at.rows_stage = (2 * config.block_q + kStepWords) * 4;
  at.k = 0;
  at.v = at.k + tile_bytes(block_k_of(config), config.dim_qk, kWidestPanel);
  at.q = at.v + tile_bytes(block_k_of(config), config.dim_v, kWidestPanel);
  at.d_o = at.q + config.stages * at.q_stage;
  at.ds = at.d_o + config.stages * at.d_o_stage;
  at.rows = at.ds + config.ds_stages * at.ds_stage;
  at.k_full = at.rows + config.stages * at.rows_stage;
  at.v_full = at.k_full + 8;
  at.q_full = at.v_full + 8;
  at.d_o_full = at.q_full + 8 * config.stages;
  at.empty = at.d_o_full + 8 * config.stages;
  at.ds_full = at.empty + 8 * config.stages;
  at.ds_empty = at.ds_full + 8 * config.ds_stages;
  at.bytes = at.ds_empty + 8 * config.ds_stages;
  return at;
}

struct BackwardSm90Tile {
  int consumers;
  int block_q;
  int stages;
  int ds_stages;
  bool overlaps;
  bool keeps_k;
  bool keeps_v;
  int dq_columns;
  int dq_registers;
};

// By counting registers. A consumer has dK and dV (a register for two columns of each), an accumulator of 64 queries
// (32), its 16-bit operand (16) and, where they still fit, K (4 for 16 columns) and V, and last a second accumulator
// and operand: in that order they paid on an H200. V beside K above head dim 64, and all that is below 64, was not
// timed. The dQ maker has its sums. That needs 26 beside, since ptxas has sums start at register 24, and a consumer a
// few more. consumers 0: they do not fit.
constexpr BackwardSm90Tile backward_sm90_tile(int dim_qk, int dim_v) {
  constexpr int kBesideSums = 26;
  constexpr int kBeside = 30;
  constexpr int kInTurn = 32 + 16;
  if (dim_qk > 128 || dim_v > 128) return {};
  BackwardSm90Tile tile = {};
  tile.consumers = 2;
  tile.block_q = 64;
  tile.stages = dim_qk > 96 || dim_v > 96 ? 2 : 3;  // measured
  tile.ds_stages = 2;
  tile.dq_columns = dim_qk <= 96 ? dim_qk : 64;
  tile.dq_registers = (tile.dq_columns / 2 + kBesideSums + 7) / 8 * 8;
  int left = consumer_registers(tile.dq_registers, tile.consumers) - kBeside - (dim_qk + dim_v) / 2;
  const int of_k = (dim_qk + 15) / 16 * 4;
  const int of_v = (dim_v + 15) / 16 * 4;
  if (left < kInTurn) return {};
  left -= kInTurn;
  tile.keeps_k = left >= of_k;
  left -= tile.keeps_k ? of_k : 0;
  tile.keeps_v = left >= of_v && (!tile.keeps_k || (dim_qk <= 64 && dim_v <= 64));
  left -= tile.keeps_v ? of_v : 0;
  tile.overlaps = tile.keeps_k && tile.keeps_v && tile.stages >= 3 && left >= kInTurn;
  return tile;
}

// Tiles of queries that see some of the keys from first_k to last_k: `count` from `first` on.
struct QueryTiles {
  int first;
  int count;
};
constexpr QueryTiles query_tiles(const Band& band, int position_offset, int first_k, int last_k, int len_q,
                                 int block_q) {
  const int from = first_k - band.right - position_offset;
  const int to = last_k + band.left - position_offset + 1;
  const int begin = from > 0 ? from : 0;
  const int end = to < len_q ? to : len_q;
  if (end <= begin) return {0, 0};
  return {begin / block_q, (end - 1) / block_q + 1 - begin / block_q};
}

struct alignas(64) AttentionBackwardSm90Params {
  TensorMap q;  // boxes of block_q x 64
  TensorMap d_o;
  TensorMap k;  // boxes of block_k x 64
  TensorMap v;
  const float* lse_log2;  // [B, Hq, Sq], of backward_preprocess.cuh
  const float* delta;     // likewise
  void* dk;               // [B, Sk, Hkv, Dqk], or [total_k, Hkv, Dqk]
  void* dv;
  DqSums dq_sums;
  const int* cu_seqlens_q;  // [B + 1], null: every sequence has seq_q queries
  const int* cu_seqlens_k;
  Strides dk_strides;
  Strides dv_strides;
  RowStrides row_strides;  // of lse_log2 and delta
  int seq_q;               // the longest sequence's, where packed
  int seq_k;
  unsigned heads_q;
  unsigned group;    // query heads that share a key head
  unsigned k_tiles;  // of the longest sequence
  unsigned columns;  // heads of all sequences: B Hkv
  Divisor together;  // of them, how many are worked on together: their Q, dO and dQ's sums fit the L2 cache
  Divisor by_heads;  // Hkv
  Band band;
  float scale;  // above 0
};

}  // namespace tessera
