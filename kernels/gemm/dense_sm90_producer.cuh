// The producer of gemm/dense_sm90.cuh: one thread that issues the TMA loads of A and B.
#pragma once

#include "gemm/dense_sm90_config.h"
#include "gemm/dense_sm90_work.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"

namespace tessera {

template <GemmDenseSm90Config config>
struct GemmDenseSm90Producer {
  using Params = GemmDenseSm90ParamsOf<config>;
  using Work = GemmDenseSm90Work;
  static constexpr gemm_sm90::Layout kAt = gemm_sm90::layout(config);
  static constexpr int kBlockK = gemm_sm90::kBlockK;
  static constexpr int kAtomBytes = gemm_sm90::kAtomBytes;
  static constexpr int kABytes = gemm_sm90::a_bytes(config), kBBytes = gemm_sm90::b_bytes(config);
  static constexpr unsigned short kBoth = 3;  // CTAs of the cluster
  static constexpr bool kSharesB = gemm_sm90::shares_b(config);

  const Params& p;
  unsigned shared;
  PipelineState<config.stages> pipe = {};

  static __forceinline__ void prefetch_tensor_maps(const Params& p) {
    prefetch_tensor_map(p.a[0]);
    prefetch_tensor_map(p.b[0]);
    if constexpr (config.tma_store) prefetch_tensor_map(p.out[0]);
  }

  __forceinline__ unsigned full(int index) const { return shared + kAt.full + index * kMbarrierBytes; }
  __forceinline__ unsigned empty(int index) const { return shared + kAt.empty + index * kMbarrierBytes; }

  // 64 rows of K, of 64 columns.
  template <bool shared_by_both>
  __forceinline__ void load_atom(unsigned destination, const TensorMap& map, unsigned mbarrier, int column, int k,
                                 int layer) const {
    if constexpr (shared_by_both) {
      tma_load_multicast(destination, map, mbarrier, kBoth, column, k, layer, 0);
    } else {
      tma_load(destination, map, mbarrier, column, k, layer, 0);
    }
  }

  // Whether a step is of the second product; then it is counted from that one's first.
  __forceinline__ bool is_of_second(int& step) const {
    const bool of_second = config.sums_two && step >= p.k_steps / 2;
    if (of_second) step -= p.k_steps / 2;
    return of_second;
  }

  __forceinline__ void load_a(unsigned destination, unsigned mbarrier, const Work& work, int step,
                              unsigned rank) const {
    const TensorMap& a = is_of_second(step) ? p.a2 : p.a[config.strided == kStridedNone ? 0 : work.residue];
    const int row = work.row, k = work.first_k + step * kBlockK;
    const int layer = config.grouping == kBatched ? work.group * p.a_layers : 0;
    if constexpr (config.a_transposed) {
      for (int atom = 0; atom < config.block_m / 64; ++atom) {
        if (config.shares_a && atom % 2 != static_cast<int>(rank)) continue;
        load_atom<config.shares_a>(destination + atom * kAtomBytes, a, mbarrier, row + atom * 64, k, layer);
      }
    } else {
      tma_load(destination, a, mbarrier, k, row, layer, 0);
    }
  }

  // A cluster's CTA loads the half of B that its rank selects. Gated: block_n / 2 columns of B, then as many of the gate.
  __forceinline__ void load_b(unsigned destination, unsigned mbarrier, const Work& work, int step,
                              unsigned rank) const {
    // A shift along b's rows is one of where they begin; along its columns it is in the layer.
    const bool strided_m = config.strided == kStridedM;
    const TensorMap& b = is_of_second(step) ? p.b2 : p.b[config.strided == kStridedK ? work.residue : 0];
    const int column = work.column + (strided_m && config.b_transposed ? p.out_shift[work.residue] : 0);
    const int k = work.first_k + step * kBlockK - (strided_m && config.b_transposed ? p.a_shift[work.residue] : 0);
    const int layer = config.grouping == kBatched || config.grouping == kRaggedRows ? work.group
                      : strided_m                                                   ? work.residue * p.b_layers
                                                                                    : 0;
    if constexpr (config.b_transposed) {
      constexpr int kAtoms = gemm_sm90::b_atoms(config);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        if (kSharesB && atom % 2 != static_cast<int>(rank)) continue;
        const bool of_gate = config.gated && atom >= kAtoms / 2;
        const int x = column + (of_gate ? atom - kAtoms / 2 : atom) * 64;
        const unsigned to = destination + atom * kAtomBytes;
        load_atom<kSharesB>(to, of_gate ? p.gate : b, mbarrier, x, k, layer);
      }
    } else if constexpr (kSharesB) {
      constexpr int kRows = config.block_n / 2;
      const bool of_gate = config.gated && rank == 1;
      tma_load_multicast(destination + rank * (kRows * kBlockK * 2), of_gate ? p.gate : b, mbarrier, kBoth, k,
                         column + (config.gated ? 0 : static_cast<int>(rank) * kRows), layer, 0);
    } else {
      tma_load(destination, b, mbarrier, k, column, layer, 0);
      if constexpr (config.gated) {
        tma_load(destination + config.block_n / 2 * (kBlockK * 2), p.gate, mbarrier, k, column, layer, 0);
      }
    }
  }

  __forceinline__ void run() {
    pdl_wait_and_launch_dependents();
    const unsigned rank = config.cluster > 1 ? cluster_cta_rank() : 0;
    GemmDenseSm90Tiles<config, false> tiles{p};
    Work work;
    while (tiles.next(work)) {
      for (int step = work.first_step; step < work.end_step; ++step) {
        mbarrier_wait_parity(empty(pipe.index), pipe.parity ^ 1);
        mbarrier_arrive_expect_tx(full(pipe.index), kABytes + kBBytes);
        load_a(shared + kAt.a + pipe.index * kABytes, full(pipe.index), work, step, rank);
        load_b(shared + kAt.b + pipe.index * kBBytes, full(pipe.index), work, step, rank);
        pipe.advance();
      }
    }
  }
};

}  // namespace tessera
