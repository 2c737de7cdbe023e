// Arguments and tile shapes of attention/forward_sm90.cuh.
#pragma once

#include "contract/arch.h"
#include "contract/band.h"
#include "contract/tensor_map.h"
#include "contract/types.h"
#include "contract/work_order.h"

namespace tessera {

struct AttentionForwardSm90Config {
  DType dtype;
  int dim_qk;
  int dim_v;
  int consumers;        // warpgroups of 64 query rows, 1 to 3; one more loads
  int block_k;          // keys of a step
  int stages;           // of K and of V, 2 or more; split: a multiple of the consumers
  int q_stages;         // of Q: 2 to load the next tile's ahead
  int blocks;           // on an SM at a time; 1 where split
  int narrowest_panel;  // 64 or 16: what fills up the last columns of a tile (contract/tensor_map.h)
  bool joined;          // rows of a tile are all query heads of a key head, query by query
  bool split;           // the consumers have the same 64 rows, and deal its tiles of keys out among them
  bool ping_pong;       // consumers take turns on the tensor cores; not where split
  int polynomial;       // of 8 exponentials, how many the FMA units compute
  bool tickets;         // blocks draw their tiles from a counter, else each has its own; not where split
  bool banded;          // causal or a window: some tiles are skipped and some masked
  bool general;         // softcap, ALiBi or a negative scale: scores are transformed one by one
};

template <class Visitor>
constexpr void visit_fields(const AttentionForwardSm90Config& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("consumers", config.consumers);
  visit("block_k", config.block_k);
  visit("stages", config.stages);
  visit("q_stages", config.q_stages);
  visit("blocks", config.blocks);
  visit("narrowest_panel", config.narrowest_panel);
  visit("joined", config.joined);
  visit("split", config.split);
  visit("ping_pong", config.ping_pong);
  visit("polynomial", config.polynomial);
  visit("tickets", config.tickets);
  visit("banded", config.banded);
  visit("general", config.general);
}

constexpr int kWarpgroup = 128;
constexpr int kConsumerRows = 64;

constexpr int block_q_of(const AttentionForwardSm90Config& config) {
  return (config.split ? 1 : config.consumers) * kConsumerRows;
}
constexpr int threads_of(const AttentionForwardSm90Config& config) { return (config.consumers + 1) * kWarpgroup; }

// Registers of a producer's and of a consumer's thread. A block starts with the same number for all, and the producer
// gives up what the consumers take.
struct RegisterSplit {
  int producer;
  int consumer;
};
constexpr RegisterSplit register_split(const AttentionForwardSm90Config& config) {
  const int at_start = 65536 / config.blocks / threads_of(config) / 8 * 8;
  const int producer = config.blocks > 1 && config.blocks * config.consumers > 2 ? 24
                       : config.consumers == 3 && !config.split                  ? 32
                                                                                 : 40;
  return {producer, (at_start * (config.consumers + 1) - producer) / config.consumers / 8 * 8};
}

// A note is read again when its tile's O is stored. By then Q's places may have been given free for as many tiles as
// there are and one more, so two notes more than places are never written too early.
constexpr int kNotes = 4;
constexpr int kNoteBytes = 32;

// Byte offsets in a block's shared memory. A barrier is 8 bytes.
struct ForwardSm90Layout {
  int q;            // [q_stages][block_q, dim_qk]
  int q_stage;      // bytes
  int k;            // [stages][block_k, dim_qk]
  int k_stage;      // bytes
  int v;            // [stages][block_k, dim_v]
  int v_stage;      // bytes
  int parts;        // split: [consumers - 1][dim_v / 8 + 1][kWarpgroup] x 16 bytes, what each has for the first to add
  int part;         // bytes
  int q_full;       // [q_stages] barriers: Q is there
  int q_empty;      // [q_stages] Q is used up
  int k_full;       // [stages]
  int k_empty;      // [stages]
  int v_full;       // [stages]
  int v_empty;      // [stages]
  int parts_full;   // split: parts are left
  int parts_empty;  // split: parts are added up
  int notes;        // [kNotes]: what the tile of queries is
  int bytes;
};

constexpr ForwardSm90Layout forward_sm90_layout(const AttentionForwardSm90Config& config) {
  ForwardSm90Layout at = {};
  at.k_stage = tile_bytes(config.block_k, config.dim_qk, config.narrowest_panel);
  at.v_stage = tile_bytes(config.block_k, config.dim_v, config.narrowest_panel);
  at.q = 0;
  at.q_stage = tile_bytes(block_q_of(config), config.dim_qk, config.narrowest_panel);
  at.k = config.q_stages * at.q_stage;
  at.v = at.k + config.stages * at.k_stage;
  at.parts = at.v + config.stages * at.v_stage;
  at.part = (config.dim_v / 8 + 1) * kWarpgroup * 16;
  at.q_full = at.parts + (config.split ? config.consumers - 1 : 0) * at.part;
  at.q_empty = at.q_full + 8 * config.q_stages;
  at.k_full = at.q_empty + 8 * config.q_stages;
  at.k_empty = at.k_full + 8 * config.stages;
  at.v_full = at.k_empty + 8 * config.stages;
  at.v_empty = at.v_full + 8 * config.stages;
  at.parts_full = at.v_empty + 8 * config.stages;
  at.parts_empty = at.parts_full + (config.split ? 8 : 0);
  at.notes = (at.parts_empty + (config.split ? 8 : 0) + 15) / 16 * 16;
  at.bytes = at.notes + kNotes * kNoteBytes;
  return at;
}

// Fields of a Config by the same names. consumers 0: there is no such tile.
struct ForwardSm90Tile {
  int consumers;
  int block_k;
  int stages;
  int q_stages;
  int blocks;
  int narrowest_panel;
  bool ping_pong;
};

// Scores (block_k / 2 registers a thread), probabilities (half of that) and the output (dim_v / 2) live at once, in 232
// registers with two consumers and in 160 with three. Three are faster wherever they fit.
constexpr ForwardSm90Tile forward_sm90_tile(int dim_qk, int dim_v, bool general) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (general) return {2, dim <= 128 ? 112 : dim <= 192 ? 80 : 64, 2, 1, 1, 64, true};
  if (dim <= 64) return {3, 128, 4, 2, 1, 64, true};
  if (dim <= 80) return {3, 112, 3, 2, 1, 16, true};
  if (dim <= 96) return {3, 96, 3, 2, 1, 16, true};
  if (dim <= 128) return {3, 80, 3, 2, 1, 64, true};
  if (dim <= 192) return {2, dim_v <= 128 ? 128 : 96, 2, 1, 1, 64, true};
  return {2, 64, 2, 1, 1, 64, true};
}

// For hundreds of keys, of which small steps compute fewer that no one needs.
constexpr ForwardSm90Tile short_forward_sm90_tile(int dim_qk, int dim_v, bool general) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (general || dim > 128) return {};
  return {3, 64, dim <= 64 ? 6 : 4, 2, 1, dim <= 64 || dim > 96 ? 64 : 16, false};
}

// Two blocks on an SM, for some hundred tiles of queries: all begin at once, and one loads while the other computes.
// Like the next one, timed at head dim 64.
constexpr ForwardSm90Tile paired_forward_sm90_tile(int dim_qk, int dim_v, bool general) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (general || dim > 64 || dim <= 48) return {};
  return {2, 48, 3, 1, 2, 64, false};
}

// For sequences of few queries, which would leave rows of a larger tile empty.
constexpr ForwardSm90Tile small_forward_sm90_tile(int dim_qk, int dim_v, bool general) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (general || dim > 64 || dim <= 48) return {};
  return {1, 64, 3, 2, 3, 64, false};
}

// For fewer tiles of queries than SMs: consumers that share them (split), with two places each.
constexpr ForwardSm90Tile split_forward_sm90_tile(int dim_qk, int dim_v, bool general) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (dim <= 64) return {2, general ? 64 : 128, 4, 2, 1, 64, false};
  if (dim <= 96 && !general) return {3, 64, 6, 1, 1, 16, false};
  if (dim <= 128) return {2, general ? 64 : 80, 4, 1, 1, 64, false};
  return {};
}

struct alignas(64) AttentionForwardSm90Params {
  PanelMaps q;  // boxes of block_q rows
  PanelMaps k;  // boxes of block_k rows
  PanelMaps v;
  void* o;                  // [B, Sq, Hq, Dv], or [total_q, Hq, Dv]
  float* lse;               // [B, Hq, Sq], natural log, may be null
  const int* cu_seqlens_q;  // [B + 1], null: every sequence has seq_q queries
  const int* cu_seqlens_k;
  const float* alibi_slopes;  // [Hq] or [B, Hq], may be null
  unsigned* ticket;           // 0 at the start; only where Config::tickets
  Strides o_strides;
  RowStrides lse_strides;
  Index alibi_batch_stride;
  int seq_q;  // the longest sequence's, where packed
  int seq_k;
  unsigned heads_q;
  unsigned group;    // query heads that share a key head
  unsigned q_tiles;  // of the longest sequence
  unsigned columns;  // heads of all sequences: B Hq, or B Hkv where joined
  Divisor together;  // of them, how many are worked on together: their K and V fit the L2 cache
  Divisor by_heads;  // of a sequence's columns: Hq, or Hkv where joined
  Divisor by_group;
  Band band;
  float scale;
  float softcap;  // 0: none
};

// Where row i of a sequence is on a map's axes (column, y, head, z). Not packed: y = i, z = batch. Packed, the map has
// `longest` rows on y and starts that many rows before the tensor; z moves by rows, too. Row i is then at y = longest -
// length + i, z = begin + length: what is beyond the sequence's end is beyond y's, and comes as zeros.
struct RowOrigin {
  int y;
  int z;
};
constexpr RowOrigin row_origin(int longest, int length, int begin) { return {longest - length, begin + length}; }
// cu_seqlens: null where not packed.
constexpr RowOrigin row_origin(const int* cu_seqlens, unsigned batch, int longest, int length) {
  return cu_seqlens ? row_origin(longest, length, cu_seqlens[batch]) : RowOrigin{0, static_cast<int>(batch)};
}

}  // namespace tessera
