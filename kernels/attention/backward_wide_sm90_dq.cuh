// The dQ warpgroup of attention/backward_wide_sm90.cuh: dQ = dS K over the keys of the CTA, added to fp32 sums in global
// memory (tile/dq_sums.cuh), or stored or written in turns (attention/backward_turns.h).
#pragma once

#include "attention/backward_ds.cuh"
#include "attention/backward_sm90_work.cuh"
#include "attention/backward_turns.cuh"
#include "attention/backward_wide_sm90_config.h"
#include "attention/backward_wide_sm90_work.cuh"
#include "ptx/acquire_release.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/elect.cuh"
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
  static constexpr int kKeySteps = config.cluster * kTile / 16;
  static constexpr int kKeptSteps = config.kept_ds_steps > 0 ? config.kept_ds_steps : 1;
  static constexpr bool kKeepsAll = config.kept_ds_steps == kKeySteps;

  const AttentionBackwardWideSm90Params& p;
  unsigned shared;
  const BackwardWideSm90Work<config>& work;

  // Issues dq_columns columns of dQ, of which the last may be padding. Keys are the rows of both operands, which are read
  // transposed. k, other_k: these columns of K, of this CTA's keys and of the other's. adds: to `sums`.
  __forceinline__ void issue_columns(float (&sums)[config.dq_columns / 2], unsigned ds_tile,
                                     const unsigned (&kept)[kKeptSteps][4], unsigned k, unsigned other_k, bool adds) {
    const MatrixDescriptor ds = matrix_descriptor<64>(ds_tile, 16);
    const MatrixDescriptor own = matrix_descriptor<64>(k, kTile * kAtomRowBytes);
    const MatrixDescriptor other = matrix_descriptor<64>(other_k, kTile * kAtomRowBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeySteps; ++step) {
      constexpr int kOwnSteps = kTile / 16;
      const unsigned rows = step * 16 * kAtomRowBytes;
      const auto keys = step < kOwnSteps ? own.at(rows) : other.at(rows - kTile * kAtomRowBytes);
      if (step < config.kept_ds_steps) {
        Wgmma<config.dq_columns>::template registers_shared<config.dtype, true>(
            sums, kept[step < kKeptSteps ? step : 0], keys, adds || step > 0);
      } else {
        Wgmma<config.dq_columns>::template shared_shared<config.dtype, true, true>(sums, ds.at(rows), keys,
                                                                                   adds || step > 0);
      }
    }
    wgmma_commit_group();
  }
  template <int first>
  __forceinline__ void issue_columns(float (&sums)[config.dq_columns / 2], unsigned ds_tile,
                                     const unsigned (&kept)[kKeptSteps][4], bool adds) {
    issue_columns(sums, ds_tile, kept, shared + kAt.k + first * kTile * 2, 0, adds);
  }

  // to: this lane's first sum of this warp's 16 queries. release(): called when dS has been read.
  template <int first, class Release>
  __forceinline__ void add_columns(float (&sums)[config.dq_columns / 2], unsigned ds_tile,
                                   const unsigned (&kept)[kKeptSteps][4], float* to, const Release& release) {
    constexpr bool kLast = first + config.dq_columns >= config.dim_qk;
    issue_columns<first>(sums, ds_tile, kept, false);
    wgmma_wait_group<0>();
    wgmma_fence_operand(sums);
    if constexpr (kLast && !kKeepsAll) release();
#pragma unroll
    for (int n = 0; n < config.dq_columns / 8 && first / 8 + n < kChunks; ++n) {
      add_to_sums(to + (first / 8 + n) * 128, reinterpret_cast<const float(&)[4]>(sums[n * 4]), 0);
    }
    if constexpr (!kLast) add_columns<first + config.dq_columns>(sums, ds_tile, kept, to, release);
  }

  // The CTA's rank in its cluster.
  static __forceinline__ int rank() { return static_cast<int>(blockIdx.x % config.cluster); }
  // Issues 64 columns.
  __forceinline__ void issue_atom(float (&sums)[config.dq_columns / 2], unsigned ds_tile,
                                  const unsigned (&kept)[kKeptSteps][4], int atom, bool adds) {
    constexpr int kAtom = kTile * kAtomRowBytes;
    issue_columns(sums, ds_tile, kept, shared + kAt.k + atom * kAtom,
                  shared + kAt.other_k + (atom - first_dq_atom(config, rank())) * kAtom, adds);
  }

  // The same with a cluster, for this CTA's columns.
  template <class Release>
  __forceinline__ void add_own_columns(float (&sums)[config.dq_columns / 2], unsigned ds_tile,
                                       const unsigned (&kept)[kKeptSteps][4], float* to, int step,
                                       const Release& release) {
    const DqAtoms atoms = own_dq_atoms(config, rank(), step);
#pragma unroll 1
    for (int atom = atoms.first; atom < atoms.first + atoms.count; ++atom) {
      issue_atom(sums, ds_tile, kept, atom, false);
      wgmma_wait_group<0>();
      wgmma_fence_operand(sums);
      if (!kKeepsAll && atom + 1 == atoms.first + atoms.count) release();
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (kChunks % 8 == 0 || atom * 8 + n < kChunks) {
          add_to_sums(to + (atom * 8 + n) * 128, reinterpret_cast<const float(&)[4]>(sums[n * 4]), 0);
        }
      }
    }
  }

  // The same for query tile `tile` of `head`, in turns: the first key tile stores its sums, and the last one starts from
  // those of the others and writes dQ. A CTA has the same columns of a query tile as those of its rank in other clusters,
  // so that each waits only for its own.
  template <class Release>
  __forceinline__ void take_turn(float (&sums)[config.dq_columns / 2], unsigned ds_tile,
                                 const unsigned (&kept)[kKeptSteps][4], float* to, int step, int head, int tile,
                                 const TurnEnds& turn, const Release& release) {
    const DqAtoms atoms = own_dq_atoms(config, rank(), tile);
    const bool completes = turn.last && !turn.first;
    constexpr int kUnrolled = config.cluster == 1 ? dq_atoms(config) : 1;  // alone, constant indices spare registers
#pragma unroll kUnrolled
    for (int atom = atoms.first; atom < atoms.first + atoms.count; ++atom) {
      const auto each = [&](const auto& act) {
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          if (kChunks % 8 == 0 || atom * 8 + n < kChunks) {
            act(to + (atom * 8 + n) * 128, reinterpret_cast<float(&)[4]>(sums[n * 4]));
          }
        }
      };
      if (completes) {
        if (atom == atoms.first) TurnBarriers{shared + kAt.turns}.take(step);
        each([](const float* from, float(&four)[4]) { load_coherent(four, from); });
      }
      issue_atom(sums, ds_tile, kept, atom, completes);
      wgmma_wait_group<0>();
      wgmma_fence_operand(sums);
      if (!kKeepsAll && atom + 1 == atoms.first + atoms.count) release();
      if (atom == atoms.first && !completes) TurnBarriers{shared + kAt.turns}.take(step);
      if (turn.last) {
        write_atom(sums, head, tile, atom);
      } else if (turn.first) {
        each([](float* address, const float(&four)[4]) { store_sums(address, four); });
      } else {
        each([](float* address, const float(&four)[4]) { add_to_sums(address, four, 0); });
      }
    }
  }
  // dQ's columns of a swizzle atom.
  __forceinline__ void write_atom(const float (&sums)[config.dq_columns / 2], int head, int tile, int atom) {
    Bits16* const out = rows_of(p.dq, p.dq_strides, p.cu_seqlens_q, work.batch, recomputed(head)) +
                        static_cast<Index>(recomputed(tile) * kTile) * p.dq_strides.seq + atom * kWidestAtom;
    const auto write = [&]<int columns> {
      store_gradient<config.dtype, columns>(sums, out, p.dq_strides.seq, work.len_q - tile * kTile, p.scale,
                                            read_thread() % kWarpgroup);
    };
    constexpr int kRest = config.dim_qk % kWidestAtom;
    if (kRest == 0 || atom + 1 < dq_atoms(config)) {
      write.template operator()<kWidestAtom>();
    } else {
      write.template operator()<kRest == 0 ? kWidestAtom : kRest>();
    }
  }

  // The sums of query tile 0 of a head.
  __forceinline__ float* sums_of(int head) const {
    return dq_sums_of(p.dq_sums, p.cu_seqlens_q, work.batch, head, static_cast<int>(p.heads_q), kTile, config.dim_qk);
  }
  // The counter of the first step's query tile, and how far those of a head are from the next one's: a head has those of
  // rank 0, then those of rank 1.
  __forceinline__ unsigned* first_turns() const {
    const int head = work.first_head(p);
    const Index tiles = p.dq_sums.rows / kTile;
    const Index heads_before = p.cu_seqlens_q ? head : static_cast<Index>(work.batch) * p.heads_q + head;
    const Index first = (sums_of(head) - p.dq_sums.data) / (kTile * config.dim_qk) + work.tiles.first;
    return p.dq_turns + first + (heads_before * (config.cluster - 1) + rank()) * tiles;
  }
  __forceinline__ int heads_apart() const { return static_cast<int>(p.dq_sums.rows / kTile) * config.cluster; }

  __forceinline__ void run(int lane, int warp) {
    int head = work.first_head(p);
    int tiles_left = work.tiles.count;
    float* to = sums_of(head) + static_cast<Index>(work.tiles.first) * (kTile * config.dim_qk) +
                warp * (kChunks * 128) + sum_index(lane, 0);
    PipelineState<config.ds_stages> pipe;
    mbarrier_wait_parity(shared + kAt.k_full, 0);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      mbarrier_wait_parity(shared + kAt.ds_full + pipe.index * kMbarrierBytes, pipe.parity);
      const unsigned tile = shared + kAt.ds + pipe.index * kAt.ds_stage;
      const auto release = [&] {
        const unsigned empty = shared + kAt.ds_empty + pipe.index * kMbarrierBytes;
        if constexpr (config.cluster > 1) {
          if (lane < config.cluster) mbarrier_arrive_at(empty, lane);
        } else {
          if (lane == 0) mbarrier_arrive(empty);
        }
      };
      unsigned kept[kKeptSteps][4];
      if constexpr (config.kept_ds_steps > 0) keep_ds(kept, tile, lane, warp);
      if constexpr (kKeepsAll) {
        __syncwarp();
        release();
      }
      float sums[config.dq_columns / 2];
      if constexpr (config.deterministic) {
        const int query_tile = work.tiles.first + work.tiles.count - tiles_left;
        take_turn(sums, tile, kept, to, step, head, query_tile, work.turn_ends(p, query_tile), release);
        __syncwarp();
        if (elect_one()) TurnBarriers{shared + kAt.turns}.leave(step);
      } else if constexpr (config.cluster > 1) {
        add_own_columns(sums, tile, kept, to, step, release);
      } else {
        add_columns<0>(sums, tile, kept, to, release);
      }
      to += kTile * config.dim_qk;
      pipe.advance();
      if (--tiles_left == 0) {  // continue with the next head
        tiles_left = work.tiles.count;
        to += (p.dq_sums.rows - static_cast<Index>(tiles_left) * kTile) * config.dim_qk;
        if constexpr (config.deterministic) ++head;
      }
    }
    if constexpr (config.cluster > 1) cluster_arrive();  // the other CTA's mbarriers must be there until then
  }

  // On threads of the producer.
  __forceinline__ void await_all_turns() const {
    await_turns(TurnBarriers{shared + kAt.turns}, first_turns(), work.steps, work.tiles.count, heads_apart(),
                [&](int tile) { return work.turn(p, work.tiles.first + tile); });
  }
  __forceinline__ void end_all_turns() const {
    end_turns(TurnBarriers{shared + kAt.turns}, first_turns(), work.steps, work.tiles.count, heads_apart());
  }
};

}  // namespace tessera
