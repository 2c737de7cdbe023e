// Attention forward for Hopper: warp-specialised, with TMA loads and wgmma. Entry point: attention_forward_sm90, below.
//
// Algorithm: FlashAttention with an online softmax (tile/online_softmax.cuh). Each CTA is persistent and loops over
// work tiles: block_q query rows of one head. For each it loops over the keys in tiles of block_k, last tile first.
//
// Roles: warpgroup 0 is the producer. One of its threads schedules the work tiles, writes each one's WorkTileInfo to
// shared memory, and issues the TMA loads of Q, K and V (forward_sm90_producer.cuh). Each of the other warpgroups is a
// consumer and owns 64 query rows from scores to output (forward_sm90_consumer.cuh, forward_sm90_math.cuh). Every stage of Q, K and V has two
// mbarriers: full (TMA has written the bytes) and empty (every consumer warp has finished reading).
//
//   shared memory:  Q [q_stages][block_q, Dqk]    K [stages][block_k, Dqk]    V [stages][block_k, Dv]
//   registers:      S [64, block_k] fp32    P [64, block_k] 16 bit    O [64, Dv] fp32, distributed over a warpgroup
//
// Pipeline of one work tile (S0 is the last key tile; ' marks the next work tile):
//
//   TMA            Q K0        | K1 V0          | K2 V1          | V2          | Q' K0'  |             | ...
//   tensor cores   S0=QK0      | S1=QK1         | S2=QK2         | O+=P2 V2    |         | S0'=Q'K0'   |
//                              |    O+=P0 V0    |    O+=P1 V1    |             |         |             |
//   softmax               P0   |           P1   |           P2   |             | store O |         P0' |
//
// A consumer issues S(j+1) and O += P(j) V(j) together. When S(j+1) is complete it computes P(j+1) while the product
// with V(j) still runs. With ping-pong scheduling (ping_pong), named barriers order the consumers: one issues its
// products, lets the next consumer issue its own, and runs its softmax meanwhile.
//
// Key tiles that are fully masked for the whole work tile are never loaded; key tiles that are fully masked for one
// consumer's rows are skipped by that consumer. TMA fills rows beyond the end of a sequence with zeros, so that memory
// behind the sequence never reaches a product.
//
// Intra-CTA split (intra_cta_split), for problems with too few query rows to occupy every SM: all consumers of a CTA
// own the same 64 rows and take key tiles in turn. Each stage of K and V then belongs to one consumer, and at the end
// consumer 0 combines the partial results through shared memory:
//
//   consumer 0   key tiles 0 3 6 ...  |                | combine partials, store |
//   consumer 1   key tiles 1 4 7 ...  | store partials |
//   consumer 2   key tiles 2 5 8 ...  | store partials |
//
// Few keys (few_keys): all keys of a head are one tile. It stays in its stage while the query tiles of the heads that share
// it pass, which are one CTA's, one after the other. A work tile is a chain; the other CTAs of the SM overlap with it:
//
//   TMA              Q0 K V | Q1                  | Q2                  | Q3 K' V'   ': the next head
//   tensor cores            | S=Q0 K | O=PV |     | S=Q1 K | O=PV |     |
//   softmax, store          |      P |      | O   |      P |      | O   |
//
// Tiles: three consumers share each K and V tile, which keeps shared-memory and L2 traffic below what the tensor cores
// need; block_k is the largest for which S, P and O fit the consumers' registers without spills
// (docs/kernels/attention_forward_sm90.md).
#pragma once

#include "attention/forward_sm90_config.h"
#include "attention/forward_sm90_math.cuh"
#include "attention/forward_sm90_roles.cuh"

namespace tessera {

template <AttentionForwardSm90Config config>
__forceinline__ void attention_forward_sm90(const AttentionForwardSm90Params& p) {
  static_assert(config.consumers >= 1 && config.consumers <= 3 && config.stages >= 2);
  static_assert(config.ctas_per_sm >= 1 && (config.ctas_per_sm == 1 || !config.intra_cta_split));
  static_assert(!config.intra_cta_split ||
                (config.consumers > 1 && config.stages % config.consumers == 0 && !config.ping_pong));
  // Which consumer gets which keys would depend on timing, and so would rounding.
  static_assert(!config.intra_cta_split || !config.dynamic_scheduler);
  static_assert(config.q_stages == 1 || config.q_stages == 2);
  static_assert(!config.few_keys || (!config.intra_cta_split && !config.dynamic_scheduler && !config.ping_pong &&
                                     !config.pack_gqa && !config.score_mod && !config.cache));
  static_assert(config.page_box == 0 || config.min_atom == kWidestAtom);  // single rows are at multiples of 128 bytes
  static_assert(!config.pack_gqa || !config.score_mod);  // ALiBi slopes differ between the heads of a tile
  static_assert(config.block_k % 16 == 0 && config.block_k <= 256);
  static_assert(config.dim_qk % 8 == 0 && config.dim_v % 8 == 0 && config.dim_v <= 256);
  // With a single consumer per SM, every thread may have the maximum of 255 registers from the start.
  constexpr bool kReallocates = config.consumers * config.ctas_per_sm > 1 && !config.few_keys;
  forward_sm90_roles<config, ForwardSm90Math<config>, kReallocates>(p);
}

}  // namespace tessera
