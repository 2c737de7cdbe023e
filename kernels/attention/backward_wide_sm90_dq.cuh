// The dQ warpgroup of attention/backward_wide_sm90.cuh: dQ = dS K over the keys of the CTA, added to fp32 sums in global
// memory (tile/dq_sums.cuh).
#pragma once

#include "attention/backward_wide_sm90_config.h"
#include "attention/backward_wide_sm90_work.cuh"
#include "ptx/acquire_release.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/dq_sums.cuh"
#include "tile/pipeline.cuh"

namespace tessera {

template <AttentionBackwardWideSm90Config config>
struct BackwardWideSm90DqWarpgroup {
  static constexpr BackwardWideSm90Layout kAt = backward_wide_sm90_layout(config);
  static constexpr int kTile = kBackwardWideTile;
  static constexpr int kChunks = config.dim_qk / 8;
  static constexpr int kKeySteps = kTile / 16;
  static constexpr int kKeptSteps = config.kept_ds_steps > 0 ? config.kept_ds_steps : 1;
  static constexpr bool kKeepsAll = config.kept_ds_steps == kKeySteps;
  static constexpr int kTurnBarrier = 1;

  const AttentionBackwardWideSm90Params& p;
  unsigned shared;
  const BackwardWideSm90Work<config>& work;

  // dS of this warp's 16 queries, as wgmma's A operand. In shared memory its rows are keys, so each 8 x 8 is transposed:
  // matrix 1 of the operand is queries 8 to 15, matrix 2 is keys 8 to 15.
  __forceinline__ void keep_ds(unsigned (&kept)[kKeptSteps][4], unsigned tile, int lane, int warp) {
    const int key = lane % 8 + lane / 16 * 8;
    const int chunk = warp * 2 + lane / 8 % 2;
    const unsigned from = tile + key * kAtomRowBytes + ((chunk ^ (key % 8)) * 16);
#pragma unroll
    for (int step = 0; step < kKeptSteps; ++step) ldmatrix_x4_trans(kept[step], from + step * 16 * kAtomRowBytes);
  }

  // dq_columns columns of dQ from `first` on, of which the last may be padding. Keys are the rows of both operands, which
  // are read transposed. to: this lane's first sum of this warp's 16 queries. take_turns(): called while the first
  // product is in flight. release(): called when dS has been read.
  template <int first, class TakeTurns, class Release>
  __forceinline__ void add_columns(float (&sums)[config.dq_columns / 2], unsigned ds_tile,
                                   const unsigned (&kept)[kKeptSteps][4], float* to, const TakeTurns& take_turns,
                                   const Release& release) {
    constexpr bool kLast = first + config.dq_columns >= config.dim_qk;
    const MatrixDescriptor ds = matrix_descriptor<64>(ds_tile, 16);
    const MatrixDescriptor k = matrix_descriptor<64>(shared + kAt.k + first * kTile * 2, kTile * kAtomRowBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      const unsigned rows = step * 16 * kAtomRowBytes;
      if (step < config.kept_ds_steps) {
        Wgmma<config.dq_columns>::template registers_shared<config.dtype, true>(
            sums, kept[step < kKeptSteps ? step : 0], k.at(rows), step > 0);
      } else {
        Wgmma<config.dq_columns>::template shared_shared<config.dtype, true, true>(sums, ds.at(rows), k.at(rows),
                                                                                   step > 0);
      }
    }
    wgmma_commit_group();
    if constexpr (first == 0) take_turns();
    wgmma_wait_group<0>();
    wgmma_fence_operand(sums);
    if constexpr (kLast && !kKeepsAll) release();
    if constexpr (config.deterministic && first == 0) named_barrier_sync(kTurnBarrier, kWarpgroup);
#pragma unroll
    for (int n = 0; n < config.dq_columns / 8 && first / 8 + n < kChunks; ++n) {
      add_to_sums(to + (first / 8 + n) * 128, reinterpret_cast<const float(&)[4]>(sums[n * 4]), 0);
    }
    if constexpr (!kLast) add_columns<first + config.dq_columns>(sums, ds_tile, kept, to, take_turns, release);
  }

  __forceinline__ void run(int lane, int warp) {
    float* to = dq_sums_of(p.dq_sums, p.cu_seqlens_q, work.batch, work.first_head(p), static_cast<int>(p.heads_q),
                           kTile, config.dim_qk) +
                static_cast<Index>(work.tiles.first) * (kTile * config.dim_qk) + warp * (kChunks * 128) +
                sum_index(lane, 0);
    // Deterministic: the counters of this step's query tile and of the previous one's.
    unsigned* turns = nullptr;
    unsigned* previous_turns = nullptr;
    if constexpr (config.deterministic) turns = p.dq_turns + (to - p.dq_sums.data) / (kTile * config.dim_qk);
    int tiles_left = work.tiles.count;
    PipelineState<config.ds_stages> pipe;
    mbarrier_wait_parity(shared + kAt.k_full, 0);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      mbarrier_wait_parity(shared + kAt.ds_full + pipe.index * kMbarrierBytes, pipe.parity);
      const unsigned tile = shared + kAt.ds + pipe.index * kAt.ds_stage;
      const auto release = [&] {
        if (lane == 0) mbarrier_arrive(shared + kAt.ds_empty + pipe.index * kMbarrierBytes);
      };
      unsigned kept[kKeptSteps][4];
      if constexpr (config.kept_ds_steps > 0) keep_ds(kept, tile, lane, warp);
      if constexpr (kKeepsAll) {
        __syncwarp();
        release();
      }
      // One warp ends the previous turn, which has to wait for the additions to be performed, and another waits for this
      // one.
      const auto take_turns = [&] {
        if constexpr (config.deterministic) {
          if (warp == 0 && lane == 0 && previous_turns) increment_release(previous_turns);
          if (warp == 1 && lane == 0) {
            const unsigned turn = work.turn(p, work.tiles.first + work.tiles.count - tiles_left);
            while (load_acquire(turns) != turn) {
            }
          }
          __syncwarp();
        }
      };
      float sums[config.dq_columns / 2];
      add_columns<0>(sums, tile, kept, to, take_turns, release);
      if constexpr (config.deterministic) {
        named_barrier_sync(kTurnBarrier, kWarpgroup);
        previous_turns = turns++;
      }
      to += kTile * config.dim_qk;
      pipe.advance();
      if (--tiles_left == 0) {  // continue with the next head
        tiles_left = work.tiles.count;
        to += (p.dq_sums.rows - static_cast<Index>(tiles_left) * kTile) * config.dim_qk;
        if constexpr (config.deterministic) turns += p.dq_sums.rows / kTile - tiles_left;
      }
    }
    if constexpr (config.deterministic) {
      if (warp == 0 && lane == 0) increment_release(previous_turns);
    }
  }
};

}  // namespace tessera
