// The dQ warpgroup of attention/backward_sm90.cuh: dQ += dS K over all keys of the CTA, added to fp32 sums in global
// memory (tile/dq_sums.cuh), or written if these are all keys of the sequence.
#pragma once

#include "attention/backward_sm90_config.h"
#include "attention/backward_sm90_work.cuh"
#include "ptx/acquire_release.cuh"
#include "ptx/barrier.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/wgmma.cuh"
#include "tile/dq_sums.cuh"
#include "tile/pipeline.cuh"

namespace tessera {

template <AttentionBackwardSm90Config config>
struct BackwardSm90DqWarpgroup {
  static constexpr BackwardSm90Layout kAt = backward_sm90_layout(config);
  static constexpr int kChunks = config.dim_qk / 8;
  static constexpr int kTurnBarrier = 1;

  const AttentionBackwardSm90Params& p;
  unsigned shared;
  const BackwardSm90Work<config>& work;

  // Issues 64 queries by dq_columns from `first` on, over all keys of the CTA: both operands are transposed, because keys
  // are their rows.
  template <int first>
  __forceinline__ void issue_columns(float (&sums)[config.dq_columns / 2], unsigned ds_atom) {
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
  }

  // to: this lane's first sum of this warp's 16 queries. meanwhile(): called while the product is in flight.
  // before_adding(): called when dS has been read.
  template <int first, class Meanwhile, class BeforeAdding>
  __forceinline__ void add_columns(float (&sums)[config.dq_columns / 2], unsigned ds_atom, float* to,
                                   const Meanwhile& meanwhile, const BeforeAdding& before_adding) {
    issue_columns<first>(sums, ds_atom);
    meanwhile();
    wgmma_wait_group<0>();
    wgmma_fence_operand(sums);
    before_adding();
#pragma unroll
    for (int n = 0; n < config.dq_columns / 8 && first / 8 + n < kChunks; ++n) {
      add_to_sums(to + (first / 8 + n) * 128, reinterpret_cast<const float(&)[4]>(sums[n * 4]), 0);
    }
  }

  __forceinline__ void write_all() {
    static_assert(config.block_q == kConsumerRows && config.dq_columns == config.dim_qk);
    int head = work.first_head(p);
    int tiles_left = work.tiles.count;
    PipelineState<config.ds_stages> pipe;
    mbarrier_wait_parity(shared + kAt.k_full, 0);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      mbarrier_wait_parity(shared + kAt.ds_full + pipe.index * kMbarrierBytes, pipe.parity);
      const unsigned ds = shared + kAt.ds + pipe.index * kAt.ds_stage;
      const int row = (work.tiles.first + work.tiles.count - tiles_left) * config.block_q;
      float sums[config.dq_columns / 2];
      issue_columns<0>(sums, ds);
      wgmma_wait_group<0>();
      wgmma_fence_operand(sums);
      if (elect_one()) mbarrier_arrive(shared + kAt.ds_empty + pipe.index * kMbarrierBytes);
      // Addresses are computed after the product, which needs the registers.
      Bits16* const out = rows_of(p.dq, p.dq_strides, p.cu_seqlens_q, work.batch, recomputed(head)) +
                          recomputed(row) * p.dq_strides.seq;
      store_gradient<config.dtype, config.dim_qk>(sums, out, p.dq_strides.seq, work.len_q - row, p.scale,
                                                  read_thread() % kWarpgroup);
      pipe.advance();
      if (--tiles_left == 0) {  // continue with the next head
        tiles_left = work.tiles.count;
        ++head;
      }
    }
  }

  // dQ of the query tiles that see no key of the sequence. thread: of `threads`.
  static __forceinline__ void write_zeros(const AttentionBackwardSm90Params& p, const BackwardSm90Work<config>& work,
                                          int thread, int threads) {
    const int begin = work.tiles.first * config.block_q, end = begin + work.tiles.count * config.block_q;
#pragma unroll 1
    for (int head = 0; head < work.heads(p); ++head) {
      Bits16* const out = rows_of(p.dq, p.dq_strides, p.cu_seqlens_q, work.batch, work.first_head(p) + head);
#pragma unroll 1
      for (Index i = thread; i < static_cast<Index>(work.len_q) * kChunks; i += threads) {
        const Index row = i / kChunks;
        if (row >= begin && row < end) continue;
        store_16(out + row * p.dq_strides.seq + i % kChunks * 8, Words4{});
      }
    }
  }

  __forceinline__ void add_all(int lane, int warp) {
    constexpr int kAtoms = config.block_q / kConsumerRows;
    constexpr int kTile = config.block_q * config.dim_qk;
    float* to = dq_sums_of(p.dq_sums, p.cu_seqlens_q, work.batch, work.first_head(p), static_cast<int>(p.heads_q),
                           config.block_q, config.dim_qk) +
                static_cast<Index>(work.tiles.first) * kTile + warp * (kChunks * 128) + sum_index(lane, 0);
    // Deterministic: the counters of this step's query tile and of the previous one's.
    unsigned* turns = nullptr;
    unsigned* previous_turns = nullptr;
    if constexpr (config.deterministic) turns = p.dq_turns + (to - p.dq_sums.data) / kTile;
    int tiles_left = work.tiles.count;
    PipelineState<config.ds_stages> pipe;
    mbarrier_wait_parity(shared + kAt.k_full, 0);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      mbarrier_wait_parity(shared + kAt.ds_full + pipe.index * kMbarrierBytes, pipe.parity);
      // One warp ends the previous turn, which has to wait for the additions to be performed, and another waits for this
      // one, both while the first product runs.
      const auto take_turns = [&] {
        if constexpr (config.deterministic) {
          const unsigned turn = work.turn(p, work.tiles.first + work.tiles.count - tiles_left);
          if (warp == 0 && lane == 0 && previous_turns) increment_release(previous_turns);
          if (warp == 1 && lane == 0) {
            while (load_acquire(turns) != turn) {
            }
          }
          __syncwarp();
        }
      };
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        const unsigned ds = shared + kAt.ds + pipe.index * kAt.ds_stage + atom * (block_k_of(config) * kAtomRowBytes);
        const auto start_turn = [&] {
          if constexpr (config.deterministic) {
            if (atom == 0) named_barrier_sync(kTurnBarrier, kWarpgroup);
          }
        };
        const auto release = [&] {
          if (atom + 1 == kAtoms && lane == 0) mbarrier_arrive(shared + kAt.ds_empty + pipe.index * kMbarrierBytes);
        };
        const auto meanwhile = [&] {
          if (atom == 0) take_turns();
        };
        float sums[config.dq_columns / 2];
        if constexpr (config.dq_columns == config.dim_qk) {
          add_columns<0>(sums, ds, to, meanwhile, [&] {
            release();
            start_turn();
          });
        } else {
          add_columns<0>(sums, ds, to, meanwhile, start_turn);
          add_columns<config.dq_columns>(
              sums, ds, to, [] {}, release);
        }
        to += 4 * kChunks * 128;
      }
      if constexpr (config.deterministic) {
        named_barrier_sync(kTurnBarrier, kWarpgroup);
        previous_turns = turns++;
      }
      pipe.advance();
      if (--tiles_left == 0) {  // continue with the next head
        tiles_left = work.tiles.count;
        to += (p.dq_sums.rows - static_cast<Index>(tiles_left) * config.block_q) * config.dim_qk;
        if constexpr (config.deterministic) turns += p.dq_sums.rows / config.block_q - tiles_left;
      }
    }
    if constexpr (config.deterministic) {
      if (warp == 0 && lane == 0) increment_release(previous_turns);
    }
  }

  __forceinline__ void run(int lane, int warp) {
    if constexpr (config.writes_dq) {
      write_all();
    } else {
      add_all(lane, warp);
    }
  }
};

}  // namespace tessera
