// Config, shared-memory layout and Params of attention/forward_fp8_sm90.cuh.
#pragma once

#include "attention/forward_sm90_config.h"
#include "attention/fp8.h"
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
  bool tile_scales;        // K and V have a scale for each key tile, powers of two; not with k_blocks and v_blocks
  bool rounds_q;           // Q is of dtype: each warp rounds its 16 rows, with a scale of their own
  int promoted_tiles;      // key tiles after which O's sums are added to those in shared memory; 0: never
  bool q_in_sums;  // rounds_q: Q as it is given is where the sums are, which are not needed before it is rounded

  // Fields of the 16-bit forward's Config, which shares its code.
  // NOLINTBEGIN(readability-identifier-naming)
  static constexpr int min_atom = 16;
  static constexpr int page_box = 0;
  static constexpr bool pack_gqa = false, intra_cta_split = false, chunked = false, cache = false, few_keys = false;
  // NOLINTEND(readability-identifier-naming)
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
  visit("tile_scales", config.tile_scales);
  visit("rounds_q", config.rounds_q);
  visit("promoted_tiles", config.promoted_tiles);
  visit("q_in_sums", config.q_in_sums);
}

constexpr int block_q_of(const AttentionForwardFp8Sm90Config& config) { return config.consumers * kConsumerRows; }
constexpr int threads_of(const AttentionForwardFp8Sm90Config& config) { return (config.consumers + 1) * kWarpgroup; }
constexpr RegisterSplit register_split(const AttentionForwardFp8Sm90Config& config) {
  // Together no more than a CTA starts with.
  return config.consumers == 3 ? RegisterSplit{32, 160} : RegisterSplit{40, 232};
}

constexpr int kFp8MinAtom = AttentionForwardFp8Sm90Config::min_atom;

constexpr int kRowStateBytes = 24;

// q_in_sums: a consumer overwrites its rows of Q alone, so they are a tile of their own.
constexpr int q_boxes_of(const AttentionForwardFp8Sm90Config& config) {
  return config.q_in_sums ? config.consumers : 1;
}

// V is [stages][dim_v, block_k].
struct ForwardFp8Sm90Layout : ForwardSm90Layout {
  int q_rounded;  // rounds_q: [block_q, dim_qk]
  int sums;       // promoted_tiles: fp16 [consumers][dim_v / 16][threads of a consumer][8]
  int sums_part;  // bytes of a consumer
  int row_state;  // [threads of all consumers], kRowStateBytes each
};

constexpr ForwardFp8Sm90Layout forward_fp8_sm90_layout(const AttentionForwardFp8Sm90Config& config) {
  const int q_bytes = tile_bytes(block_q_of(config), fp8_columns(config.dim_qk), config.min_atom);
  ForwardFp8Sm90Layout at = {};
  at.q_stage = config.rounds_q ? tile_bytes(block_q_of(config), config.dim_qk, config.min_atom) : q_bytes;
  at.sums_part = kConsumerRows * config.dim_v * 2;
  if (config.q_in_sums) {
    const int q_part = tile_bytes(kConsumerRows, config.dim_qk, config.min_atom);
    at.sums_part = q_part > at.sums_part ? q_part : at.sums_part;
    at.q_stage = config.consumers * at.sums_part;
  }
  at.k_stage = tile_bytes(config.block_k, fp8_columns(config.dim_qk), config.min_atom);
  at.v_stage = tile_bytes(config.dim_v, fp8_columns(config.block_k), config.min_atom);
  at.k = config.q_stages * at.q_stage;
  at.v = at.k + config.stages * at.k_stage;
  at.q_rounded = at.v + config.stages * at.v_stage;
  const int behind_q = at.q_rounded + (config.rounds_q ? q_bytes : 0);
  const bool own_sums = config.promoted_tiles > 0 && !config.q_in_sums;
  at.sums = config.q_in_sums ? at.q : behind_q;
  at.row_state = behind_q + (own_sums ? config.consumers * at.sums_part : 0);
  at.q_full = at.row_state + config.consumers * kWarpgroup * kRowStateBytes;
  at.q_empty = at.q_full + 8 * config.q_stages;
  at.k_full = at.q_empty + 8 * config.q_stages;
  at.k_empty = at.k_full + 8 * config.stages;
  at.v_full = at.k_empty + 8 * config.stages;
  at.v_empty = at.v_full + 8 * config.stages;
  at.work_tiles = (at.v_empty + 8 * config.stages + 15) / 16 * 16;
  at.bytes = at.work_tiles + kWorkTileSlots * kWorkTileBytes;
  return at;
}

// v: of V transposed, boxes of dim_v rows. No cache.
struct alignas(64) AttentionForwardFp8Sm90Params : AttentionForwardSm90Params {
  RowScales q_scale, k_scale, v_scale;  // tile_scales: of each key tile; rounds_q: not of q
};

}  // namespace tessera
