// Attention of a few queries against a KV cache, on mma.sync, for every architecture since Turing.
// Entry point: attention_decode, below.
//
// A decode step has to read the keys and values in use once, and nothing else takes time. So
//  - the queries of all heads that share a key head are the rows of one tile (packed GQA), 16 for each row warp;
//  - the keys of all sequences are divided evenly among CTAs, whatever the lengths are (decode_schedule.cuh). A CTA
//    walks over its tiles; if it has only a part of a sequence's keys, it leaves a partial result, and
//    attention/decode_combine.cuh, launched after it, combines these. On Hopper, if there are few sequences, a cluster
//    of CTAs shares the keys of one instead and sends its results through distributed shared memory: one launch;
//  - key warps share the keys of a tile, 16 or more each, and have a softmax and an output of their own. Their results
//    are merged at the end of a sequence or of the CTA's part of it.
//
//   loads:              tile j + stages - 1  |  tile j + stages      |  ...      across the ends of sequences
//   each warp:          S = Q K(j)^T, softmax, O = O * rescale + P V(j)          its keys of tile j
//   end of a segment:   O, max and sum of all key warps -> shared memory -> merged, divided, stored
//
//   shared memory:      stages of { K [block_k, Dqk], V [block_k, Dv], Q of a first tile }    Q [16 * row_warps, Dqk]
//
// Loads are cp.async by all threads and a CTA-wide barrier for each tile. On Hopper a producer warp may load with TMA
// instead, in boxes that have the keys of a tile or of a page, with mbarriers: no warp then waits for another.
//
// New keys are in no tile of the cache yet: the CTA that has their tile copies them into it, and into the cache, before
// its products. No other CTA reads those rows, so no one waits.
#pragma once

#include "attention/decode_results.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/pipeline.cuh"

namespace tessera {

template <AttentionDecodeConfig config>
struct AttentionDecode;

template <AttentionDecodeConfig config>
__forceinline__ void attention_decode(const AttentionDecodeParams& p) {
  AttentionDecode<config>(p).run();
}

template <AttentionDecodeConfig config>
struct AttentionDecode : DecodeResults<config> {
  using Base = DecodeResults<config>;
  using typename Base::Loads, Base::append_new_keys, Base::begin_segment, Base::cache_k, Base::cache_v,
      Base::clear_values, Base::cluster_rank, Base::combine_cluster, Base::empty_barrier, Base::end_segment,
      Base::full_barrier, Base::init_barriers, Base::kAsync, Base::kThreads, Base::kTma, Base::lane, Base::load_tile,
      Base::multiply, Base::p, Base::prefetch_tensor_maps, Base::produce;
  using DecodeResults<config>::DecodeResults;

  __forceinline__ void run() {
    if constexpr (kTma) {
      if (threadIdx.x == kThreads) prefetch_tensor_maps();
      init_barriers();
    }
#if __CUDA_ARCH__ >= 900
    if constexpr (config.cluster > 1) {
      cluster_arrive_relaxed();
      cluster_wait();  // all CTAs have started, so that their shared memory may be written
    }
#endif
    // What of the schedule is in device memory may be written by the preceding grid.
    if (!p.schedule.from_host) pdl_wait_and_launch_dependents();
    const DecodeWalk at = own_tiles();
    if (p.schedule.from_host) pdl_wait_and_launch_dependents();
    run(at);
    if constexpr (config.cluster > 1) combine_cluster(at);
  }

  __forceinline__ DecodeWalk own_tiles() const {
    if constexpr (config.cluster > 1) {
      return {p.schedule, config.cluster, cluster_rank(), static_cast<int>(blockIdx.x) / config.cluster};
    } else {
      return {p.schedule, blockIdx.x};
    }
  }

  __forceinline__ void run(const DecodeWalk& at) {
    if constexpr (kTma) {
      threadIdx.x >= kThreads ? produce(at) : consume(at);
    } else {
      load_and_consume(at);
    }
  }

  __forceinline__ void consume(DecodeWalk at) {
#if __CUDA_ARCH__ >= 900
    PipelineState<config.stages> pipe;
    bool starts = true;
#pragma unroll 1
    for (; !at.done(); at.next()) {
      mbarrier_wait_parity(full_barrier(pipe.index), pipe.parity);
      if (starts) begin_segment(at, pipe.index);
      if constexpr (config.append) append_new_keys(at, pipe.index);
      const bool cleared = clear_values(at, pipe.index);
      multiply(at, pipe.index);
      starts = at.ends_segment();
      if (starts) end_segment(at, pipe.index);
      // What was written to the stage comes before what TMA writes to it.
      if (starts || config.append || cleared) fence_proxy_async();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty_barrier(pipe.index));
      pipe.advance();
    }
#endif
  }

  __forceinline__ void load_and_consume(DecodeWalk at) {
    Loads load{at, cache_k(at), cache_v(at), true};
    bool starts = true;
    unsigned stage = 0, loaded = 0;
    // Tiles to load before the first products, by the code that later loads one for each: it then is in the caches.
    int to_load = kAsync ? config.stages - 1 : 0;
#pragma unroll 1
    while (!at.done()) {
      if constexpr (kAsync) {
        if (to_load == 0) {
          // After this barrier the tile is complete, and all warps are done with the one before, whose stage is free.
#if __CUDA_ARCH__ >= 800
          cp_async_wait_group<config.stages - 2>();
#endif
          __syncthreads();
        }
        load_tile(load, loaded);
        if (++loaded == config.stages) loaded = 0;
        if (to_load > 0) {
          --to_load;
          continue;
        }
      } else {
        __syncthreads();
        load_tile(load, 0);
        __syncthreads();
      }
      if (starts) begin_segment(at, stage);
      if constexpr (config.append) append_new_keys(at, stage);
      multiply(at, stage);
      starts = at.ends_segment();
      if (starts) end_segment(at, stage);
      if (++stage == config.stages) stage = 0;
      at.next();
    }
  }
};

}  // namespace tessera
