// Attention backward for Hopper: warp-specialised, with TMA loads and wgmma. Entry point: attention_backward_sm90,
// below.
//
// Algorithm: a CTA owns block_k keys of one key head and loops over the queries in steps of block_q, over all query
// heads that share its key head, so that dK and dV stay in registers until the end. Scores are computed transposed,
// keys by queries: the result of one product is the A operand of the next without leaving registers.
//
// Roles, by warpgroup:
//
//   producer        one thread issues the TMA loads of K, V and each step's Q and dO; one warp loads LSE and delta
//   dQ warpgroup    dQ = dS K over all keys of the CTA, added to fp32 sums in global memory (tile/dq_sums.cuh); in turns,
//                   the first key tile stores its sums, the last one writes dQ, and two more threads of the producer
//                   see turns come and end them (attention/backward_turns.h)
//   consumers       64 keys each:    S^T = K Q^T      P^T = exp2(S^T - LSE)              dV += P^T dO
//                                   dP^T = V dO^T    dS^T = P^T (dP^T - delta) --dS-->   dK += dS^T Q
//
//   shared memory:  K [block_k, Dqk]    V [block_k, Dv]    Q [stages][block_q, Dqk]    dO [stages][block_q, Dv]
//                   dS^T [ds_stages][block_k, block_q]     LSE, delta [stages][block_q]    (tile/tensor_map.h)
//   registers:      dK [64, Dqk] and dV [64, Dv] fp32; S^T and dP^T [64, block_q] fp32, in an accumulator each or, if
//                   registers do not suffice, in one; P^T and dS^T [64, block_q] 16 bit; distributed over a warpgroup
//
// Pipeline of a consumer (the numbers are steps; what stands in brackets runs at the same time):
//
//   two accumulators         S0  [exp  dP0] | [dS0  dV0]  S1  hand dS0 over  [exp  dK0  dP1] | [dS1  dV1]  S2  ...
//   one, P^T rounded         S0  [exp  dP0  dV0]  dS0  hand it over  | dK0  S1  [exp  dP1  dV1]  ...
//   one, P^T kept in fp16    S0  exp | dP0  [dS0  dV0]  hand it over  S1  [exp  dK0] | dP1  ...
//
// A separate dQ warpgroup costs the consumers no registers and no time, and they need not wait for each other: while
// one computes exponentials, the tensor cores run the other's products and dQ's.
//
// TMA fills rows beyond the end of a sequence with zeros; their LSE is set to +inf, so that P is 0.
//
// If the CTA has all keys of the sequence (writes_dq), dQ of a step is complete: the dQ warpgroup writes it, and there
// are neither sums nor their order. Up to 64 keys one consumer suffices, and two CTAs fit an SM.
//
// The queries of the last key tiles may be divided among CTAs (splits_queries), so that no SM is idle in the last wave. They
// add dK and dV to fp32 sums, and the last one writes them (attention/backward_slices.h).
//
// If one head's Q, dO and dQ sums exceed the L2 cache, a CTA starts at the query tile that the running CTAs have reached on
// average, and wraps around (in_step).
//
// Tiles: two consumers and a dQ warpgroup use all 512 registers of a thread quadruple (one thread per warpgroup), so
// block_k is 128; block_q is 64, which leaves registers for a second accumulator
// (docs/kernels/attention_backward_sm90.md).
#pragma once

#include "attention/backward_sm90_config.h"
#include "attention/backward_sm90_consumer.cuh"
#include "attention/backward_sm90_dq.cuh"
#include "attention/backward_sm90_producer.cuh"
#include "attention/backward_sm90_work.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

namespace tessera {

template <AttentionBackwardSm90Config config>
__forceinline__ void attention_backward_sm90(const AttentionBackwardSm90Params& p) {
  static_assert(config.block_q % kConsumerRows == 0 && config.ds_stages >= 1);
  static_assert(config.consumers == 2 || (config.consumers == 1 && !config.ping_pong));
  static_assert(!config.writes_dq || !config.deterministic);  // there is no order of adding
  // With two accumulators, the next step's Q is needed while the stages of this step and the previous one are held.
  static_assert(config.stages >= config.accumulators + 1);
  static_assert(config.dim_qk % 8 == 0 && config.dim_v % 8 == 0);
  static_assert(config.dim_qk <= 256 && config.dim_v <= 256);
  static_assert(config.dq_columns == config.dim_qk ||
                (config.dq_columns == 64 && config.dim_qk > 64 && config.dim_qk <= 128));
  static_assert(!config.score_mod || (config.accumulators == 1 && !config.keeps_p));
  static_assert(!config.in_step || !(config.masked || config.deterministic || config.writes_dq));
  constexpr BackwardSm90Layout kAt = backward_sm90_layout(config);
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  if (threadIdx.x == 0) {
    constexpr unsigned kWarps = config.consumers * 4;
    mbarrier_init(shared + kAt.k_full, 1);
    mbarrier_init(shared + kAt.v_full, 1);
    for (int i = 0; i < config.stages; ++i) {
      mbarrier_init(shared + kAt.q_full + i * kMbarrierBytes, 1 + 32 + (config.score_mod ? 1 : 0));
      mbarrier_init(shared + kAt.d_o_full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.empty + i * kMbarrierBytes, kWarps);
    }
    for (int i = 0; i < config.ds_stages; ++i) {
      mbarrier_init(shared + kAt.ds_full + i * kMbarrierBytes, kWarps);
      mbarrier_init(shared + kAt.ds_empty + i * kMbarrierBytes, 4);
    }
    if constexpr (config.deterministic) TurnBarriers{shared + kAt.turns}.init();
    fence_mbarrier_init();
  }
  pdl_wait_and_launch_dependents();
  BackwardSm90Work<config> work(p, blockIdx.x);
  if (work.first_k >= work.len_k) {
    if constexpr (config.writes_dq || config.deterministic) {
      if (work.first_k == 0) {
        write_zeros<config.block_q, config.dim_qk>(p, work, static_cast<int>(threadIdx.x), threads_of(config));
      }
    }
    return;
  }
  if (threadIdx.x == 0) {
    store_shared_4(shared + kAt.steps, work.steps);
    if constexpr (config.in_step) store_shared_4(shared + kAt.start, work.reached(p));
  }
  __syncthreads();
  if constexpr (config.in_step) {
    work.start = __shfl_sync(0xffffffffu, static_cast<int>(load_shared_4(shared + kAt.start)), 0);
  }
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kWarpgroup / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warpgroup == 0) {
    setmaxnreg_dec<producer_registers(config)>();
    if (config.deterministic && warp >= 2) {
      // Computed anew: the producer's warps have no registers to keep it in.
      const BackwardSm90Work<config> own(p, recomputed(blockIdx.x));
      const BackwardSm90DqWarpgroup<config> dq{p, shared, own};
      if (warp == 2 && lane == 0) dq.await_all_turns();
      if (warp == 3 && lane == 0) dq.end_all_turns();
      return;
    }
    BackwardSm90Producer<config> producer{p, shared, work};
    if (work.steps > 0 && warp == 0 && lane == 0) producer.load_tiles();
    if (warp == 1) producer.load_rows(lane);
  } else if (warpgroup == 1) {
    setmaxnreg_dec<config.dq_registers>();
    BackwardSm90DqWarpgroup<config> dq{p, shared, work};
    if constexpr (config.masked && (config.writes_dq || config.deterministic)) {
      if (work.first_k == 0) {
        write_zeros<config.block_q, config.dim_qk>(p, work, static_cast<int>(threadIdx.x) % kWarpgroup, kWarpgroup);
      }
    }
    if (work.steps > 0) dq.run(lane, warp);
  } else {
    setmaxnreg_inc<consumer_registers(config)>();
    BackwardSm90Consumer<config> consumer(p, shared, warpgroup - 2);
    // Through shared memory: in a deterministic instance the count is in a register, and the consumers have none left.
    consumer.run(__shfl_sync(0xffffffffu, static_cast<int>(load_shared_4(shared + kAt.steps)), 0));
  }
}

}  // namespace tessera
