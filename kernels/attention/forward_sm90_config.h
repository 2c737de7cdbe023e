// Config, shared-memory layout and Params of attention/forward_sm90.cuh.
#pragma once

#include "tile/kv_cache.h"
#include "tile/mask.h"
#include "tile/scheduler.h"
#include "tile/tensor_map.h"
#include "tile/types.h"

namespace tessera {

struct AttentionForwardSm90Config {
  DType dtype;
  int dim_qk;
  int dim_v;
  int consumers;           // consumer warpgroups, 1 to 3, of 64 query rows each; there is one producer besides
  int block_k;             // keys per tile
  int stages;              // of K and of V, 2 or more; intra-CTA split: a multiple of the consumers
  int q_stages;            // of Q: 2 to load the next work tile's Q ahead
  int ctas_per_sm;         // resident at a time; 1 with an intra-CTA split
  int min_atom;            // 64 or 16: the narrowest swizzle atom for the last columns of a tile (tile/tensor_map.h)
  bool pack_gqa;           // rows of a tile are all query heads of a key head, query by query
  bool intra_cta_split;    // the consumers share the same 64 rows and divide the key tiles among them
  bool ping_pong;          // ping-pong barriers order the consumers' products; not with an intra-CTA split
  bool dynamic_scheduler;  // CTAs take work tiles from a global counter, else statically; not with an intra-CTA split
  bool masked;             // causal or a window: some tiles are skipped and some masked
  bool score_mod;          // softcap, ALiBi or a negative scale: every score is modified before the softmax
  int page_box;            // 0, or K and V are a paged cache: keys of a TMA box, which are all of one page
  bool chunked;            // the mask has chunks
  bool cache;              // K and V are a KV cache, whose lengths only the device knows
  bool few_keys;  // all keys are one tile, which stays in shared memory while the query tiles of its heads pass
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
  visit("ctas_per_sm", config.ctas_per_sm);
  visit("min_atom", config.min_atom);
  visit("pack_gqa", config.pack_gqa);
  visit("intra_cta_split", config.intra_cta_split);
  visit("ping_pong", config.ping_pong);
  visit("dynamic_scheduler", config.dynamic_scheduler);
  visit("masked", config.masked);
  visit("score_mod", config.score_mod);
  visit("page_box", config.page_box);
  visit("chunked", config.chunked);
  visit("cache", config.cache);
  visit("few_keys", config.few_keys);
}

constexpr int kWarpgroup = 128;
constexpr int kConsumerRows = 64;

constexpr int block_q_of(const AttentionForwardSm90Config& config) {
  return (config.intra_cta_split ? 1 : config.consumers) * kConsumerRows;
}
// With few keys registers suffice without setmaxnreg, so that the producer need not be a whole warpgroup.
constexpr int producer_threads_of(const AttentionForwardSm90Config& config) {
  return config.few_keys ? 32 : kWarpgroup;
}
constexpr int threads_of(const AttentionForwardSm90Config& config) {
  return config.consumers * kWarpgroup + producer_threads_of(config);
}

// Registers per thread of the producer and of a consumer. A CTA starts with the same number for all threads; setmaxnreg
// then moves registers from the producer to the consumers.
struct RegisterSplit {
  int producer;
  int consumer;
};
constexpr RegisterSplit register_split(const AttentionForwardSm90Config& config) {
  const int at_start = 65536 / config.ctas_per_sm / threads_of(config) / 8 * 8;
  const int producer = config.ctas_per_sm > 1 && config.ctas_per_sm * config.consumers > 2 ? 24
                       : config.consumers == 3 && !config.intra_cta_split                  ? 32
                                                                                           : 40;
  return {producer, (at_start * (config.consumers + 1) - producer) / config.consumers / 8 * 8};
}

// A work tile info is read again when its O is stored. By then the consumers may have released every stage of Q and one
// more, so with two slots more than Q has stages no slot is overwritten too early.
constexpr int kWorkTileSlots = 4;
constexpr int kWorkTileBytes = 32;

// Byte offsets in a CTA's shared memory. An mbarrier is 8 bytes.
struct ForwardSm90Layout {
  int q;            // [q_stages][block_q, dim_qk]
  int q_stage;      // bytes
  int k;            // [stages][block_k, dim_qk]
  int k_stage;      // bytes
  int v;            // [stages][block_k, dim_v]
  int v_stage;      // bytes
  int parts;        // intra-CTA split: [consumers - 1][dim_v / 8 + 1][kWarpgroup] x 16 bytes, the partial results
  int part;         // bytes
  int q_full;       // [q_stages] mbarriers: Q is loaded
  int q_empty;      // [q_stages] Q may be overwritten
  int k_full;       // [stages]
  int k_empty;      // [stages]
  int v_full;       // [stages]
  int v_empty;      // [stages]
  int parts_full;   // intra-CTA split: the partials are written
  int parts_empty;  // intra-CTA split: the partials may be overwritten
  int work_tiles;   // [kWorkTileSlots] ForwardSm90WorkTileInfo
  int bytes;
};

constexpr ForwardSm90Layout forward_sm90_layout(const AttentionForwardSm90Config& config) {
  ForwardSm90Layout at = {};
  at.k_stage = tile_bytes(config.block_k, config.dim_qk, config.min_atom);
  at.v_stage = tile_bytes(config.block_k, config.dim_v, config.min_atom);
  at.q = 0;
  at.q_stage = tile_bytes(block_q_of(config), config.dim_qk, config.min_atom);
  at.k = config.q_stages * at.q_stage;
  at.v = at.k + config.stages * at.k_stage;
  at.parts = at.v + config.stages * at.v_stage;
  at.part = (config.dim_v / 8 + 1) * kWarpgroup * 16;
  at.q_full = at.parts + (config.intra_cta_split ? config.consumers - 1 : 0) * at.part;
  at.q_empty = at.q_full + 8 * config.q_stages;
  at.k_full = at.q_empty + 8 * config.q_stages;
  at.k_empty = at.k_full + 8 * config.stages;
  at.v_full = at.k_empty + 8 * config.stages;
  at.v_empty = at.v_full + 8 * config.stages;
  at.parts_full = at.v_empty + 8 * config.stages;
  at.parts_empty = at.parts_full + (config.intra_cta_split ? 8 : 0);
  at.work_tiles = (at.parts_empty + (config.intra_cta_split ? 8 : 0) + 15) / 16 * 16;
  at.bytes = at.work_tiles + kWorkTileSlots * kWorkTileBytes;
  return at;
}

struct alignas(64) AttentionForwardSm90Params {
  AtomMaps q;               // boxes of block_q rows
  AtomMaps k;               // boxes of block_k rows, or of page_box
  AtomMaps v;               // likewise
  void* o;                  // [B, Sq, Hq, Dv], or [total_q, Hq, Dv]
  float* lse;               // [B, Hq, Sq], natural log, may be null
  const int* cu_seqlens_q;  // [B + 1], null: every sequence has seq_q queries
  const int* cu_seqlens_k;
  const float* alibi_slopes;  // [Hq] or [B, Hq], may be null
  unsigned* tile_counter;     // 0 at the start; only if Config::dynamic_scheduler
  Strides o_strides;
  RowStrides lse_strides;
  Index alibi_batch_stride;
  int seq_q;  // of the longest sequence if packed
  int seq_k;
  unsigned heads_q;
  unsigned group;  // query heads that share a key head
  float scale;
  float softcap;     // 0: none
  unsigned q_tiles;  // of the longest sequence
  unsigned columns;  // heads of all sequences: B Hq, or B Hkv with pack_gqa
  Divisor together;  // of them, how many are processed together: their K and V fit the L2 cache
  Divisor by_heads;  // columns of a sequence: Hq, or Hkv with pack_gqa
  Divisor by_group;
  Band band;
  KvCache cache;  // if Config::cache
  int k_pitch;    // rows from one row of the cache to the next, if not paged; likewise of V
  int v_pitch;
  AtomMaps k_rows;  // boxes of one row, if paged
  AtomMaps v_rows;  // likewise
};

// Coordinates of row i of a sequence on a map's axes (column, y, head, z). Not packed: y = i, z = batch. Packed: the
// map has `longest` rows on y and starts that many rows before the tensor, and z also advances by rows. Row i is then
// at y = longest - length + i, z = begin + length: rows beyond the end of the sequence are beyond the end of y, and TMA
// fills them with zeros.
struct RowOrigin {
  int y;
  int z;
};
constexpr RowOrigin row_origin(int longest, int length, int begin) { return {longest - length, begin + length}; }
// cu_seqlens: null if not packed.
constexpr RowOrigin row_origin(const int* cu_seqlens, unsigned batch, int longest, int length) {
  return cu_seqlens ? row_origin(longest, length, cu_seqlens[batch]) : RowOrigin{0, static_cast<int>(batch)};
}

}  // namespace tessera
