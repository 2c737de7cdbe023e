// The P and the dS warpgroup of attention/backward_wide_sm90.cuh: they compute dV and dK of the CTA's 64 keys.
#pragma once

#include "attention/backward_score_mod.cuh"
#include "attention/backward_sm90_work.cuh"
#include "attention/backward_turns.cuh"
#include "attention/backward_wide_sm90_config.h"
#include "attention/backward_wide_sm90_work.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/cluster.cuh"
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/dq_sums.cuh"
#include "tile/mask.h"
#include "tile/probability.cuh"
#include "tile/sequence.cuh"
#include "tile/shared_tile.cuh"

namespace tessera {

// What the two have in common: a product of 64 keys by 64 queries, and sums [64 keys, dim] of products with it.
template <AttentionBackwardWideSm90Config config>
struct BackwardWideSm90Consumer {
  static constexpr DType kType = config.dtype;
  static constexpr BackwardWideSm90Layout kAt = backward_wide_sm90_layout(config);
  static constexpr int kTile = kBackwardWideTile;
  static constexpr int kQuerySteps = kTile / 16;

  using Scores = float[kTile / 2];           // [tile of 8 queries][value of a lane]
  using Operand = unsigned[kQuerySteps][4];  // the same, rounded, as wgmma's A operand

  const AttentionBackwardWideSm90Params& p;
  unsigned shared;
  bool is_first = lane() == 0;  // lane of its warp

  static __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __forceinline__ int thread() { return static_cast<int>(threadIdx.x) % kWarpgroup; }
  static __forceinline__ int first_row() { return thread() / 32 * 16 + lane() / 4; }

  // The stage of a step and the parity of its mbarriers are computed from the step: to keep them for each pipeline would
  // take registers. wait_full: till the step's data are there. wait_empty: till the stage's previous data have been read.
  template <int stages>
  __forceinline__ void wait_full(int barriers, int step) const {
    const auto [stage, round] = place<stages>(step);
    mbarrier_wait_parity(shared + barriers + stage * kMbarrierBytes, round % 2);
  }
  template <int stages>
  __forceinline__ void wait_empty(int barriers, int step) const {
    const auto [stage, round] = place<stages>(step);
    mbarrier_wait_parity(shared + barriers + stage * kMbarrierBytes, round % 2 ^ 1);
  }
  // One arrival per warp: a warp's reads by wgmma are complete when its own wait for the product returns.
  template <int stages>
  __forceinline__ void arrive(int barriers, int step) const {
    if (is_first) mbarrier_arrive(shared + barriers + place<stages>(step).stage * kMbarrierBytes);
  }
  // The same at all CTAs of the cluster, whose producers all write to the stage.
  template <int stages>
  __forceinline__ void arrive_at_all(int barriers, int step) const {
    if constexpr (config.cluster == 1) {
      arrive<stages>(barriers, step);
    } else {
      const unsigned own_lane = recomputed(lane());
      if (own_lane < config.cluster) {
        mbarrier_arrive_at(shared + barriers + place<stages>(step).stage * kMbarrierBytes, own_lane);
      }
    }
  }
  struct Place {
    unsigned stage;
    unsigned round;
  };
  template <int stages>
  static __forceinline__ Place place(int step) {
    const auto count = static_cast<unsigned>(step);
    return {count % stages, count / stages};
  }
  __forceinline__ unsigned q_at(int step) const {
    return shared + kAt.q + place<config.q_stages>(step).stage * kAt.q_stage;
  }
  __forceinline__ unsigned d_o_at(int step) const {
    return shared + kAt.d_o + place<config.d_o_stages>(step).stage * kAt.d_o_stage;
  }
  __forceinline__ unsigned rows_at(int step) const {
    return shared + kAt.rows + place<config.q_stages>(step).stage * kAt.rows_stage;
  }
  // Byte offset of this lane's LSE or delta within those of 16 queries (wide_row_slot).
  static __forceinline__ unsigned own_slot() { return recomputed(lane()) % 4 * 16; }
  // Of this thread's first 16 bytes of P; its other chunks follow at distances of kPChunk.
  static constexpr int kPChunk = kWarpgroup * 16;
  __forceinline__ unsigned own_p(int step) const {
    return shared + kAt.p + place<config.p_stages>(step).stage * kAt.p_stage + recomputed(thread()) * 16;
  }

  // The first columns of the CTA's K or V that stay in registers, as wgmma's A operand.
  template <int dim>
  static constexpr int kKept = config.kept_steps * 16 < dim ? config.kept_steps : (dim + 15) / 16;
  template <int steps>
  __forceinline__ void keep(unsigned (&kept)[steps][4], int tile) const {
    const int row = thread() / 32 * 16 + lane() % 16;
#pragma unroll
    for (int step = 0; step < config.kept_steps && step < steps; ++step) {
      const int chunk = step % 4 * 2 + lane() / 16;
      ldmatrix_x4(kept[step], shared + tile + step / 4 * (kTile * kAtomRowBytes) + row * kAtomRowBytes +
                                  ((chunk ^ (row % 8)) * 16));
    }
  }

  // x = A B^T: A is the CTA's K or V, B is the step's Q or dO.
  template <int dim, int kept_steps>
  __forceinline__ void issue_scores(Scores& x, int a_tile, const unsigned (&kept)[kept_steps][4], unsigned b_tile) {
#pragma unroll
    for (int step = 0; step < (dim + 15) / 16; ++step) {
      const unsigned atom = step / 4 * (kTile * kAtomRowBytes);
      const unsigned within = step % 4 * 32;
      const MatrixDescriptor b = matrix_descriptor<64>(b_tile + atom, 16);
      if (step < kKept<dim>) {
        Wgmma<kTile>::template registers_shared<kType, false>(x, kept[step < kept_steps ? step : 0], b.at(within),
                                                              step > 0);
      } else {
        const MatrixDescriptor a = matrix_descriptor<64>(shared + a_tile + atom, 16);
        Wgmma<kTile>::template shared_shared<kType, false>(x, a.at(within), b.at(within), step > 0);
      }
    }
    wgmma_commit_group();
  }

  // sums += A B: A is the step's P^T or dS^T, B is its dO or Q, read transposed. ptxas compiles no instruction that needs
  // more registers than a thread has at the start, so wide sums are computed in two parts; A is in registers, so this
  // reads nothing twice.
  template <int dim>
  __forceinline__ void issue_sums(float (&sums)[dim / 2], const Operand& a, unsigned b_tile) {
    constexpr int kPart = dim <= 192 ? dim : 128;
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      issue_part<0, kPart>(sums, a[step], b_tile, step);
      if constexpr (kPart < dim) issue_part<kPart, dim - kPart>(sums, a[step], b_tile, step);
    }
    wgmma_commit_group();
  }
  template <int first, int count, int all>
  __forceinline__ void issue_part(float (&sums)[all], const unsigned (&a)[4], unsigned b_tile, int step) {
    const MatrixDescriptor b = matrix_descriptor<64>(b_tile + first * kTile * 2, kTile * kAtomRowBytes);
    float(&part)[count / 2] = reinterpret_cast<float(&)[count / 2]>(sums[first / 2]);
    Wgmma<count>::template registers_shared<kType, true>(part, a, b.at(step * 16 * kAtomRowBytes), true);
  }

  static __forceinline__ void round(const Scores& x, Operand& operand) {
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // registers of the operand: tile of 8 queries i / 2, row half i % 2
        operand[step][i] = pack<kType>(x[step * 8 + i * 2], x[step * 8 + i * 2 + 1]);
      }
    }
  }

  // Runs the main loop, whose products add to sums.
  template <int values, class MainLoop>
  static __forceinline__ void sum_up(float (&sums)[values], int steps, const MainLoop& main_loop) {
#pragma unroll
    for (int i = 0; i < values; ++i) sums[i] = 0;
    wgmma_fence_operand(sums);  // pins the zeroing here: the compiler must not move it to where products are in flight
    if (steps > 0) {
      main_loop();
      wgmma_wait_group<0>();
      wgmma_fence_operand(sums);
    }
  }

  // What all steps gave: to dK or dV or, if other CTAs have query heads of the group, too, to their sums. turns: only if
  // deterministic. The CTAs of a cluster meet here.
  template <int dim>
  __forceinline__ void store(const float (&values)[dim / 2], int steps, void* gradient, const Strides& strides,
                             float factor, const DqSums& sums, unsigned* turns) {
    if constexpr (config.cluster > 1) cluster_arrive();
    // Recomputed, because keeping it would take registers during the whole main loop.
    const BackwardWideSm90Work<config> work(p, recomputed(blockIdx.x));
    if constexpr (config.splits_group) {
      if (steps > 0) {
        add_part<config.deterministic, kTile, dim>(values, sums, turns, p, work, work.first_k + thread() / 32 * 16,
                                                   lane());
      }
    } else {
      Bits16* const out = rows_of(gradient, strides, p.cu_seqlens_k, work.batch, work.kv_head);
      store_gradient<kType, dim>(values, out + work.first_k * strides.seq, strides.seq, work.len_k - work.first_k,
                                 factor, thread());
    }
    // Shared memory must be there until the other CTA no longer uses it.
    if constexpr (config.cluster > 1) cluster_wait();
  }
};

// S^T = K Q^T, P^T = exp2(S^T - LSE), dV += P^T dO.
template <AttentionBackwardWideSm90Config config>
struct BackwardWideSm90PWarpgroup : BackwardWideSm90Consumer<config> {
  using Base = BackwardWideSm90Consumer<config>;
  using Base::kAt, Base::kTile, Base::kQuerySteps, Base::kPChunk;
  using Base::p, Base::shared;
  using Base::q_at, Base::d_o_at, Base::rows_at, Base::lane, Base::first_row, Base::own_slot, Base::own_p;
  using typename Base::Operand;
  using typename Base::Scores;

  static constexpr int kKeptSteps = Base::template kKept<config.dim_qk>;

  float dv[config.dim_v / 2];  // [tile of 8 columns][value of a lane]
  unsigned kept_k[kKeptSteps > 0 ? kKeptSteps : 1][4];

  // Sets scores to -inf if the query does not see the key. distance: from the position of the step's first query to the
  // CTA's first key. keys: the number of keys in the sequence from that one on.
  __forceinline__ void mask_scores(Scores& x, int distance, int keys) {
    const int first_key = recomputed(first_row());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + half * 8;
      // Queries that see this key, relative to this lane's first, so that every comparison is with a constant.
      Interval<int> queries = {0, kTile};
      if constexpr (config.masked) queries = p.band.positions_of<false>(distance + key - recomputed(lane()) % 4 * 2);
      if (key >= keys) queries.end = queries.begin;
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int query = n * 8 + i;
          if (query >= queries.end || (config.masked && query < queries.begin)) x[n * 4 + half * 2 + i] = -infinity();
        }
      }
    }
  }

  // Stores P^T for the dS warpgroup. exponentiate(x, n, i, lse): makes P of value i of query tile n, and returns what is
  // stored.
  template <class Exponentiate>
  __forceinline__ void store_p(Scores& x, unsigned rows, unsigned to, const Exponentiate& exponentiate) {
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      const Words4 lse = load_shared_16(rows + step * 16 * 4);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float(&four)[4] = reinterpret_cast<float(&)[4]>(x[step * 8 + tile * 4]);
        float stored[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          stored[i] = exponentiate(four[i], step * 2 + tile, i, float_from_bits(lse.word[tile * 2 + i % 2]));
        }
        store_shared_floats(to + (step * 2 + tile) * kPChunk, stored[0], stored[1], stored[2], stored[3]);
      }
    }
  }

  // S^T to P^T, which is also stored for the dS warpgroup; if scores are modified, times the modification's derivative.
  __forceinline__ void exponentiate(Scores& x, int at) {
    unsigned rows = rows_at(at);
    const Words4 info = load_shared_16(rows + 2 * kTile * 4);
    const int distance = static_cast<int>(info.word[kWideStepDistance]);
    const int keys = static_cast<int>(info.word[kWideStepKeys]);
    if constexpr (!config.score_mod) {
      bool masked = keys < kTile;
      if constexpr (config.masked) {  // positions count from the step's first query
        masked |= distance < p.band.template keys_of<false>(kTile - 1).begin ||
                  distance + kTile > p.band.template keys_of<false>(0).end;
      }
      if (masked) mask_scores(x, distance, keys);
    }
    rows += own_slot();
    const float scale_log2 = p.scale * kLog2E;
    this->template wait_empty<config.p_stages>(kAt.p_empty, at);
    if constexpr (config.score_mod) {
      store_p(x, rows, own_p(at),
              ScoreMod<config.masked, kTile>(p, float_from_bits(info.word[kWideStepSlope]), distance, keys,
                                             recomputed(first_row()), recomputed(lane()) % 4 * 2));
    } else {
      store_p(x, rows, own_p(at), [&](float& s, int, int, float lse) { return s = probability(s, scale_log2, lse); });
    }
    __syncwarp();
    this->template arrive<config.p_stages>(kAt.p_full, at);
    this->template arrive_at_all<config.q_stages>(kAt.q_empty, at);  // S is complete, and this warp has read LSE
  }

  __forceinline__ void issue_s(Scores& x, int step) {
    this->template wait_full<config.q_stages>(kAt.q_full, step);
    wgmma_fence();
    this->template issue_scores<config.dim_qk>(x, kAt.k, kept_k, q_at(step));
  }
  __forceinline__ void issue_dv(const Operand& weights, int step) {
    this->template wait_full<config.d_o_stages>(kAt.d_o_full, step);
    wgmma_fence();
    this->template issue_sums<config.dim_v>(dv, weights, d_o_at(step));
  }
  __forceinline__ void release_d_o(int step) { this->template arrive_at_all<config.d_o_stages>(kAt.d_o_empty, step); }

  // At the top of the loop, S^T of a step and dV of the previous one are complete.
  __forceinline__ void main_loop(int steps) {
    Scores x;
    Operand weights;
    mbarrier_wait_parity(shared + kAt.k_full, 0);
    this->keep(kept_k, kAt.k);
    issue_s(x, 0);
    wgmma_wait_group<0>();
    int step = 0;
    for (;; ++step) {
      wgmma_fence_operand(x);
      exponentiate(x, step);
      this->round(x, weights);
      if (step + 1 == steps) break;
      issue_dv(weights, step);
      issue_s(x, step + 1);
      wgmma_wait_group<1>();
      release_d_o(step);
      wgmma_wait_group<0>();
    }
    issue_dv(weights, step);
  }

  __forceinline__ void run(int steps) {
    this->sum_up(dv, steps, [&] { main_loop(steps); });
    this->template store<config.dim_v>(dv, steps, p.dv, p.dv_strides, 1.0f, p.dv_sums, p.dv_turns);
  }
};

// dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q.
template <AttentionBackwardWideSm90Config config>
struct BackwardWideSm90DsWarpgroup : BackwardWideSm90Consumer<config> {
  using Base = BackwardWideSm90Consumer<config>;
  using Base::kAt, Base::kTile, Base::kQuerySteps, Base::kPChunk;
  using Base::p, Base::shared;
  using Base::q_at, Base::d_o_at, Base::rows_at, Base::lane, Base::own_slot, Base::own_p;
  using typename Base::Operand;
  using typename Base::Scores;

  static constexpr int kKeptSteps = Base::template kKept<config.dim_v>;

  float dk[config.dim_qk / 2];  // [tile of 8 columns][value of a lane]
  unsigned kept_v[kKeptSteps > 0 ? kKeptSteps : 1][4];

  // dP^T to dS^T.
  __forceinline__ void differentiate(Scores& x, int at) {
    const unsigned rows = rows_at(at) + kTile * 4 + own_slot();
    this->template wait_full<config.q_stages>(kAt.q_full, at);
    this->template wait_full<config.p_stages>(kAt.p_full, at);
    const unsigned from = own_p(at);
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float delta[2], weights[4];
        load_shared_floats(delta, rows + step * 16 * 4 + tile * 8);
        load_shared_floats(weights, from + (step * 2 + tile) * kPChunk);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& value = x[step * 8 + tile * 4 + i];
          value = (value - delta[i % 2]) * weights[i];
        }
      }
    }
    __syncwarp();
    this->template arrive<config.p_stages>(kAt.p_empty, at);
  }

  // dS^T to shared memory, for the dQ warpgroup.
  __forceinline__ void store_ds(const Operand& gradients, int at) {
    const int row = recomputed(this->thread()) / 32 * 16 + recomputed(lane()) % 16;
    const unsigned own = row * kAtomRowBytes + ((recomputed(lane()) / 16) ^ (row % 8)) * 16;
    this->template wait_empty<config.ds_stages>(kAt.ds_empty, at);
    const unsigned to = shared + kAt.ds + Base::template place<config.ds_stages>(at).stage * kAt.ds_stage + own;
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) stmatrix_x4(to ^ (step * 32), gradients[step]);
    if constexpr (config.kept_ds_steps < kTile / 16 || config.cluster > 1) fence_proxy_async();  // wgmma reads it
    __syncwarp();
    if constexpr (config.cluster > 1) {  // this warp's rows go to the other CTA, from which as many come
      constexpr unsigned kBytes = 16 * kAtomRowBytes;
      if (this->is_first) {
        const unsigned full = shared + kAt.ds_full + Base::template place<config.ds_stages>(at).stage * kMbarrierBytes;
        const unsigned other = 1 - blockIdx.x % 2;
        mbarrier_arrive_expect_tx(full, kBytes);
        // Lane 0's address is that of the warp's first row.
        bulk_copy_to_cluster(cluster_address(to + kAt.ds_stage / 2, other), to, kBytes, cluster_address(full, other));
      }
    } else {
      this->template arrive<config.ds_stages>(kAt.ds_full, at);
    }
  }

  __forceinline__ void issue_dp(Scores& x, int step) {
    this->template wait_full<config.d_o_stages>(kAt.d_o_full, step);
    wgmma_fence();
    this->template issue_scores<config.dim_v>(x, kAt.v, kept_v, d_o_at(step));
  }
  __forceinline__ void issue_dk(const Operand& gradients, int step) {
    wgmma_fence();
    this->template issue_sums<config.dim_qk>(dk, gradients, q_at(step));
  }
  // After dP and after dK.
  __forceinline__ void release_d_o(int step) { this->template arrive_at_all<config.d_o_stages>(kAt.d_o_empty, step); }
  __forceinline__ void release_q(int step) { this->template arrive_at_all<config.q_stages>(kAt.q_empty, step); }

  // At the top of the loop, dP^T of a step and dK of the previous one are complete. dK is issued before the next dP,
  // because the loads of Q wait for it.
  __forceinline__ void main_loop(int steps) {
    Scores x;
    Operand gradients;
    mbarrier_wait_parity(shared + kAt.v_full, 0);
    this->keep(kept_v, kAt.v);
    issue_dp(x, 0);
    wgmma_wait_group<0>();
    int step = 0;
    for (;; ++step) {
      wgmma_fence_operand(x);
      release_d_o(step);
      differentiate(x, step);
      this->round(x, gradients);
      store_ds(gradients, step);
      if (step + 1 == steps) break;
      issue_dk(gradients, step);
      issue_dp(x, step + 1);
      wgmma_wait_group<1>();
      release_q(step);
      wgmma_wait_group<0>();
    }
    issue_dk(gradients, step);
  }

  __forceinline__ void run(int steps) {
    this->sum_up(dk, steps, [&] { main_loop(steps); });
    this->template store<config.dim_qk>(dk, steps, p.dk, p.dk_strides, p.scale, p.dk_sums, p.dk_turns);
  }
};

}  // namespace tessera
