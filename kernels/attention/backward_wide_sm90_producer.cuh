// The producer of attention/backward_wide_sm90.cuh: one thread issues the TMA loads, one warp loads LSE and delta.
#pragma once

#include "attention/backward_wide_sm90_config.h"
#include "attention/backward_wide_sm90_work.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"
#include "tile/sequence.cuh"

namespace tessera {

template <AttentionBackwardWideSm90Config config>
struct BackwardWideSm90Producer {
  static constexpr BackwardWideSm90Layout kAt = backward_wide_sm90_layout(config);
  static constexpr int kTile = kBackwardWideTile;

  const AttentionBackwardWideSm90Params& p;
  unsigned shared;
  const BackwardWideSm90Work<config>& work;

  // All swizzle atoms of 64 rows from `row` on.
  template <int dim>
  __forceinline__ void load(unsigned destination, const TensorMap& map, unsigned full, int row, int head,
                            const RowOrigin& origin) {
    mbarrier_arrive_expect_tx(full, kTile * padded_dim(dim, kWidestAtom) * 2);
#pragma unroll
    for (int column = 0; column < dim; column += kWidestAtom) {
      tma_load(destination + column * kTile * 2, map, full, column, origin.y + row, head, origin.z);
    }
  }
  // The same of a step's Q (turn 0) or dO (turn 1). The CTAs of a cluster load every other atom for both.
  template <int dim>
  __forceinline__ void load_step(unsigned destination, const TensorMap& map, unsigned full, int row, int head,
                                 const RowOrigin& origin, unsigned turn) {
    if constexpr (config.cluster == 1) {
      load<dim>(destination, map, full, row, head, origin);
    } else {
      mbarrier_arrive_expect_tx(full, kTile * padded_dim(dim, kWidestAtom) * 2);
      constexpr unsigned short kAll = (1 << config.cluster) - 1;
#pragma unroll
      for (int column = 0; column < dim; column += kWidestAtom) {
        if ((column / kWidestAtom + turn) % config.cluster == blockIdx.x % config.cluster) {
          tma_load_multicast(destination + column * kTile * 2, map, full, kAll, column, origin.y + row, head, origin.z);
        }
      }
    }
  }
  template <int stages>
  __forceinline__ void acquire(int empty, const PipelineState<stages>& pipe) {
    mbarrier_wait_parity(shared + empty + pipe.index * kMbarrierBytes, pipe.parity ^ 1);
  }

  // ALiBi's slope of a head, with the step's rows.
  __forceinline__ void store_slope(int index, int head) {
    if constexpr (config.score_mod) {
      const float slope = p.alibi_slopes ? p.alibi_slopes[work.batch * p.alibi_batch_stride + head] : 0.0f;
      store_shared_4(shared + kAt.rows + index * kAt.rows_stage + (2 * kTile + kWideStepSlope) * 4,
                     bits_from_float(slope));
      mbarrier_arrive(shared + kAt.q_full + index * kMbarrierBytes);
    }
  }

  // Runs on one thread.
  __forceinline__ void load_tiles() {
    const RowOrigin q_origin = row_origin(p.cu_seqlens_q, work.batch, p.seq_q, work.len_q);
    const RowOrigin k_origin = row_origin(p.cu_seqlens_k, work.batch, p.seq_k, work.len_k);
    int head = work.first_head(p);
    int row = work.tiles.first * kTile;
    int tiles_left = work.tiles.count;
    PipelineState<config.q_stages> q_pipe;
    PipelineState<config.d_o_stages> d_o_pipe;
    load<config.dim_qk>(shared + kAt.k, p.k, shared + kAt.k_full, work.first_k, work.kv_head, k_origin);
    if constexpr (config.cluster > 1) {
      const int rank = static_cast<int>(blockIdx.x % config.cluster);
      const int other = rank == 0 ? work.first_k + kTile : work.first_k - kTile;
      const int column = first_dq_atom(config, rank) * kWidestAtom;
      mbarrier_arrive_expect_tx(shared + kAt.k_full, kTile * 2 * kWidestAtom * 2);
#pragma unroll
      for (int atom = 0; atom < 2; ++atom) {
        tma_load(shared + kAt.other_k + atom * (kTile * kAtomRowBytes), p.k, shared + kAt.k_full,
                 column + atom * kWidestAtom, k_origin.y + other, work.kv_head, k_origin.z);
      }
    }
    const auto load_v = [&] {
      load<config.dim_v>(shared + kAt.v, p.v, shared + kAt.v_full, work.first_k, work.kv_head, k_origin);
    };
    // With slopes or a cluster, there are no registers to do it later.
    constexpr bool kVFirst = config.score_mod || config.cluster > 1;
    if constexpr (kVFirst) load_v();
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      acquire(kAt.q_empty, q_pipe);
      store_slope(q_pipe.index, head);
      load_step<config.dim_qk>(shared + kAt.q + q_pipe.index * kAt.q_stage, p.q,
                               shared + kAt.q_full + q_pipe.index * kMbarrierBytes, row, head, q_origin, 0);
      q_pipe.advance();
      if (!kVFirst && step == 0) load_v();
      acquire(kAt.d_o_empty, d_o_pipe);
      load_step<config.dim_v>(shared + kAt.d_o + d_o_pipe.index * kAt.d_o_stage, p.d_o,
                              shared + kAt.d_o_full + d_o_pipe.index * kMbarrierBytes, row, head, q_origin, 1);
      d_o_pipe.advance();
      row += kTile;
      if (--tiles_left == 0) {  // continue with the next head
        tiles_left = work.tiles.count;
        row -= tiles_left * kTile;
        ++head;
      }
    }
  }

  // Runs on one warp. It issues the loads of the values before it waits for their stage.
  __forceinline__ void load_rows(int lane) {
    constexpr int kPasses = kTile / 32;
    const int first = work.tiles.first * kTile + lane;
    Index row = offset_of(p.row_strides, p.cu_seqlens_q, work.batch, work.first_head(p)) + first;
    int rows_left = work.len_q - first;
    int distance = work.first_k - work.position_offset - work.tiles.first * kTile;
    int tiles_left = work.tiles.count;
    PipelineState<config.q_stages> pipe;
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      float lse[kPasses], delta[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        lse[pass] = load_read_only(p.lse_log2 + row + pass * 32, pass * 32 < rows_left);
        delta[pass] = load_read_only(p.delta + row + pass * 32, pass * 32 < rows_left);
        if (pass * 32 >= rows_left) lse[pass] = infinity();
      }
      acquire(kAt.q_empty, pipe);
      const unsigned rows = shared + kAt.rows + pipe.index * kAt.rows_stage;
      const unsigned own = rows + wide_row_slot(lane) * 4;  // 32 queries further, the slots are 32 further
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        store_shared_4(own + pass * 32 * 4, bits_from_float(lse[pass]));
        store_shared_4(own + (kTile + pass * 32) * 4, bits_from_float(delta[pass]));
      }
      if (lane == 0) {
        store_shared_4(rows + (2 * kTile + kWideStepDistance) * 4, distance);
        store_shared_4(rows + (2 * kTile + kWideStepKeys) * 4, work.len_k - work.first_k);
      }
      mbarrier_arrive(shared + kAt.q_full + pipe.index * kMbarrierBytes);
      pipe.advance();
      row += kTile;
      rows_left -= kTile;
      distance -= kTile;
      if (--tiles_left == 0) {  // continue with the next head
        tiles_left = work.tiles.count;
        const int all = work.tiles.count * kTile;
        row += p.row_strides.head - all;
        rows_left += all;
        distance += all;
      }
    }
  }
};

}  // namespace tessera
