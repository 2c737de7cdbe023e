// The dQ warpgroup of attention/backward_sm90.cuh: dQ += dS K over all keys of the CTA, added to fp32 sums in global
// memory (tile/dq_sums.cuh).
#pragma once

#include "attention/backward_sm90_config.h"
#include "attention/backward_sm90_work.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "tile/dq_sums.cuh"
#include "tile/pipeline.cuh"

namespace tessera {

template <AttentionBackwardSm90Config config>
struct BackwardSm90DqWarpgroup {
  static constexpr BackwardSm90Layout kAt = backward_sm90_layout(config);
  static constexpr int kChunks = config.dim_qk / 8;

  const AttentionBackwardSm90Params& p;
  unsigned shared;
  const BackwardSm90Work<config>& work;

  // 64 queries by dq_columns from `first` on, over all keys of the CTA: both operands are transposed, because keys are
  // their rows. to: this lane's first sum of this warp's 16 queries. release(): called when dS has been read.
  template <int first, class Release>
  __forceinline__ void add_columns(float (&sums)[config.dq_columns / 2], unsigned ds_atom, float* to,
                                   const Release& release) {
    const MatrixDescriptor ds = matrix_descriptor<64>(ds_atom, 16);
    const MatrixDescriptor k =
        matrix_descriptor<64>(shared + kAt.k + first * block_k_of(config) * 2, block_k_of(config) * kAtomRowBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < block_k_of(config) / 16; ++step) {
      Wgmma<config.dq_columns>::template shared_shared<config.dtype, true, true>(
          sums, ds.at(step * 16 * kAtomRowBytes), k.at(step * 16 * kAtomRowBytes), step > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_fence_operand(sums);
    release();
#pragma unroll
    for (int n = 0; n < config.dq_columns / 8 && first / 8 + n < kChunks; ++n) {
      add_to_sums(to + (first / 8 + n) * 128, reinterpret_cast<const float(&)[4]>(sums[n * 4]), 0);
    }
  }

  __forceinline__ void run(int lane, int warp) {
    constexpr int kAtoms = config.block_q / kConsumerRows;
    constexpr int kTile = config.block_q * config.dim_qk;
    float* to = dq_sums_of(p.dq_sums, p.cu_seqlens_q, work.batch, work.kv_head * static_cast<int>(p.group),
                           static_cast<int>(p.heads_q), config.block_q, config.dim_qk) +
                static_cast<Index>(work.tiles.first) * kTile + warp * (kChunks * 128) + sum_index(lane, 0);
    int tiles_left = work.tiles.count;
    PipelineState<config.ds_stages> pipe;
    mbarrier_wait_parity(shared + kAt.k_full, 0);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      mbarrier_wait_parity(shared + kAt.ds_full + pipe.index * kMbarrierBytes, pipe.parity);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        const unsigned ds = shared + kAt.ds + pipe.index * kAt.ds_stage + atom * (block_k_of(config) * kAtomRowBytes);
        const auto release = [&] {
          if (atom + 1 == kAtoms && lane == 0) mbarrier_arrive(shared + kAt.ds_empty + pipe.index * kMbarrierBytes);
        };
        float sums[config.dq_columns / 2];
        if constexpr (config.dq_columns == config.dim_qk) {
          add_columns<0>(sums, ds, to, release);
        } else {
          add_columns<0>(sums, ds, to, [] {});
          add_columns<config.dq_columns>(sums, ds, to, release);
        }
        to += 4 * kChunks * 128;
      }
      pipe.advance();
      if (--tiles_left == 0) {  // continue with the next head
        tiles_left = work.tiles.count;
        to += (p.dq_sums.rows - static_cast<Index>(tiles_left) * config.block_q) * config.dim_qk;
      }
    }
  }
};

}  // namespace tessera
