// The producer of attention/backward_sm90.cuh: one thread issues the TMA loads, one warp loads LSE and delta.
#pragma once

#include "attention/backward_sm90_config.h"
#include "attention/backward_sm90_work.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"
#include "tile/sequence.cuh"

namespace tessera {

template <AttentionBackwardSm90Config config>
struct BackwardSm90Producer {
  static constexpr BackwardSm90Layout kAt = backward_sm90_layout(config);
  static constexpr int kStepsCounted = 8;  // in_step: added to the counter this many at once, before they run

  const AttentionBackwardSm90Params& p;
  unsigned shared;
  const BackwardSm90Work<config>& work;

  // All swizzle atoms of `rows` rows from `row` on.
  template <int rows, int dim>
  __forceinline__ void load(unsigned destination, const TensorMap& map, unsigned full, int row, int head,
                            const RowOrigin& origin) {
    mbarrier_arrive_expect_tx(full, rows * padded_dim(dim, kWidestAtom) * 2);
#pragma unroll
    for (int column = 0; column < dim; column += kWidestAtom) {
      tma_load(destination + column * rows * 2, map, full, column, origin.y + row, head, origin.z);
    }
  }
  __forceinline__ void acquire(const PipelineState<config.stages>& pipe) {
    mbarrier_wait_parity(shared + kAt.empty + pipe.index * kMbarrierBytes, pipe.parity ^ 1);
  }

  // ALiBi's slope of a head, with the step's rows.
  __forceinline__ void store_slope(int index, int head) {
    if constexpr (config.score_mod) {
      const float slope = p.alibi_slopes ? p.alibi_slopes[work.batch * p.alibi_batch_stride + head] : 0.0f;
      store_shared_4(shared + kAt.rows + index * kAt.rows_stage + (2 * config.block_q + kStepSlope) * 4,
                     bits_from_float(slope));
      mbarrier_arrive(shared + kAt.q_full + index * kMbarrierBytes);
    }
  }

  // Runs on one thread.
  __forceinline__ void load_tiles() {
    const RowOrigin q_origin = row_origin(p.cu_seqlens_q, work.batch, p.seq_q, work.len_q);
    const RowOrigin k_origin = row_origin(p.cu_seqlens_k, work.batch, p.seq_k, work.len_k);
    int head = work.first_head(p);
    int row = (work.tiles.first + work.start) * config.block_q;
    int tiles_left = work.tiles.count - work.start;
    PipelineState<config.stages> pipe;
    load<block_k_of(config), config.dim_qk>(shared + kAt.k, p.k, shared + kAt.k_full, work.first_k, work.kv_head,
                                            k_origin);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      acquire(pipe);
      if constexpr (config.in_step) {
        if (step % kStepsCounted == 0) add_relaxed(p.progress, min(kStepsCounted, work.steps - step));
      }
      store_slope(pipe.index, head);
      load<config.block_q, config.dim_qk>(shared + kAt.q + pipe.index * kAt.q_stage, p.q,
                                          shared + kAt.q_full + pipe.index * kMbarrierBytes, row, head, q_origin);
      if (step == 0) {
        load<block_k_of(config), config.dim_v>(shared + kAt.v, p.v, shared + kAt.v_full, work.first_k, work.kv_head,
                                               k_origin);
      }
      load<config.block_q, config.dim_v>(shared + kAt.d_o + pipe.index * kAt.d_o_stage, p.d_o,
                                         shared + kAt.d_o_full + pipe.index * kMbarrierBytes, row, head, q_origin);
      pipe.advance();
      row += config.block_q;
      if (--tiles_left == 0) {
        tiles_left = work.tiles.count;
        row -= tiles_left * config.block_q;
        if (!config.in_step) ++head;
      }
    }
  }

  // Runs on one warp. It issues the loads of the values before it waits for their stage.
  __forceinline__ void load_rows(int lane) {
    constexpr int kPasses = config.block_q / 32;
    const int first = (work.tiles.first + work.start) * config.block_q + lane;
    Index row = offset_of(p.row_strides, p.cu_seqlens_q, work.batch, work.first_head(p)) + first;
    int rows_left = work.len_q - first;
    int distance = work.first_k - work.position_offset - (first - lane);
    int tiles_left = work.tiles.count - work.start;
    PipelineState<config.stages> pipe;
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      float lse[kPasses], delta[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        lse[pass] = load_read_only(p.lse_log2 + row + pass * 32, pass * 32 < rows_left);
        delta[pass] = load_read_only(p.delta + row + pass * 32, pass * 32 < rows_left);
        if (pass * 32 >= rows_left) lse[pass] = infinity();
      }
      acquire(pipe);
      const unsigned rows = shared + kAt.rows + pipe.index * kAt.rows_stage;
      const unsigned own = rows + row_slot(lane) * 4;  // 32 queries further, the slots are 32 further
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        store_shared_4(own + pass * 32 * 4, bits_from_float(lse[pass]));
        store_shared_4(own + (config.block_q + pass * 32) * 4, bits_from_float(delta[pass]));
      }
      if (lane == 0) {
        store_shared_4(rows + (2 * config.block_q + kStepDistance) * 4, distance);
        store_shared_4(rows + (2 * config.block_q + kStepKeys) * 4, work.len_k - work.first_k);
      }
      mbarrier_arrive(shared + kAt.q_full + pipe.index * kMbarrierBytes);
      pipe.advance();
      row += config.block_q;
      rows_left -= config.block_q;
      distance -= config.block_q;
      if (--tiles_left == 0) {  // next head; if in_step, the tiles before the first
        tiles_left = work.tiles.count;
        const int all = work.tiles.count * config.block_q;
        row += (config.in_step ? 0 : p.row_strides.head) - all;
        rows_left += all;
        distance += all;
      }
    }
  }
};

}  // namespace tessera
