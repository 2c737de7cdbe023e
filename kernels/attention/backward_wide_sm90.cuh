// Attention backward for Hopper and head dims above 128: warp-specialised, with TMA loads and wgmma. Entry point:
// attention_backward_wide_sm90, below.
//
// Algorithm: a CTA owns 64 keys of one key head and loops over the queries in steps of 64, over all query heads that
// share its key head, so that dK and dV stay in registers until the end. Scores are computed transposed, keys by
// queries: the result of one product is the A operand of the next without leaving registers.
//
// Roles, by warpgroup:
//
//   producer        one thread issues the TMA loads of K, V and each step's Q and dO; one warp loads LSE and delta
//   P warpgroup      S^T = K Q^T      P^T = exp2(S^T - LSE)            dV += P^T dO
//                                      '--P, fp32--.
//   dS warpgroup    dP^T = V dO^T    dS^T = P^T (dP^T - delta)         dK += dS^T Q
//                                      '--dS, 16 bit--.
//   dQ warpgroup                     dQ = dS K, added to fp32 sums in global memory (tile/dq_sums.cuh); in turns, the first
//                                    key tile stores its sums and the last one writes dQ (attention/backward_turns.h)
//
//   shared memory:  K [64, Dqk]    V [64, Dv]    Q [q_stages][64, Dqk]    dO [d_o_stages][64, Dv]    the other CTA's K
//                   P^T [p_stages][64, 64] fp32    dS^T [ds_stages][cluster][64, 64]    LSE, delta [q_stages][64]
//                   (tile/tensor_map.h)
//   registers:      dV [64, Dv] fp32, S^T [64, 64] fp32, P^T [64, 64] 16 bit, distributed over the P warpgroup;
//                   dK [64, Dqk], dP^T and dS^T likewise over the dS warpgroup; 64 columns of dQ, and dS, over the third
//
// Pipeline (the numbers are steps; products of a warpgroup that are written together are in flight together):
//
//   P warpgroup     S0 | exp0 | dV0 S1   | exp1 | dV1 S2   | exp2 | ...
//   dS warpgroup    dP0 |      dS0 | dK0 dP1  |  dS1 | dK1 dP2  |  ...
//   dQ warpgroup                   | dQ0      |      | dQ1      |
//
// Above head dim 128 the accumulators of 128 keys do not fit the registers, and 64 keys are the rows of a single wgmma.
// So the warpgroups divide the products, not the keys: each reads the K, V, Q or dO of its products once, at full width.
// The price is that P crosses shared memory in fp32.
//
// L2 adds no faster than dQ of 64 keys comes, so pairs of CTAs form clusters (Config::cluster): their dS goes to both, each
// computes half of dQ's columns over the keys of both, and half as much is added. Q and dO are loaded once for both, by
// multicast, so a stage is empty only if both CTAs have read it, and both take the steps of either. A CTA whose keys are
// behind the end of the sequence computes zeros.
//
//   CTA 0    dS of keys 0 to 63   --.--> dQ = dS K over 128 keys, first half of the columns
//                                    X
//   CTA 1    dS of keys 64 to 127 --'--> dQ = dS K over 128 keys, second half
//
// TMA fills rows beyond the end of a sequence with zeros; their LSE is set to +inf, so that P is 0.
#pragma once

#include "attention/backward_wide_sm90_config.h"
#include "attention/backward_wide_sm90_consumer.cuh"
#include "attention/backward_wide_sm90_dq.cuh"
#include "attention/backward_wide_sm90_producer.cuh"
#include "attention/backward_wide_sm90_work.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

namespace tessera {

template <AttentionBackwardWideSm90Config config>
__forceinline__ void attention_backward_wide_sm90(const AttentionBackwardWideSm90Params& p) {
  static_assert(config.q_stages >= 2 && config.d_o_stages >= 1 && config.p_stages >= 1 && config.ds_stages >= 1);
  static_assert(config.cluster == 1 || (config.cluster == 2 && config.dim_qk > 128));
  static_assert((config.cluster == 1 && !config.deterministic) || config.dq_columns == kWidestAtom);
  static_assert(config.dim_qk % 8 == 0 && config.dim_v % 8 == 0);
  static_assert(config.dim_qk <= 256 && config.dim_v <= 256);
  static_assert(config.dq_columns % kWidestAtom == 0);
  constexpr BackwardWideSm90Layout kAt = backward_wide_sm90_layout(config);
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  if (threadIdx.x == 0) {
    constexpr unsigned kArrivals = 1;          // per warp
    constexpr unsigned kOne = 4 * kArrivals;   // of a warpgroup
    constexpr unsigned kBoth = 8 * kArrivals;  // of the P and the dS warpgroup
    mbarrier_init(shared + kAt.k_full, config.cluster);
    mbarrier_init(shared + kAt.v_full, 1);
    for (int i = 0; i < config.q_stages; ++i) {
      mbarrier_init(shared + kAt.q_full + i * kMbarrierBytes, 1 + 32 + (config.score_mod ? 1 : 0));
      mbarrier_init(shared + kAt.q_empty + i * kMbarrierBytes, kBoth * config.cluster);
    }
    for (int i = 0; i < config.d_o_stages; ++i) {
      mbarrier_init(shared + kAt.d_o_full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.d_o_empty + i * kMbarrierBytes, kBoth * config.cluster);
    }
    for (int i = 0; i < config.p_stages; ++i) {
      mbarrier_init(shared + kAt.p_full + i * kMbarrierBytes, kOne);
      mbarrier_init(shared + kAt.p_empty + i * kMbarrierBytes, kOne);
    }
    for (int i = 0; i < config.ds_stages; ++i) {
      mbarrier_init(shared + kAt.ds_full + i * kMbarrierBytes, kOne);
      mbarrier_init(shared + kAt.ds_empty + i * kMbarrierBytes, kOne * config.cluster);
    }
    if constexpr (config.deterministic) TurnBarriers{shared + kAt.turns}.init();
    fence_mbarrier_init();
  }
  pdl_wait_and_launch_dependents();
  const BackwardWideSm90Work<config> work(p, blockIdx.x);
  if (work.first_cluster_k >= work.len_k) {
    if constexpr (config.deterministic) {
      if (work.first_k == 0) {
        write_zeros<kBackwardWideTile, config.dim_qk>(p, work, static_cast<int>(threadIdx.x), kBackwardWideThreads);
      }
    }
    return;
  }
  if constexpr (config.cluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kWarpgroup / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warpgroup == 0) {
    setmaxnreg_dec<producer_registers(config)>();
    if (config.deterministic && warp >= 2) {
      // Computed anew: the producer's warps have no registers to keep it in.
      const BackwardWideSm90Work<config> own(p, recomputed(blockIdx.x));
      const BackwardWideSm90DqWarpgroup<config> dq{p, shared, own};
      if (warp == 2 && lane == 0) dq.await_all_turns();
      if (warp == 3 && lane == 0) dq.end_all_turns();
      return;
    }
    BackwardWideSm90Producer<config> producer{p, shared, work};
    if (work.steps > 0 && warp == 0 && lane == 0) producer.load_tiles();
    if (warp == 1) producer.load_rows(lane);
  } else if (warpgroup == 1) {
    if constexpr (config.dq_registers < 128) setmaxnreg_dec<config.dq_registers>();
    BackwardWideSm90DqWarpgroup<config> dq{p, shared, work};
    if constexpr (config.masked && config.deterministic) {
      if (work.first_k == 0) {
        write_zeros<kBackwardWideTile, config.dim_qk>(p, work, static_cast<int>(threadIdx.x) % kWarpgroup, kWarpgroup);
      }
    }
    if (work.steps > 0) dq.run(lane, warp);
  } else if (warpgroup == 2) {
    setmaxnreg_inc<consumer_registers(config)>();
    BackwardWideSm90PWarpgroup<config> consumer{{p, shared}};
    consumer.run(work.steps);
  } else {
    setmaxnreg_inc<consumer_registers(config)>();
    BackwardWideSm90DsWarpgroup<config> consumer{{p, shared}};
    consumer.run(work.steps);
  }
}

}  // namespace tessera
