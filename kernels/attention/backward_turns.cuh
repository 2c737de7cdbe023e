// How the warpgroups of a Hopper backward take and end their turns (attention/backward_turns.h).
#pragma once

#include "attention/backward_turns.h"
#include "ptx/acquire_release.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/dq_sums.cuh"

namespace tessera {

// A release of several counters: the fence, then the additions. What other threads of the CTA did before they arrived at
// an mbarrier counts, too, if the thread waited for that.
__forceinline__ void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Whether the phase of that parity of an mbarrier is complete, without waiting (ptx/mbarrier.cuh).
__forceinline__ bool mbarrier_is_complete(unsigned mbarrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(mbarrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Four sums that another CTA wrote before its release.
__forceinline__ void load_coherent(float (&d)[4], const float* address) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "l"(address)
               : "memory");
}
__forceinline__ void store_sums(float* address, const float (&d)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(d[0]), "f"(d[1]), "f"(d[2]), "f"(d[3])
               : "memory");
}

__forceinline__ void await_turn(const unsigned* turns, unsigned before) {
  while (load_acquire(turns) != before) {
  }
}

// If the query heads of a key head are divided among CTAs: adds a warp's dK or dV of 16 keys, from `row` of the sequence on,
// to their sums. In turns, part 0 is first: its CTA has the smaller index. Each warp has a counter for its 16 keys of dK, and
// of dV. p and work are of a Hopper backward.
template <bool in_turns, int block_k, int dim, class Params, class Work>
__forceinline__ void add_part(const float (&values)[dim / 2], const DqSums& sums, unsigned* turns, const Params& p,
                              const Work& work, int row, int lane) {
  if (row >= work.len_k) return;
  constexpr int kRows = dim / 8 * 128;  // sums of 16 keys
  float* const tiles =
      dq_sums_of(sums, p.cu_seqlens_k, work.batch, work.kv_head, static_cast<int>(p.heads_q / p.group), block_k, dim) +
      static_cast<Index>(row / 16) * kRows;
  unsigned* const turn = turns + (tiles - sums.data) / kRows;
  if constexpr (in_turns) await_turn(turn, work.part);
#pragma unroll
  for (int n = 0; n < dim / 8; ++n) {
    add_to_sums(tiles + n * 128, reinterpret_cast<const float(&)[4]>(values[n * 4]), lane);
  }
  if constexpr (in_turns) {
    fence_acq_rel_gpu();
    __syncwarp();
    if (lane == 0) add_relaxed(turn, 1);
  }
}

// If the queries of a key tile are divided among CTAs: counts a warp's additions, and returns how many were counted before.
__forceinline__ unsigned count_added(unsigned* added, int lane) {
  __syncwarp();
  unsigned before = 0;
  if (lane == 0) before = increment_acq_rel(added);
  __syncwarp();
  return __shfl_sync(0xffffffffu, before, 0);
}

struct TurnBarriers {
  unsigned first;  // address

  __forceinline__ unsigned come(int step) const { return first + step % kTurnStages * kMbarrierBytes; }
  __forceinline__ unsigned taken(int step) const { return come(step) + kTurnStages * kMbarrierBytes; }
  __forceinline__ unsigned left(int step) const { return taken(step) + kTurnStages * kMbarrierBytes; }
  __forceinline__ unsigned noticed(int step) const { return left(step) + kTurnStages * kMbarrierBytes; }
  static __forceinline__ unsigned parity(int step) { return step / kTurnStages % 2; }

  __forceinline__ void init() const {
    for (int i = 0; i < kTurnStages; ++i) {
      mbarrier_init(come(i), 1);
      mbarrier_init(taken(i), 4);
      mbarrier_init(left(i), 4);
      mbarrier_init(noticed(i), 1);
    }
  }
  // The dQ warpgroup: waits for its turn, and so that turns that it left have been noticed.
  __forceinline__ void take(int step) const {
    mbarrier_wait_parity(come(step), parity(step));
    mbarrier_wait_parity(noticed(step), parity(step) ^ 1);
  }
  // One lane of each of its warps, after the warp's additions.
  __forceinline__ void leave(int step) const {
    mbarrier_arrive(taken(step));
    mbarrier_arrive(left(step));
  }
};

// Waits for the turns, on a thread of another warpgroup. turns: the counter of the first step's query tile. turn_at(i): how
// many key tiles come before, at a head's query tile i. tiles: of a head. heads_apart: from a head's first counter to the
// next one's.
template <class TurnAt>
__forceinline__ void await_turns(const TurnBarriers& barriers, const unsigned* turns, int steps, int tiles,
                                 int heads_apart, const TurnAt& turn_at) {
  int tile = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    mbarrier_wait_parity(barriers.taken(step), TurnBarriers::parity(step) ^ 1);
    const unsigned before = turn_at(tile);
    if (before > 0) {
      while (load_acquire(turns + tile) != before) {
      }
    }
    mbarrier_arrive(barriers.come(step));
    if (++tile == tiles) {  // continue with the next head
      tile = 0;
      turns += heads_apart;
    }
  }
}

// Ends the turns, on a thread of another warpgroup: before that, the additions must have been performed, and waiting for
// it may take longer than a step, so turns that have been left meanwhile are ended together. Arguments as above.
__forceinline__ void end_turns(const TurnBarriers& barriers, unsigned* turns, int steps, int tiles, int heads_apart) {
  int tiles_left = tiles;
  int step = 0;
  while (step < steps) {
    mbarrier_wait_parity(barriers.left(step), TurnBarriers::parity(step));
    int end = step;
    do {
      mbarrier_arrive(barriers.noticed(end));
      ++end;
    } while (end < steps && mbarrier_is_complete(barriers.left(end), TurnBarriers::parity(end)));
    fence_acq_rel_gpu();
#pragma unroll 1
    for (; step < end; ++step) {
      add_relaxed(turns++, 1);
      if (--tiles_left == 0) {  // continue with the next head
        tiles_left = tiles;
        turns += heads_apart - tiles;
      }
    }
  }
}

}  // namespace tessera
