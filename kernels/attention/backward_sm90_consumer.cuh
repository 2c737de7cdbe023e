// A consumer of attention/backward_sm90.cuh: a warpgroup that computes dK and dV of 64 keys.
#pragma once

#include "attention/backward_sm90_config.h"
#include "attention/backward_sm90_work.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/mask.h"
#include "tile/pipeline.cuh"
#include "tile/probability.cuh"
#include "tile/quad.cuh"
#include "tile/sequence.cuh"
#include "tile/shared_tile.cuh"

namespace tessera {

template <AttentionBackwardSm90Config config>
struct BackwardSm90Consumer {
  static constexpr DType kType = config.dtype;
  static constexpr BackwardSm90Layout kAt = backward_sm90_layout(config);
  static constexpr int kQueryTiles = config.block_q / 8;
  static constexpr int kQuerySteps = config.block_q / 16;
  static constexpr int kQkSteps = (config.dim_qk + 15) / 16;
  static constexpr int kVSteps = (config.dim_v + 15) / 16;

  using Scores = float[kQueryTiles * 4];     // [tile of 8 queries][value of a lane]
  using Operand = unsigned[kQuerySteps][4];  // the same, rounded, as wgmma's A operand

  const AttentionBackwardSm90Params& p;
  unsigned shared;
  int consumer;  // warp-uniform, and the compiler knows it
  // Lane values that are needed in every step; everything else about the lane is recomputed when needed.
  bool is_first;        // lane of its warp
  unsigned own_matrix;  // byte offset of its row and 16-byte chunk in step 0 of a tile of block_k rows (matrix_address)

  PipelineState<config.stages> pipe = {};
  PipelineState<config.ds_stages> ds_pipe = {};
  float dk[config.dim_qk / 2];  // [tile of 8 columns][value of a lane]
  float dv[config.dim_v / 2];
  unsigned kept_k[config.keeps_k ? kQkSteps : 1][4];
  unsigned kept_v[config.keeps_v ? kVSteps : 1][4];

  __forceinline__ void wait(int barriers, int index, unsigned parity) {
    mbarrier_wait_parity(shared + barriers + index * kMbarrierBytes, parity);
  }
  // One arrival per warp: a warp's reads by wgmma are complete when its own wait for the product returns.
  __forceinline__ void release(int barriers, int index) {
    if (is_first) mbarrier_arrive(shared + barriers + index * kMbarrierBytes);
  }
  __forceinline__ unsigned rows_at(int index) const { return shared + kAt.rows + index * kAt.rows_stage; }

  static __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane() / 4; }

  __forceinline__ BackwardSm90Consumer(const AttentionBackwardSm90Params& params, unsigned shared_memory, int number)
      : p(params), shared(shared_memory), consumer(number) {
    const int row = consumer * kConsumerRows + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane() % 16;
    is_first = lane() == 0;
    own_matrix = row * kAtomRowBytes + ((lane() / 16) ^ (lane() % 8)) * 16;
  }
  // Byte offset of this lane's LSE or delta within those of 16 queries (row_slot): lane % 4 * 16.
  __forceinline__ unsigned own_slot() const { return recomputed(own_matrix) / kAtomRowBytes % 4 * 16; }

  // The row address that this lane passes to ldmatrix or stmatrix for a 16 x 16 of this warp's keys, columns `step` of
  // a tile of block_k rows: the four 8 x 8 are in the order of wgmma's A operand. Chunks are swizzled by row.
  __forceinline__ unsigned matrix_address(unsigned tile, int step) const {
    return (tile + step / 4 * (block_k_of(config) * kAtomRowBytes) + own_matrix) ^ (step % 4 * 32);
  }

  template <int steps>
  __forceinline__ void keep(unsigned (&kept)[steps][4], unsigned tile) {
#pragma unroll
    for (int step = 0; step < steps; ++step) ldmatrix_x4(kept[step], matrix_address(tile, step));
  }

  // x = A B^T: A is this consumer's rows of K or V, B is the step's Q or dO.
  template <int dim, bool is_kept, int kept_steps>
  __forceinline__ void rows_by_rows(Scores& x, int a_tile, const unsigned (&kept)[kept_steps][4], unsigned b_tile) {
#pragma unroll
    for (int step = 0; step < (dim + 15) / 16; ++step) {
      const unsigned within = step % 4 * 32;
      const MatrixDescriptor b = matrix_descriptor<64>(b_tile + step / 4 * (config.block_q * kAtomRowBytes), 16);
      if constexpr (is_kept) {
        Wgmma<config.block_q>::template registers_shared<kType, false>(x, kept[step], b.at(within), step > 0);
      } else {
        const MatrixDescriptor a =
            matrix_descriptor<64>(shared + a_tile + step / 4 * (block_k_of(config) * kAtomRowBytes) +
                                      consumer * (kConsumerRows * kAtomRowBytes),
                                  16);
        Wgmma<config.block_q>::template shared_shared<kType, false>(x, a.at(within), b.at(within), step > 0);
      }
    }
    wgmma_commit_group();
  }
  __forceinline__ void issue_scores(Scores& x, const PipelineState<config.stages>& of) {
    wait(kAt.q_full, of.index, of.parity);
    wgmma_fence();
    rows_by_rows<config.dim_qk, config.keeps_k>(x, kAt.k, kept_k, shared + kAt.q + of.index * kAt.q_stage);
  }
  __forceinline__ void issue_dp(Scores& x, const PipelineState<config.stages>& of) {
    wait(kAt.d_o_full, of.index, of.parity);
    wgmma_fence();
    rows_by_rows<config.dim_v, config.keeps_v>(x, kAt.v, kept_v, shared + kAt.d_o + of.index * kAt.d_o_stage);
  }

  // sums += A B: A is the step's P^T or dS^T, B is its dO or Q, read transposed.
  template <int dim>
  __forceinline__ void add_by_columns(float (&sums)[dim / 2], const Operand& a, unsigned b_tile) {
    const MatrixDescriptor b = matrix_descriptor<64>(b_tile, config.block_q * kAtomRowBytes);
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      Wgmma<dim>::template registers_shared<kType, true>(sums, a[step], b.at(step * 16 * kAtomRowBytes), true);
    }
    wgmma_commit_group();
  }
  __forceinline__ void issue_dv(const Operand& weights, int index) {
    wgmma_fence();
    add_by_columns<config.dim_v>(dv, weights, shared + kAt.d_o + index * kAt.d_o_stage);
  }
  __forceinline__ void issue_dk(const Operand& gradients, int index) {
    wgmma_fence();
    add_by_columns<config.dim_qk>(dk, gradients, shared + kAt.q + index * kAt.q_stage);
  }

  // Sets scores to -inf if the query does not see the key. distance: from the position of the step's first query to
  // this consumer's first key. keys: the number of keys in the sequence from that one on.
  __forceinline__ void mask_scores(Scores& x, int distance, int keys) {
    const int first_key = recomputed(first_row());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + half * 8;
      // Queries that see this key, relative to this lane's first, so that every comparison is with a constant.
      Interval<int> queries = {0, config.block_q};
      if constexpr (config.masked) queries = p.band.positions_of(distance + key - recomputed(lane()) % 4 * 2);
      if (key >= keys) queries.end = queries.begin;
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int query = n * 8 + i;
          if (query >= queries.end || (config.masked && query < queries.begin)) x[n * 4 + half * 2 + i] = -infinity();
        }
      }
    }
  }

  // S^T to P^T.
  __forceinline__ void exponentiate(Scores& x, Operand& weights, unsigned rows) {
    const Words4 step = load_shared_16(rows + 2 * config.block_q * 4);
    const int distance = static_cast<int>(step.word[kStepDistance]) + consumer * kConsumerRows;
    const int keys = static_cast<int>(step.word[kStepKeys]) - consumer * kConsumerRows;
    bool masked = keys < kConsumerRows;
    if constexpr (config.masked) {  // positions count from the step's first query
      masked |= distance < p.band.keys_of(config.block_q - 1).begin || distance + kConsumerRows > p.band.keys_of(0).end;
    }
    if (masked) mask_scores(x, distance, keys);
    rows += own_slot();
    const float scale_log2 = p.scale * kLog2E;
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      const Words4 lse = load_shared_16(rows + step * 16 * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // registers of the operand: tile of 8 queries i / 2, row half i % 2
        const float* const pair = x + step * 8 + i * 2;
        weights[step][i] = pack<kType>(probability(pair[0], scale_log2, float_from_bits(lse.word[i / 2 * 2])),
                                       probability(pair[1], scale_log2, float_from_bits(lse.word[i / 2 * 2 + 1])));
      }
    }
  }

  // dP^T to dS^T, in registers, which may be those of the weights, and in shared memory.
  __forceinline__ void differentiate(const Scores& x, const Operand& weights, Operand& gradients, unsigned rows) {
    rows += config.block_q * 4 + own_slot();
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      const Words4 delta = load_shared_16(rows + step * 16 * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = x + step * 8 + i * 2;
        const unsigned weight = weights[step][i];
        gradients[step][i] =
            pack<kType>((pair[0] - float_from_bits(delta.word[i / 2 * 2])) * low_to_float<kType>(weight),
                        (pair[1] - float_from_bits(delta.word[i / 2 * 2 + 1])) * high_to_float<kType>(weight));
      }
    }
    wait(kAt.ds_empty, ds_pipe.index, ds_pipe.parity ^ 1);
    const unsigned tile = shared + kAt.ds + ds_pipe.index * kAt.ds_stage;
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) stmatrix_x4(matrix_address(tile, step), gradients[step]);
    fence_proxy_async();
    __syncwarp();
    release(kAt.ds_full, ds_pipe.index);
    ds_pipe.advance();
  }

  // S^T and dP^T share one accumulator, P^T and dS^T one operand. Q and dO of a step are released when the next S is
  // complete.
  __forceinline__ void main_loop(int steps) {
    Scores x;
    Operand operand;
    issue_scores(x, pipe);
    for (int step = 0;;) {
      wgmma_wait_group<0>();
      wgmma_fence_operand(x);
      if (step > 0) release(kAt.empty, pipe.previous_index());
      exponentiate(x, operand, rows_at(pipe.index));
      issue_dp(x, pipe);
      issue_dv(operand, pipe.index);
      wgmma_wait_group<0>();
      wgmma_fence_operand(x);
      differentiate(x, operand, operand, rows_at(pipe.index));
      issue_dk(operand, pipe.index);
      if (++step == steps) break;
      pipe.advance();
      issue_scores(x, pipe);
    }
  }

  // Two accumulators and two operands. At the top of the loop, P^T of a step is complete, and its dP is in flight
  // behind dK of the previous step. ptxas keeps products in flight across the loop's back edge only if somewhere in the
  // loop all products are waited for.
  __forceinline__ void overlapped_main_loop(int steps) {
    Scores s, dp;
    Operand weights, gradients;
    issue_scores(s, pipe);
    issue_dp(dp, pipe);
    wgmma_wait_group<1>();
    wgmma_fence_operand(s);
    exponentiate(s, weights, rows_at(pipe.index));
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      PipelineState<config.stages> next = pipe;
      next.advance();
      issue_dv(weights, pipe.index);
      issue_scores(s, next);
      wgmma_wait_group<0>();
      wgmma_fence_operand(s);
      wgmma_fence_operand(dp);
      if (step > 1) release(kAt.empty, pipe.previous_index());
      differentiate(dp, weights, gradients, rows_at(pipe.index));
      issue_dk(gradients, pipe.index);
      issue_dp(dp, next);
      exponentiate(s, weights, rows_at(next.index));
      pipe = next;
    }
    issue_dv(weights, pipe.index);
    wgmma_wait_group<0>();
    wgmma_fence_operand(dp);
    differentiate(dp, weights, gradients, rows_at(pipe.index));
    issue_dk(gradients, pipe.index);
  }

  // The lanes of a quad hold a row in pieces of two columns; they exchange them so that each lane has 16 bytes.
  template <int dim>
  __forceinline__ void store(const float (&sums)[dim / 2], Bits16* out, Index row_stride, int keys, float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row() + half * 8;
#pragma unroll
      for (int n = 0; n < dim / 8; n += 4) {
        unsigned words[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (n + j >= dim / 8) continue;
          const float* const pair = sums + (n + j) * 4 + half * 2;
          words[j] = pack<kType>(pair[0] * factor, pair[1] * factor);
        }
        transpose_quad(words, lane());
        if (row < keys && n + lane() % 4 < dim / 8) {
          store_16(out + row * row_stride + (n + lane() % 4) * 8, {words[0], words[1], words[2], words[3]});
        }
      }
    }
  }

  __forceinline__ void run(int steps) {
#pragma unroll
    for (int i = 0; i < config.dim_qk / 2; ++i) dk[i] = 0;
#pragma unroll
    for (int i = 0; i < config.dim_v / 2; ++i) dv[i] = 0;
    wgmma_fence_operand(dk);  // pins the zeroing here: the compiler must not move it to where products are in flight
    wgmma_fence_operand(dv);
    if (steps > 0) {
      wait(kAt.k_full, 0, 0);
      wait(kAt.v_full, 0, 0);
      if constexpr (config.keeps_k) keep(kept_k, shared + kAt.k);
      if constexpr (config.keeps_v) keep(kept_v, shared + kAt.v);
      if constexpr (config.overlaps) {
        overlapped_main_loop(steps);
      } else {
        main_loop(steps);
      }
      wgmma_wait_group<0>();
      wgmma_fence_operand(dk);
      wgmma_fence_operand(dv);
    }
    // Recomputed, because keeping it would take registers during the whole main loop.
    const BackwardSm90Work<config> work(p, recomputed(blockIdx.x));
    const Index row = work.first_k + consumer * kConsumerRows;
    const int keys = work.len_k - work.first_k - consumer * kConsumerRows;
    store<config.dim_qk>(dk,
                         rows_of(p.dk, p.dk_strides, p.cu_seqlens_k, work.batch, work.kv_head) + row * p.dk_strides.seq,
                         p.dk_strides.seq, keys, p.scale);
    store<config.dim_v>(dv,
                        rows_of(p.dv, p.dv_strides, p.cu_seqlens_k, work.batch, work.kv_head) + row * p.dv_strides.seq,
                        p.dv_strides.seq, keys, 1.0f);
  }
};

}  // namespace tessera
