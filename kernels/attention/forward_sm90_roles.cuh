// The roles of the warpgroups of attention/forward_sm90.cuh and attention/forward_fp8_sm90.cuh.
#pragma once

#include "attention/forward_sm90_consumer.cuh"
#include "attention/forward_sm90_producer.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

namespace tessera {

template <auto config, class Math, bool reallocates_registers, class Params>
__forceinline__ void forward_sm90_roles(const Params& p) {
  constexpr RegisterSplit kRegisters = register_split(config);
  constexpr int kMbarriersReady = 0;  // a named barrier; the producer arrives without waiting for the consumers
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  // A whole warpgroup of producers comes first, a single warp last: consumers must be aligned warpgroups.
  constexpr bool kProducerFirst = threads_of(config) % kWarpgroup == 0;
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == (kProducerFirst ? 0 : config.consumers)) {
    ForwardSm90Producer<config, Params> producer{p, shared};
    const int thread = static_cast<int>(threadIdx.x) - (kProducerFirst ? 0 : config.consumers * kWarpgroup);
    if (thread == (kProducerFirst ? 32 : 1)) producer.prefetch_tensor_maps();  // on an otherwise idle warp
    if (thread == 0) producer.init_mbarriers();
    __syncwarp();
    named_barrier_arrive(kMbarriersReady, threads_of(config));
    if constexpr (reallocates_registers) setmaxnreg_dec<kRegisters.producer>();
    if (config.page_box > 0 ? thread < 32 : thread == 0) producer.run();
  } else {
    named_barrier_sync(kMbarriersReady, threads_of(config));
    if constexpr (reallocates_registers) setmaxnreg_inc<kRegisters.consumer>();
    ForwardSm90Consumer<config, Math> consumer{
        {{p, kProducerFirst ? warpgroup - 1 : warpgroup, static_cast<int>(threadIdx.x) % 32,
          static_cast<int>(threadIdx.x) % kWarpgroup / 32}},
        shared};
    consumer.run();
  }
}

}  // namespace tessera
