// A consumer of attention/backward_sm90.cuh: a warpgroup that computes dK and dV of 64 keys.
#pragma once

#include "attention/backward_score_mod.cuh"
#include "attention/backward_sm90_config.h"
#include "attention/backward_sm90_work.cuh"
#include "attention/backward_turns.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/elect.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/dq_sums.cuh"
#include "tile/mask.h"
#include "tile/pipeline.cuh"
#include "tile/probability.cuh"
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
  // Of the values of a lane only this one stays in a register: the byte offset of its row and 16-byte chunk in step 0 of
  // a tile of block_k rows (matrix_address).
  unsigned own_matrix;

  PipelineState<config.stages> pipe = {};
  PipelineState<config.ds_stages> ds_pipe = {};
  float dk[config.dim_qk / 2];  // [tile of 8 columns][value of a lane]
  float dv[config.dim_v / 2];
  static constexpr int kKeptVSteps = config.keeps_v ? kVSteps : 0;
  unsigned kept_k[config.kept_k_steps > 0 ? config.kept_k_steps : 1][4];
  unsigned kept_v[config.keeps_v ? kVSteps : 1][4];

  __forceinline__ void wait(int barriers, int index, unsigned parity) {
    mbarrier_wait_parity(shared + barriers + index * kMbarrierBytes, parity);
  }
  // One arrival per warp: a warp's reads by wgmma are complete when its own wait for the product returns.
  __forceinline__ void release(int barriers, int index) {
    if (elect_one()) mbarrier_arrive(shared + barriers + index * kMbarrierBytes);
  }
  __forceinline__ unsigned rows_at(int index) const { return shared + kAt.rows + index * kAt.rows_stage; }

  static __forceinline__ int thread() { return read_thread() % kWarpgroup; }
  static __forceinline__ int lane() { return thread() % 32; }
  static __forceinline__ int first_row() {
    const int of = thread();
    return of / 32 * 16 + of % 32 / 4;
  }

  __forceinline__ BackwardSm90Consumer(const AttentionBackwardSm90Params& params, unsigned shared_memory, int number)
      : p(params), shared(shared_memory), consumer(number) {
    const int of = thread();
    const int lane = of % 32;
    const int row = consumer * kConsumerRows + of / 32 * 16 + lane % 16;
    own_matrix = row * kAtomRowBytes + ((lane / 16) ^ (lane % 8)) * 16;
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

  // Named barriers: consumer 0's, then consumer 1's. The dQ warpgroup has barrier 1.
  static constexpr int kPingPongBarrier = 2;
  __forceinline__ void ping_pong_wait() {
    if constexpr (config.ping_pong) named_barrier_sync(kPingPongBarrier + consumer, 2 * kWarpgroup);
  }
  __forceinline__ void ping_pong_arrive() {
    if constexpr (config.ping_pong) named_barrier_arrive(kPingPongBarrier + 1 - consumer, 2 * kWarpgroup);
  }

  // Step `step` of x = A B^T: A is this consumer's rows of K or V, of which the first steps are kept; B is the step's Q or
  // dO.
  template <int kept_steps, int size>
  __forceinline__ void rows_by_rows(Scores& x, int a_tile, const unsigned (&kept)[size][4], unsigned b_tile, int step) {
    const unsigned within = step % 4 * 32;
    const MatrixDescriptor b = matrix_descriptor<64>(b_tile + step / 4 * (config.block_q * kAtomRowBytes), 16);
    if (step < kept_steps) {
      Wgmma<config.block_q>::template registers_shared<kType, false>(x, kept[step < size ? step : 0], b.at(within),
                                                                     step > 0);
    } else {
      const MatrixDescriptor a =
          matrix_descriptor<64>(shared + a_tile + step / 4 * (block_k_of(config) * kAtomRowBytes) +
                                    consumer * (kConsumerRows * kAtomRowBytes),
                                16);
      Wgmma<config.block_q>::template shared_shared<kType, false>(x, a.at(within), b.at(within), step > 0);
    }
  }
  __forceinline__ void scores_step(Scores& x, int index, int step) {
    rows_by_rows<config.kept_k_steps>(x, kAt.k, kept_k, shared + kAt.q + index * kAt.q_stage, step);
  }
  __forceinline__ void dp_step(Scores& x, int index, int step) {
    rows_by_rows<kKeptVSteps>(x, kAt.v, kept_v, shared + kAt.d_o + index * kAt.d_o_stage, step);
  }
  // Step `step` of sums += A B: A is the step's P^T or dS^T, B is its dO or Q, read transposed.
  template <int dim>
  __forceinline__ void add_by_columns(float (&sums)[dim / 2], const Operand& a, unsigned b_tile, int step) {
    const MatrixDescriptor b = matrix_descriptor<64>(b_tile, config.block_q * kAtomRowBytes);
    Wgmma<dim>::template registers_shared<kType, true>(sums, a[step], b.at(step * 16 * kAtomRowBytes), true);
  }
  __forceinline__ void dv_step(const Operand& weights, int index, int step) {
    add_by_columns<config.dim_v>(dv, weights, shared + kAt.d_o + index * kAt.d_o_stage, step);
  }
  __forceinline__ void dk_step(const Operand& gradients, int index, int step) {
    add_by_columns<config.dim_qk>(dk, gradients, shared + kAt.q + index * kAt.q_stage, step);
  }
  __forceinline__ void wait_for_q(const PipelineState<config.stages>& of) { wait(kAt.q_full, of.index, of.parity); }
  __forceinline__ void wait_for_d_o(const PipelineState<config.stages>& of) { wait(kAt.d_o_full, of.index, of.parity); }

  // A group of `count` wgmmas. A warp that issues one while the tensor cores are busy stalls, so what is to run at the
  // same time has to stand between them. ptxas arranges that with arithmetic that comes before the group, if no wait
  // separates them.
  template <int count, class Issue>
  __forceinline__ void issue_group(const Issue& issue) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < count; ++i) issue(i);
    wgmma_commit_group();
  }
  __forceinline__ void issue_scores(Scores& x) {
    wait_for_q(pipe);
    issue_group<kQkSteps>([&](int i) { scores_step(x, pipe.index, i); });
  }
  __forceinline__ void issue_dp(Scores& x) {
    wait_for_d_o(pipe);
    issue_group<kVSteps>([&](int i) { dp_step(x, pipe.index, i); });
  }
  __forceinline__ void issue_dv(const Operand& weights) {
    issue_group<kQuerySteps>([&](int i) { dv_step(weights, pipe.index, i); });
  }
  __forceinline__ void issue_dk(const Operand& gradients) {
    issue_group<kQuerySteps>([&](int i) { dk_step(gradients, pipe.index, i); });
  }

  // Sets scores to -inf if the query does not see the key. distance: from the position of the step's first query to
  // this consumer's first key. keys: the number of keys in the sequence from that one on.
  __forceinline__ void mask_scores(Scores& x, int distance, int keys) {
    const int first_key = first_row();
    const int first_query = lane() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + half * 8;
      // Queries that see this key, relative to this lane's first, so that every comparison is with a constant.
      Interval<int> queries = {0, config.block_q};
      if constexpr (config.masked) queries = p.band.positions_of<false>(distance + key - first_query);
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

  // LSE or delta of this lane's queries. If registers allow it, they are loaded before a product is waited for, so that
  // no latency follows the wait; else where they are used, in ascending order.
  struct Rows {
    unsigned from;
    Words4 values[config.prefetches_rows ? kQuerySteps : 1];

    // Of value i of the scores.
    __forceinline__ float of(int i) {
      const int slot = config.prefetches_rows ? i / 8 : 0;
      if (!config.prefetches_rows && i % 8 == 0) values[0] = load_shared_16(from + i / 8 * 64);
      return float_from_bits(values[slot].word[i / 4 % 2 * 2 + i % 2]);
    }
  };
  __forceinline__ Rows load_rows(unsigned from) const {
    Rows rows;
    rows.from = from + own_slot();
    if constexpr (config.prefetches_rows) {
#pragma unroll
      for (int step = 0; step < kQuerySteps; ++step) rows.values[step] = load_shared_16(rows.from + step * 16 * 4);
    }
    return rows;
  }
  __forceinline__ Rows load_lse(int index) const { return load_rows(rows_at(index)); }
  __forceinline__ Rows load_delta(int index) const { return load_rows(rows_at(index) + config.block_q * 4); }

  // Whether some query of the step does not see some key of this consumer.
  __forceinline__ bool is_masked(int index) const {
    const Words4 step = load_shared_16(rows_at(index) + 2 * config.block_q * 4);
    const int distance = static_cast<int>(step.word[kStepDistance]) + consumer * kConsumerRows;
    bool masked = static_cast<int>(step.word[kStepKeys]) < (consumer + 1) * kConsumerRows;
    if constexpr (config.masked) {  // positions count from the step's first query
      const Interval<int> all = p.band.keys_of_all<false>(0, config.block_q - 1);
      masked |= distance < all.begin || distance + kConsumerRows > all.end;
    }
    return masked;
  }

  __forceinline__ void mask_step(Scores& x, int index) {
    const Words4 step = load_shared_16(rows_at(index) + 2 * config.block_q * 4);
    mask_scores(x, static_cast<int>(step.word[kStepDistance]) + consumer * kConsumerRows,
                static_cast<int>(step.word[kStepKeys]) - consumer * kConsumerRows);
  }

  // Of this thread's first four weights; those of the next 8 queries follow at a distance of kWeightsTile.
  static constexpr int kWeightsTile = kWarpgroup * 16;
  __forceinline__ unsigned own_weights() const {
    return shared + kAt.weights + consumer * (kQueryTiles * kWeightsTile) + thread() * 16;
  }
  // S^T to P^T, in place, and P^T times the derivative of the modification to shared memory: there are no registers for
  // both.
  __forceinline__ void modify_and_exponentiate(Scores& x, int index) {
    const Words4 step = load_shared_16(rows_at(index) + 2 * config.block_q * 4);
    const ScoreMod<config.masked, config.block_q> modify(
        p, float_from_bits(step.word[kStepSlope]),
        static_cast<int>(step.word[kStepDistance]) + consumer * kConsumerRows,
        static_cast<int>(step.word[kStepKeys]) - consumer * kConsumerRows, first_row(), lane() % 4 * 2);
    Rows lse = load_lse(index);
    const unsigned to = own_weights();
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      float weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[i] = modify(x[n * 4 + i], n, i, lse.of(n * 4 + i));
      store_shared_floats(to + n * kWeightsTile, weights[0], weights[1], weights[2], weights[3]);
    }
  }
  __forceinline__ void differentiate_modified(Scores& dp, Rows& delta) {
    const unsigned from = own_weights();
#pragma unroll
    for (int n = 0; n < kQueryTiles; ++n) {
      const Words4 weights = load_shared_16(from + n * kWeightsTile);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        dp[n * 4 + i] = (dp[n * 4 + i] - delta.of(n * 4 + i)) * float_from_bits(weights.word[i]);
      }
    }
  }

  // S^T to P^T in fp32, in place. Value i belongs to query tile i / 4, row half i / 2 % 2.
  static constexpr int kScores = kQueryTiles * 4;
  __forceinline__ void exponentiate(Scores& x, Rows& lse) {
    const float scale_log2 = p.scale * kLog2E;
#pragma unroll
    for (int i = 0; i < kScores; ++i) x[i] = probability(x[i], scale_log2, lse.of(i));
  }
  // dP^T to dS^T in fp32, in place. weight(i): P^T.
  template <class Weight>
  __forceinline__ void differentiate(Scores& dp, Rows& delta, const Weight& weight) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) dp[i] = (dp[i] - delta.of(i)) * weight(i);
  }

  template <DType dtype>
  static __forceinline__ float half_of(unsigned pair, int half) {
    return half == 0 ? low_to_float<dtype>(pair) : high_to_float<dtype>(pair);
  }
  template <DType dtype>
  static __forceinline__ void round(Operand& to, const Scores& x) {
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // registers of the operand: tile of 8 queries i / 2, row half i % 2
        const float* const pair = x + step * 8 + i * 2;
        to[step][i] = pack<dtype>(pair[0], pair[1]);
      }
    }
  }

  // dS^T to shared memory, for the dQ warpgroup.
  __forceinline__ void hand_over(const Operand& gradients) {
    wait(kAt.ds_empty, ds_pipe.index, ds_pipe.parity ^ 1);
    const unsigned tile = shared + kAt.ds + ds_pipe.index * kAt.ds_stage;
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) stmatrix_x4(matrix_address(tile, step), gradients[step]);
    fence_proxy_async();
    __syncwarp();
    release(kAt.ds_full, ds_pipe.index);
    ds_pipe.advance();
  }

  // S^T and dP^T share one accumulator, and P^T and dS^T one operand. dS is computed from the rounded P^T or, if scores
  // are modified, from weights in shared memory. The exponentials stand before dP, so that ptxas puts them between its
  // wgmmas.
  __forceinline__ void rounded_p_loop(int steps) {
    Scores x;
    Operand operand;
    issue_scores(x);
    for (int step = 0;;) {
      const bool masked = !config.score_mod && is_masked(pipe.index);
      wgmma_wait_group<0>();
      wgmma_fence_operand(x);
      if (step > 0) release(kAt.empty, pipe.previous_index());
      if constexpr (config.score_mod) {
        modify_and_exponentiate(x, pipe.index);
      } else {
        if (masked) mask_step(x, pipe.index);
        Rows lse = load_lse(pipe.index);
        exponentiate(x, lse);
      }
      round<kType>(operand, x);
      const auto weight = [&](int i) { return half_of<kType>(operand[i / 8][i / 2 % 4], i % 2); };
      issue_dp(x);
      issue_dv(operand);
      Rows delta = load_delta(pipe.index);
      wgmma_wait_group<0>();
      wgmma_fence_operand(x);
      if constexpr (config.score_mod) {
        differentiate_modified(x, delta);
      } else {
        differentiate(x, delta, weight);
      }
      round<kType>(operand, x);
      hand_over(operand);
      issue_dk(operand);
      if (++step == steps) break;
      pipe.advance();
      issue_scores(x);
    }
  }

  // Likewise, but P^T is also kept in fp16: it is at most 1, and 11 bits leave dS the accuracy of its own rounding. The
  // copy takes the registers that exponentials between dP's wgmmas would need. They stand between those of dK.
  __forceinline__ void kept_p_loop(int steps) {
    Scores x;
    Operand operand, weights;
    issue_scores(x);
    {
      Rows lse = load_lse(pipe.index);
      wgmma_wait_group<0>();
      wgmma_fence_operand(x);
      if (is_masked(pipe.index)) mask_step(x, pipe.index);
      exponentiate(x, lse);
    }
    for (int step = 0;;) {
      wgmma_wait_group<0>();  // dK of the previous step
      if (step > 0) release(kAt.empty, pipe.previous_index());
      round<kType>(operand, x);
      round<DType::kFloat16>(weights, x);
      const auto weight = [&](int i) { return half_of<DType::kFloat16>(weights[i / 8][i / 2 % 4], i % 2); };
      issue_dp(x);
      issue_dv(operand);
      Rows delta = load_delta(pipe.index);
      wgmma_wait_group<1>();  // dP
      wgmma_fence_operand(x);
      differentiate(x, delta, weight);
      wgmma_fence_operand(x);
      wgmma_wait_group<0>();  // dV
      round<kType>(operand, x);
      hand_over(operand);
      if (++step == steps) break;
      const int index = pipe.index;
      pipe.advance();
      issue_scores(x);
      Rows lse = load_lse(pipe.index);
      const bool masked = is_masked(pipe.index);
      wgmma_wait_group<0>();
      wgmma_fence_operand(x);
      if (masked) mask_step(x, pipe.index);
      exponentiate(x, lse);
      issue_group<kQuerySteps>([&](int i) { dk_step(operand, index, i); });
    }
    issue_dk(operand);
  }

  // S^T and dP^T have an accumulator each. The exponentials run beside dK of the previous step and dP, the differences
  // beside dV.
  __forceinline__ void two_accumulator_loop(int steps) {
    Scores s, dp;
    Operand operand;
    if (consumer == 1) ping_pong_arrive();  // consumer 0 goes first
    issue_scores(s);
    {
      Rows lse = load_lse(pipe.index);
      wgmma_wait_group<0>();
      wgmma_fence_operand(s);
      if (is_masked(pipe.index)) mask_step(s, pipe.index);
      wait_for_d_o(pipe);
      exponentiate(s, lse);
      issue_group<kVSteps>([&](int i) { dp_step(dp, pipe.index, i); });
    }
    for (int step = 0;;) {
      Rows delta = load_delta(pipe.index);
      wgmma_wait_group<0>();  // dP, and dK of the previous step
      wgmma_fence_operand(dp);
      if (step > 0) release(kAt.empty, pipe.previous_index());
      round<kType>(operand, s);
      ping_pong_wait();
      differentiate(dp, delta, [&](int i) { return s[i]; });
      issue_dv(operand);
      if (++step == steps) break;
      const int index = pipe.index;
      pipe.advance();
      issue_scores(s);
      ping_pong_arrive();
      wgmma_wait_group<1>();  // dV
      round<kType>(operand, dp);
      hand_over(operand);
      Rows lse = load_lse(pipe.index);
      const bool masked = is_masked(pipe.index);
      wait_for_d_o(pipe);
      wgmma_wait_group<0>();
      wgmma_fence_operand(s);
      if (masked) mask_step(s, pipe.index);
      exponentiate(s, lse);
      issue_group<kQuerySteps + kVSteps>([&](int i) {
        if (i < kQuerySteps) {
          dk_step(operand, index, i);
        } else {
          dp_step(dp, pipe.index, i - kQuerySteps);
        }
      });
    }
    ping_pong_arrive();
    wgmma_wait_group<0>();
    round<kType>(operand, dp);
    hand_over(operand);
    issue_dk(operand);
  }

  // If other CTAs have queries of the key tile, too: adds this warp's sums to theirs. Returns whether it is the last one to do
  // so; then dK and dV are complete.
  __forceinline__ bool complete(const BackwardSm90Work<config>& work) {
    const int warp = work.own.tile * (config.consumers * 4) + consumer * 4 + thread() / 32;
    float* const tiles =
        p.slices.sums + static_cast<Index>(warp) * (16 * (config.dim_qk + config.dim_v)) + sum_index(lane(), 0);
    unsigned* const added = p.slices.added + warp;
    const auto each = [&](const auto& call) {
#pragma unroll
      for (int n = 0; n < config.dim_qk / 8; ++n) call(tiles + n * 128, reinterpret_cast<float(&)[4]>(dk[n * 4]));
#pragma unroll
      for (int n = 0; n < config.dim_v / 8; ++n) {
        call(tiles + (config.dim_qk / 8 + n) * 128, reinterpret_cast<float(&)[4]>(dv[n * 4]));
      }
    };
    if constexpr (config.deterministic) await_turn(added, work.own.slice);
    each([](float* to, float(&four)[4]) { add_to_sums(to, four, 0); });
    if (count_added(added, lane()) + 1 < p.slices.count) return false;
    each([](float* from, float(&four)[4]) { load_coherent(four, from); });
    return true;
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
      if constexpr (config.kept_k_steps > 0) keep(kept_k, shared + kAt.k);
      if constexpr (config.keeps_v) keep(kept_v, shared + kAt.v);
      if constexpr (config.accumulators == 2) {
        two_accumulator_loop(steps);
      } else if constexpr (config.keeps_p) {
        kept_p_loop(steps);
      } else {
        rounded_p_loop(steps);
      }
      wgmma_wait_group<0>();
      wgmma_fence_operand(dk);
      wgmma_fence_operand(dv);
    }
    // Recomputed, because keeping it would take registers during the whole main loop.
    const BackwardSm90Work<config> work(p, recomputed(blockIdx.x));
    if constexpr (config.splits_group) {
      if (steps == 0) return;
      const int row = work.first_k + consumer * kConsumerRows + thread() / 32 * 16;
      const auto add = [&]<int half>(const float(&values)[half], const DqSums& sums, unsigned* turns) {
        add_part<config.deterministic, block_k_of(config), 2 * half>(values, sums, turns, p, work, row, lane());
      };
      add(dk, p.dk_sums, p.dk_turns);
      add(dv, p.dv_sums, p.dv_turns);
      return;
    }
    if constexpr (config.splits_queries) {
      if (work.own.tile >= 0 && !complete(work)) return;
    }
    const Index row = work.first_k + consumer * kConsumerRows;
    const int keys = work.len_k - work.first_k - consumer * kConsumerRows;
    const auto store = [&]<int half>(const float(&sums)[half], void* to, const Strides& strides, float factor) {
      store_gradient<kType, 2 * half>(
          sums, rows_of(to, strides, p.cu_seqlens_k, work.batch, work.kv_head) + row * strides.seq, strides.seq, keys,
          factor, thread());
    };
    store(dk, p.dk, p.dk_strides, p.scale);
    store(dv, p.dv, p.dv_strides, 1.0f);
  }
};

}  // namespace tessera
