// Attention forward on e4m3 operands for Hopper. Entry point: attention_forward_fp8_sm90, below.
//
// Algorithm, roles and pipeline are those of attention/forward_sm90.cuh: a producer warpgroup with TMA loads and
// consumer warpgroups of 64 query rows with wgmma, which loop over the keys in tiles, last tile first. What differs:
//
//   shared memory:  Q [q_stages][block_q, Dqk]    K [stages][block_k, Dqk]    V [stages][Dv, block_k], all e4m3
//                   rounds_q: Q as it is given, 16 bit, and rounded    promoted_tiles: sums [block_q, Dv] fp16
//   registers:      S [64, block_k] fp32    P [64, block_k] e4m3, twice    O [64, Dv] fp32
//
// - wgmma takes e4m3 operands K-major only, so V comes transposed. P as the accumulators of S hold it is wgmma's A
//   operand with keys permuted within each 16; V has its keys in that order (value_key), so that no lane moves a value.
// - P is scaled by a power of two to use e4m3's range (fp8_softmax.cuh). It is rounded to e4m3 as soon as it
//   is computed, while the product with the previous tile of V runs.
// - Scales of Q and K go into the factor of the exponent, V's into O: O is in units of the scale of the last key tile,
//   and is rescaled if the next tile's is another.
// - promoted_tiles: the tensor cores keep about 14 bits of a sum and truncate it, so that long ones become too small. O is
//   added to sums in shared memory every few key tiles.
#pragma once

#include "attention/forward_fp8_sm90_config.h"
#include "attention/forward_fp8_sm90_math.cuh"
#include "attention/forward_sm90_roles.cuh"

namespace tessera {

template <AttentionForwardFp8Sm90Config config>
__forceinline__ void attention_forward_fp8_sm90(const AttentionForwardFp8Sm90Params& p) {
  static_assert(config.consumers >= 2 && config.consumers <= 3 && config.stages >= 2);
  static_assert(config.q_stages == 1 || config.q_stages == 2);
  static_assert(config.block_k % 32 == 0 && config.block_k <= 256);
  static_assert(!config.k_blocks || config.block_k % kScaleKeys == 0);
  static_assert(!config.v_blocks || config.block_k == 64 || config.block_k == 128);
  static_assert(!config.tile_scales || (!config.k_blocks && !config.v_blocks));
  static_assert(config.dim_qk % 16 == 0 && config.dim_v % 16 == 0 && config.dim_v <= 256);
  forward_sm90_roles<config, ForwardFp8Sm90Math<config>, true>(p);
}

}  // namespace tessera
