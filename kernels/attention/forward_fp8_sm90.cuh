// Attention forward on e4m3 operands for Hopper. Entry point: attention_forward_fp8_sm90, below.
//
// Algorithm, roles and pipeline are those of attention/forward_sm90.cuh: a producer warpgroup with TMA loads and
// consumer warpgroups of 64 query rows with wgmma, which loop over the keys in tiles, last tile first. What differs:
//
//   shared memory:  Q [q_stages][block_q, Dqk]    K [stages][block_k, Dqk]    V [stages][Dv, block_k], all e4m3
//   registers:      S [64, block_k] fp32    P [64, block_k] e4m3, twice    O [64, Dv] fp32
//
// - wgmma takes e4m3 operands K-major only, so V comes transposed. P as the accumulators of S hold it is wgmma's A
//   operand with keys permuted within each 16; V has its keys in that order (value_key), so that no lane moves a value.
// - P is scaled by a power of two to use e4m3's range (fp8_softmax.cuh). It is rounded to e4m3 as soon as it
//   is computed, while the product with the previous tile of V runs.
// - Scales of Q and K go into the factor of the exponent, V's into O: O is in units of the scale of the last key tile,
//   and is rescaled if the next tile's is another.
// - promotes: the tensor cores keep about 14 bits of a sum, so each tile's product with V starts from 0 and is added to
//   O in fp32.
#pragma once

#include "attention/forward_fp8_sm90_config.h"
#include "attention/forward_fp8_sm90_consumer.cuh"
#include "attention/forward_fp8_sm90_producer.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

namespace tessera {

template <AttentionForwardFp8Sm90Config config>
__forceinline__ void attention_forward_fp8_sm90(const AttentionForwardFp8Sm90Params& p) {
  static_assert(config.consumers >= 2 && config.consumers <= 3 && config.stages >= 2);
  static_assert(config.q_stages == 1 || config.q_stages == 2);
  static_assert(config.block_k % 32 == 0 && config.block_k <= 256);
  static_assert(!config.k_blocks || config.block_k % kScaleKeys == 0);
  static_assert(!config.v_blocks || config.block_k == 64 || config.block_k == 128);
  static_assert(config.dim_qk % 16 == 0 && config.dim_v % 16 == 0 && config.dim_v <= 256);
  constexpr RegisterSplit kRegisters = register_split(config);
  constexpr int kMbarriersReady = 0;  // a named barrier; the producer arrives without waiting for the consumers
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    ForwardFp8Sm90Producer<config> producer{p, shared};
    if (threadIdx.x == 32) producer.prefetch_tensor_maps();  // on an otherwise idle warp
    if (threadIdx.x == 0) producer.init_mbarriers();
    __syncwarp();
    named_barrier_arrive(kMbarriersReady, threads_of(config));
    setmaxnreg_dec<kRegisters.producer>();
    if (threadIdx.x == 0) producer.run();
  } else {
    named_barrier_sync(kMbarriersReady, threads_of(config));
    setmaxnreg_inc<kRegisters.consumer>();
    ForwardFp8Sm90Consumer<config> consumer{p, shared, warpgroup - 1, static_cast<int>(threadIdx.x) % 32,
                                            static_cast<int>(threadIdx.x) % kWarpgroup / 32};
    consumer.run();
  }
}

}  // namespace tessera
