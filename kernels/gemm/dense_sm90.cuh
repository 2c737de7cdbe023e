// Dense GEMM for Hopper: warp-specialised and persistent, with TMA loads, wgmma and TMA stores. Entry point:
// gemm_dense_sm90, below.
//
// Algorithm: each CTA loops over work tiles, block_m x block_n elements of out = epilogue(A B), and for each over K in
// steps of 64.
//
// Roles: warpgroup 0 is the producer. One of its threads issues the TMA loads of A and B for all of the CTA's work
// tiles, as far ahead as there are stages. Warpgroups 1 and 2 are consumers: they multiply, apply the epilogue and store
// (dense_sm90_consumer.cuh). Every stage has two mbarriers: full (TMA has written the bytes) and empty (every consumer
// warp has finished reading).
//
//   shared memory:  A [stages][block_m, 64]    B [stages][block_n, 64]
//                   staging [consumers][buffers][boxes of 64 rows of 128 bytes]
//   registers:      the sums: [block_m, block_n] fp32, of a consumer's own tile (ping_pong), else half of its rows
//
// With ping-pong, the consumers own work tiles in turn. Stages are loaded in that order, so one consumer multiplies while
// the other one's epilogue runs:
//
//   TMA          | tile 0 | tile 1 | tile 2 | tile 3 | ...
//   consumer 0   | multiply        | store  | multiply | store ...
//   consumer 1            | multiply        | store    | ...
//
// Without it, both work on one tile, which may then be larger: less traffic from L2, for large K.
//
// Cluster: two CTAs with adjacent row tiles need the same B. Each loads half of it and multicasts it to both, which
// lowers the demand on L2 from (block_m + block_n) to (block_m + block_n / 2) rows per step. Or their column tiles are
// adjacent, and they need the same A.
//
// Rows that start anywhere: TMA needs addresses, strides and first columns at multiples of 16 bytes, and rows of 2,730 bytes
// (K = 1365) are not. But eight such rows are a multiple of 16 bytes apart, so a tensor map can have every eighth row, from
// the last multiple of 16 bytes before the first one on. Its columns are those of the matrix plus a shift of 0 to 7, the
// same for all of its rows. What a tile does with them has that shift everywhere:
//
//   rows of A, K-major     terms are shifted: the same is done to B, by a first row below 0 or a copy for each shift
//   rows of out            columns are: B's too, in the same way, and TMA stores aligned chunks
//   rows of K of A or B    rows or columns of the partial sums are: split_reduce.cuh adds what belongs together
#pragma once

#include "gemm/dense_sm90_config.h"
#include "gemm/dense_sm90_consumer.cuh"
#include "gemm/dense_sm90_producer.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

namespace tessera {

template <GemmDenseSm90Config config>
__forceinline__ void gemm_dense_sm90(const GemmDenseSm90ParamsOf<config>& p) {
  using namespace gemm_sm90;
  static_assert(config.block_n % 8 == 0 && config.block_n >= 8 && config.block_n <= 256);
  static_assert(consumer_rows(config) % 64 == 0 && consumer_rows(config) <= 192);
  static_assert(config.stages >= 2);
  static_assert(config.cluster == 1 || config.cluster == 2);
  static_assert(config.cluster == 1 || config.b_transposed || config.block_n % 16 == 0);
  static_assert(!config.shares_a || (config.cluster == 2 && config.a_transposed && config.block_m % 128 == 0));
  static_assert(!config.gated || (!config.split && config.block_n % (config.b_transposed ? 128 : 16) == 0));
  static_assert(config.strided != kStridedM || !config.a_transposed);
  static_assert(config.strided != kStridedK || (config.a_transposed && config.b_transposed && config.split));
  static_assert(!config.edges || (config.tma_store && !config.split && config.grouping == kUngrouped));
  static_assert(!config.edges || config.staged != kStagedPreactivation);
  static_assert(!config.split || config.tma_store);
  static_assert(!config.sums_two || (!config.split && !config.gated && config.strided == kStridedNone));
  static_assert(!config.sums_two || config.grouping == kUngrouped || config.grouping == kRaggedRows);
  static_assert(config.grouping == kUngrouped || (!config.split && config.strided == kStridedNone));
  static_assert(config.grouping != kRaggedSums || (config.a_transposed && config.b_transposed));
  static_assert(config.staged == kStagedNone || !config.split);
  static_assert(config.staged != kStagedResidual || config.residual);
  static_assert(config.staged != kStagedSaved || (config.gradient && config.out_dtype == config.dtype));
  static_assert(config.staged != kStagedPreactivation || (config.preactivation && config.out_dtype == config.dtype));
  // The other matrices' elements of columns that two boxes share are gone when the second one is stored.
  static_assert(boxes_of_buffer(config) == 1 || out_columns(config) % 64 == 0 || out_columns(config) < 64);
  static_assert(config.gated_gradient == (config.staged == kStagedPair));
  static_assert(!config.weighted || config.gated_gradient);
  static_assert(!config.gated_gradient || !(config.gated || config.gradient || config.preactivation));
  static_assert(!config.gated_gradient || !(config.bias || config.residual || config.out_dtype != config.dtype));
  // Pairs of matrices pass through shared memory, and have one map each.
  static_assert(!config.gated || !config.preactivation || config.staged == kStagedPreactivation);
  static_assert(!(config.gated_gradient || (config.gated && config.preactivation)) ||
                (config.tma_store && config.strided == kStridedNone));
  // At the start a thread has 168 registers.
  constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  constexpr Layout kAt = layout(config);
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    constexpr unsigned kWarps = (config.ping_pong ? 4 : 8) * config.cluster;  // that read a stage
    for (int i = 0; i < config.stages; ++i) {
      mbarrier_init(shared + kAt.full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.empty + i * kMbarrierBytes, kWarps);
    }
    for (int i = 0; i < kConsumers * staging_buffers(config); ++i) {
      mbarrier_init(shared + kAt.loaded + i * kMbarrierBytes, 1);
    }
    fence_mbarrier_init();
  }
  if (threadIdx.x == 32) GemmDenseSm90Producer<config>::prefetch_tensor_maps(p);
  if constexpr (config.cluster > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }
  if (warpgroup == 0) {
    setmaxnreg_dec<kProducerRegisters>();
    GemmDenseSm90Producer<config> producer{p, shared};
    if (threadIdx.x == 0) producer.run();
    __syncwarp();
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    GemmDenseSm90Consumer<config> consumer{p, shared, warpgroup - 1, static_cast<int>(threadIdx.x) % 32,
                                           static_cast<int>(threadIdx.x) % 128 / 32};
    consumer.run();
  }
  // The other CTA may still multicast into this one's shared memory, or arrive at its mbarriers.
  if constexpr (config.cluster > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
}

}  // namespace tessera
