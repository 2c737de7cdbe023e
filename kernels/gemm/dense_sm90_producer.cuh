// The producer of gemm/dense_sm90.cuh: one thread that issues the TMA loads of A and B, and, for an operand whose rows
// start anywhere, three warps that shift what was loaded.
#pragma once

#include "gemm/dense_sm90_config.h"
#include "gemm/dense_sm90_work.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/pipeline.cuh"
#include "tile/shift.cuh"

namespace tessera {

template <GemmDenseSm90Config config>
struct GemmDenseSm90Producer {
  using Params = GemmDenseSm90ParamsOf<config>;
  using Work = GemmDenseSm90Work;
  static constexpr gemm_sm90::Layout kAt = gemm_sm90::layout(config);
  static constexpr int kBlockK = gemm_sm90::kBlockK;
  static constexpr int kAtomBytes = gemm_sm90::kAtomBytes;
  static constexpr int kABytes = gemm_sm90::a_bytes(config), kBBytes = gemm_sm90::b_bytes(config);
  static constexpr bool kShiftsA = config.shifted == kShiftedA, kShiftsB = config.shifted == kShiftedB;
  static constexpr bool kShifts = kShiftsA || kShiftsB;
  // Bytes of a stage that TMA writes itself.
  static constexpr unsigned kStageBytes = (kShiftsA ? 0 : kABytes) + (kShiftsB ? 0 : kBBytes);
  static constexpr int kFrames = kShifts ? gemm_sm90::frames(config) : 1;
  static constexpr int kFrameBytes = gemm_sm90::frame_bytes(config);
  static constexpr unsigned short kBoth = 3;  // CTAs of the cluster

  const Params& p;
  unsigned shared;
  PipelineState<config.stages> pipe = {};
  PipelineState<kFrames> frame = {};

  static __forceinline__ void prefetch_tensor_maps(const Params& p) {
    prefetch_tensor_map(p.a[0]);
    prefetch_tensor_map(p.b[0]);
    if constexpr (config.tma_store) prefetch_tensor_map(p.out[0]);
  }

  __forceinline__ unsigned full(int index) const { return shared + kAt.full + index * kMbarrierBytes; }
  __forceinline__ unsigned empty(int index) const { return shared + kAt.empty + index * kMbarrierBytes; }
  __forceinline__ unsigned frame_full(int index) const { return shared + kAt.frame_full + index * kMbarrierBytes; }
  __forceinline__ unsigned frame_empty(int index) const { return shared + kAt.frame_empty + index * kMbarrierBytes; }
  __forceinline__ unsigned frame_address(int index) const { return shared + kAt.frames + index * kFrameBytes; }

  // 64 rows of K, of 64 columns.
  template <int groups>
  __forceinline__ void load_atom(unsigned destination, const TensorMap (&maps)[groups], unsigned mbarrier, int column,
                                 int k, int layer, bool multicast) const {
#pragma unroll
    for (int group = 0; group < groups; ++group) {
      const unsigned to = destination + group * (kAtomBytes / groups);
      if (multicast) {
        tma_load_multicast(to, maps[group], mbarrier, kBoth, column, k / groups, layer, 0);
      } else {
        tma_load(to, maps[group], mbarrier, column, k / groups, layer, 0);
      }
    }
  }

  __forceinline__ void load_a(unsigned destination, unsigned mbarrier, const Work& work, int step, int atoms) const {
    const int row = work.row, k = work.first_k + step * kBlockK;
    const int layer = config.grouping == kBatched ? work.group * p.a_layers : 0;
    if constexpr (config.a_transposed) {
      for (int atom = 0; atom < atoms; ++atom) {
        load_atom(destination + atom * kAtomBytes, p.a, mbarrier, row + atom * 64, k, layer, false);
      }
    } else {
      constexpr int kGroups = gemm_sm90::m_groups(config);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        tma_load(destination + group * (kABytes / kGroups), p.a[group], mbarrier, k, row / kGroups, layer, 0);
      }
    }
  }

  // A cluster's CTA loads the half of B that its rank selects. Gated: block_n / 2 columns of B, then as many of the gate.
  __forceinline__ void load_b(unsigned destination, unsigned mbarrier, const Work& work, int step,
                              unsigned rank) const {
    const int column = work.column, k = work.first_k + step * kBlockK;
    const int layer = config.grouping == kBatched || config.grouping == kRaggedRows ? work.group : 0;
    if constexpr (config.b_transposed) {
      constexpr int kAtoms = gemm_sm90::b_atoms(config);
#pragma unroll
      for (int atom = 0; atom < kAtoms; ++atom) {
        if (config.cluster > 1 && atom % 2 != static_cast<int>(rank)) continue;
        const bool of_gate = config.gated && atom >= kAtoms / 2;
        const int x = column + (of_gate ? atom - kAtoms / 2 : atom) * 64;
        const unsigned to = destination + atom * kAtomBytes;
        if (of_gate) {
          if constexpr (config.cluster > 1) {
            tma_load_multicast(to, p.gate, mbarrier, kBoth, x, k, layer, 0);
          } else {
            tma_load(to, p.gate, mbarrier, x, k, layer, 0);
          }
        } else {
          load_atom(to, p.b, mbarrier, x, k, layer, config.cluster > 1);
        }
      }
    } else if constexpr (config.cluster > 1) {
      constexpr int kRows = config.block_n / 2;
      const bool of_gate = config.gated && rank == 1;
      tma_load_multicast(destination + rank * (kRows * kBlockK * 2), of_gate ? p.gate : p.b[0], mbarrier, kBoth, k,
                         column + (config.gated ? 0 : static_cast<int>(rank) * kRows), layer, 0);
    } else {
      tma_load(destination, p.b[0], mbarrier, k, column, layer, 0);
      if constexpr (config.gated) {
        tma_load(destination + config.block_n / 2 * (kBlockK * 2), p.gate, mbarrier, k, column, layer, 0);
      }
    }
  }

  __forceinline__ void load_frame(const Work& work, int step) {
    const unsigned loaded = frame_full(frame.index), to = frame_address(frame.index);
    mbarrier_wait_parity(frame_empty(frame.index), frame.parity ^ 1);
    mbarrier_arrive_expect_tx(loaded, kFrameBytes);
    constexpr int kAtoms = gemm_sm90::shifted_atoms(config) + 1;  // if MN-major
    if constexpr (kShiftsA) {
      load_a(to, loaded, work, step, kAtoms);
    } else {
      for (int atom = 0; atom < kAtoms; ++atom) {
        load_atom(to + atom * kAtomBytes, p.b, loaded, work.column + atom * 64, step * kBlockK, 0, false);
      }
    }
    frame.advance();
  }

  __forceinline__ void run() {
    pdl_wait_and_launch_dependents();
    const unsigned rank = config.cluster > 1 ? cluster_cta_rank() : 0;
    GemmDenseSm90Tiles<config, false> tiles{p};
    Work work;
    while (tiles.next(work)) {
      if constexpr (kShifts) load_frame(work, work.first_step);
      for (int step = work.first_step; step < work.end_step; ++step) {
        mbarrier_wait_parity(empty(pipe.index), pipe.parity ^ 1);
        mbarrier_arrive_expect_tx(full(pipe.index), kStageBytes);
        if constexpr (!kShiftsA) {
          load_a(shared + kAt.a + pipe.index * kABytes, full(pipe.index), work, step, config.block_m / 64);
        }
        if constexpr (!kShiftsB) {
          load_b(shared + kAt.b + pipe.index * kBBytes, full(pipe.index), work, step, rank);
        }
        pipe.advance();
        // If columns are of K, a row continues in the frame after the last step's, too.
        if (kShifts && (!config.a_transposed || step + 1 < work.end_step)) load_frame(work, step + 1);
      }
    }
  }

  // Moves rows of an atom in `from` so that they begin at their own first element. `next`: the atom in which they continue.
  // Eight lanes share a row. group_rows: rows with the same shift. Loads of several rows at a time, to overlap their
  // latencies, made it slower: it is the bandwidth of shared memory that counts.
  template <int rows, int group_rows>
  __forceinline__ void shift_rows(unsigned to, unsigned from, unsigned next, int warp, int lane) const {
    constexpr int kStep = gemm_sm90::kShiftWarps * 4;
    const int chunk = lane % 8;
#pragma unroll 1
    for (int first = warp * 4; first < rows; first += kStep) {
      const int row = first + lane / 8;
      const Words4 own = load_shared_16(from + row * 128 + (chunk ^ (row & 7)) * 16);
      const unsigned after = chunk < 7 ? from : next;
      const Words4 behind = load_shared_16(after + row * 128 + (((chunk + 1) % 8) ^ (row & 7)) * 16);
      store_shared_16(to + row * 128 + (chunk ^ (row & 7)) * 16,
                      eight_of_sixteen(own, behind, p.shift[first / group_rows]));
    }
  }

  // warp: 0 to kShiftWarps - 1.
  __forceinline__ void run_shift(int warp, int lane) {
    const unsigned stage_base = shared + (kShiftsA ? kAt.a : kAt.b);
    constexpr int kStageStride = kShiftsA ? kABytes : kBBytes;
    const auto release = [&](int index) {
      if (lane == 0) mbarrier_arrive(frame_empty(index));
    };
    GemmDenseSm90Tiles<config, true> tiles{p};
    Work work;
    while (tiles.next(work)) {
      for (int step = work.first_step; step < work.end_step; ++step) {
        const unsigned to = stage_base + pipe.index * kStageStride;
        const int current = frame.index;
        mbarrier_wait_parity(frame_full(current), frame.parity);
        frame.advance();
        if constexpr (!config.a_transposed) mbarrier_wait_parity(frame_full(frame.index), frame.parity);
        mbarrier_wait_parity(empty(pipe.index), pipe.parity ^ 1);
        const unsigned from = frame_address(current);
        if constexpr (config.a_transposed) {
#pragma unroll 1
          for (int atom = 0; atom < gemm_sm90::shifted_atoms(config); ++atom) {
            shift_rows<64, 8>(to + atom * kAtomBytes, from + atom * kAtomBytes, from + (atom + 1) * kAtomBytes, warp,
                              lane);
          }
        } else {
          shift_rows<config.block_m, config.block_m / 8>(to, from, frame_address(frame.index), warp, lane);
        }
        fence_proxy_async();
        __syncwarp();
        release(current);
        if (lane == 0) mbarrier_arrive(full(pipe.index));
        pipe.advance();
      }
      if constexpr (!config.a_transposed) {
        release(frame.index);
        frame.advance();
      }
    }
  }
};

}  // namespace tessera
