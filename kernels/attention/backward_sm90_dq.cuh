// The dQ warpgroup of attention/backward_sm90.cuh: dQ += dS K over all keys of the CTA, added to fp32 sums in global
// memory (tile/dq_sums.cuh), or written if these are all keys of the sequence. In the deterministic mode key tiles take
// turns at a query tile (attention/backward_turns.h): the first one stores its sums, so that nobody has to zero them, and
// the last one starts its product from them and writes dQ.
#pragma once

#include "attention/backward_ds.cuh"
#include "attention/backward_sm90_config.h"
#include "attention/backward_sm90_work.cuh"
#include "attention/backward_turns.cuh"
#include "ptx/acquire_release.cuh"
#include "ptx/barrier.cuh"
#include "ptx/elect.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/dq_sums.cuh"
#include "tile/pipeline.cuh"

namespace tessera {

template <AttentionBackwardSm90Config config>
struct BackwardSm90DqWarpgroup {
  static constexpr BackwardSm90Layout kAt = backward_sm90_layout(config);
  static constexpr int kChunks = config.dim_qk / 8;

  using Kept = unsigned[config.kept_ds_steps > 0 ? config.kept_ds_steps : 1][4];

  const AttentionBackwardSm90Params& p;
  unsigned shared;
  const BackwardSm90Work<config>& work;

  // Issues 64 queries by dq_columns from `first` on, over all keys of the CTA: both operands are transposed, because keys
  // are their rows. adds: to `sums`.
  template <int first>
  __forceinline__ void issue_columns(float (&sums)[config.dq_columns / 2], unsigned ds_atom, const Kept& kept,
                                     bool adds = false) {
    const MatrixDescriptor ds = matrix_descriptor<64>(ds_atom, 16);
    const MatrixDescriptor k =
        matrix_descriptor<64>(shared + kAt.k + first * block_k_of(config) * 2, block_k_of(config) * kAtomRowBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < block_k_of(config) / 16; ++step) {
      const auto keys = k.at(step * 16 * kAtomRowBytes);
      if (step < config.kept_ds_steps) {
        Wgmma<config.dq_columns>::template registers_shared<config.dtype, true>(
            sums, kept[step < config.kept_ds_steps ? step : 0], keys, adds || step > 0);
      } else {
        Wgmma<config.dq_columns>::template shared_shared<config.dtype, true, true>(
            sums, ds.at(step * 16 * kAtomRowBytes), keys, adds || step > 0);
      }
    }
    wgmma_commit_group();
  }

  // to: this lane's first sum of this warp's 16 queries. before_adding(): called when dS has been read.
  template <int first, class BeforeAdding>
  __forceinline__ void add_columns(float (&sums)[config.dq_columns / 2], unsigned ds_atom, const Kept& kept, float* to,
                                   const BeforeAdding& before_adding) {
    issue_columns<first>(sums, ds_atom, kept);
    wgmma_wait_group<0>();
    wgmma_fence_operand(sums);
    before_adding();
#pragma unroll
    for (int n = 0; n < config.dq_columns / 8 && first / 8 + n < kChunks; ++n) {
      add_to_sums(to + (first / 8 + n) * 128, reinterpret_cast<const float(&)[4]>(sums[n * 4]), 0);
    }
  }

  __forceinline__ void write_all() {
    static_assert(config.block_q == kConsumerRows && config.dq_columns == config.dim_qk && config.kept_ds_steps == 0);
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
      issue_columns<0>(sums, ds, {});
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

  __forceinline__ void add_all(int lane, int warp) {
    constexpr int kAtoms = config.block_q / kConsumerRows;
    constexpr int kTile = config.block_q * config.dim_qk;
    float* to = dq_sums_of(p.dq_sums, p.cu_seqlens_q, work.batch, work.first_head(p), static_cast<int>(p.heads_q),
                           config.block_q, config.dim_qk) +
                static_cast<Index>(work.tiles.first + work.start) * kTile + warp * (kChunks * 128) + sum_index(lane, 0);
    int tiles_left = work.tiles.count - work.start;
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
        Kept kept;
        if constexpr (config.kept_ds_steps > 0) keep_ds(kept, ds, lane, warp);
        if constexpr (config.dq_columns == config.dim_qk) {
          add_columns<0>(sums, ds, kept, to, release);
        } else {
          add_columns<0>(sums, ds, kept, to, [] {});
          add_columns<config.dq_columns>(sums, ds, kept, to, release);
        }
        to += 4 * kChunks * 128;
      }
      pipe.advance();
      if (--tiles_left == 0) {  // next head; if in_step, the tiles before the first
        tiles_left = work.tiles.count;
        const Index next_head = config.in_step ? 0 : p.dq_sums.rows;
        to += (next_head - static_cast<Index>(tiles_left) * config.block_q) * config.dim_qk;
      }
    }
  }

  static constexpr int kTile = config.block_q * config.dim_qk;

  // The sums of a head's query tile 0.
  __forceinline__ float* sums_of(int head) const {
    return dq_sums_of(p.dq_sums, p.cu_seqlens_q, work.batch, head, static_cast<int>(p.heads_q), config.block_q,
                      config.dim_qk);
  }
  // The counter of the first step's query tile, and how far those of a head are from the next one's.
  __forceinline__ unsigned* first_turns() const {
    return p.dq_turns + (sums_of(work.first_head(p)) - p.dq_sums.data) / kTile + work.tiles.first;
  }
  __forceinline__ int heads_apart() const { return static_cast<int>(p.dq_sums.rows / config.block_q); }

  // The columns from `first` on of query tile `tile`. to: this lane's first sum of this warp's 16 queries.
  template <int first>
  __forceinline__ void take_turn(unsigned ds_atom, unsigned ds_empty, const Kept& kept, float* to, int head, int tile,
                                 const TurnEnds& turn, int step) {
    constexpr int kColumns = config.dim_qk - first < config.dq_columns ? config.dim_qk - first : config.dq_columns;
    const bool completes = turn.last && !turn.first;
    float sums[config.dq_columns / 2];
    if (completes) {
      if constexpr (first == 0) TurnBarriers{shared + kAt.turns}.take(step);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        load_coherent(reinterpret_cast<float(&)[4]>(sums[n * 4]), to + (first / 8 + n) * 128);
      }
    }
    issue_columns<first>(sums, ds_atom, kept, completes);
    wgmma_wait_group<0>();
    wgmma_fence_operand(sums);
    if (first + kColumns == config.dim_qk && read_thread() % 32 == 0) mbarrier_arrive(ds_empty);
    if (!completes && first == 0) TurnBarriers{shared + kAt.turns}.take(step);
    if (turn.last) {
      // From shared memory: there are no registers to compute it.
      const int thread = read_thread() % kWarpgroup;
      const unsigned at = shared + kAt.dq_rows + thread / 32 * 8;
      const auto rows = load_shared_4(at) | static_cast<unsigned long long>(load_shared_4(at + 4)) << 32;
      Bits16* const out = reinterpret_cast<Bits16*>(rows) + recomputed(head) * p.dq_strides.head +
                          static_cast<Index>(recomputed(tile) * config.block_q) * p.dq_strides.seq + first;
      store_gradient<config.dtype, kColumns>(sums, out, p.dq_strides.seq, work.len_q - tile * config.block_q, p.scale,
                                             thread);
      return;
    }
    const auto values = [&](int n) -> const float(&)[4] { return reinterpret_cast<const float(&)[4]>(sums[n * 4]); };
    if (turn.first) {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) store_sums(to + (first / 8 + n) * 128, values(n));
    } else {
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) add_to_sums(to + (first / 8 + n) * 128, values(n), 0);
    }
  }

  __forceinline__ void add_in_turns(int lane, int warp) {
    static_assert(config.block_q == kConsumerRows);
    const auto rows = reinterpret_cast<unsigned long long>(rows_of(p.dq, p.dq_strides, p.cu_seqlens_q, work.batch, 0));
    store_shared_8(shared + kAt.dq_rows + warp * 8, {static_cast<unsigned>(rows), static_cast<unsigned>(rows >> 32)});
    int head = work.first_head(p);
    float* to =
        sums_of(head) + static_cast<Index>(work.tiles.first) * kTile + warp * (kChunks * 128) + sum_index(lane, 0);
    int tiles_left = work.tiles.count;
    PipelineState<config.ds_stages> pipe;
    mbarrier_wait_parity(shared + kAt.k_full, 0);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      mbarrier_wait_parity(shared + kAt.ds_full + pipe.index * kMbarrierBytes, pipe.parity);
      const unsigned ds = shared + kAt.ds + pipe.index * kAt.ds_stage;
      const unsigned ds_empty = shared + kAt.ds_empty + pipe.index * kMbarrierBytes;
      const int tile = work.tiles.first + work.tiles.count - tiles_left;
      const TurnEnds turn = work.turn_ends(p, tile);
      Kept kept;
      if constexpr (config.kept_ds_steps > 0) keep_ds(kept, ds, lane, warp);
      take_turn<0>(ds, ds_empty, kept, to, head, tile, turn, step);
      if constexpr (config.dq_columns < config.dim_qk) {
        take_turn<config.dq_columns>(ds, ds_empty, kept, to, head, tile, turn, step);
      }
      __syncwarp();
      if (elect_one()) TurnBarriers{shared + kAt.turns}.leave(step);
      to += kTile;
      pipe.advance();
      if (--tiles_left == 0) {  // continue with the next head
        tiles_left = work.tiles.count;
        to += (p.dq_sums.rows - static_cast<Index>(tiles_left) * config.block_q) * config.dim_qk;
        ++head;
      }
    }
  }

  // On threads of the producer.
  __forceinline__ void await_all_turns() const {
    await_turns(TurnBarriers{shared + kAt.turns}, first_turns(), work.steps, work.tiles.count, heads_apart(),
                [&](int tile) { return work.turn(p, work.tiles.first + tile); });
  }
  __forceinline__ void end_all_turns() const {
    end_turns(TurnBarriers{shared + kAt.turns}, first_turns(), work.steps, work.tiles.count, heads_apart());
  }

  __forceinline__ void run(int lane, int warp) {
    if constexpr (config.writes_dq) {
      write_all();
    } else if constexpr (config.deterministic) {
      add_in_turns(lane, warp);
    } else {
      add_all(lane, warp);
    }
  }
};

}  // namespace tessera
