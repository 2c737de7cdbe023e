// The forward of an MLP with few output columns, such as heads side by side, for Hopper: out = f(x up^T) down^T. Entry point:
// mlp_narrow_sm90, below.
//
// Algorithm: each CTA is persistent and loops over row tiles of 128. It keeps the rows of x in shared memory and walks the
// hidden columns in tiles of block_h: a tile of f(x up^T) is computed in registers and multiplied from there with its columns
// of down. So hidden rows never reach memory. The sums of out stay in registers until the end of a row tile.
//
// Roles: warpgroup 0 is the producer, one thread of which issues all TMA loads. Warpgroups 1 and 2 are consumers and own
// hidden tiles in turn (ping-pong), all 128 rows of them: one multiplies with up while the other one's activation and second
// product run. Each has its own sums of out; at the end of a row tile, each gives the other one 64 rows of them, and
// stores the other 64.
//
//   shared memory:  x [8][128, 64]    up [stages][block_h, 64]    down [consumers][block_h / 64][32, 64]
//   registers:      hidden sums [128, block_h] and sums of out [128, 32], fp32
//
//   TMA          | x | tile 0 | tile 1 | tile 2 | tile 3 | ...
//   consumer 0       | multiply        | f, down | multiply | ...
//   consumer 1                | multiply         | f, down  | ...
//
// Tiles: 128 x 160 hidden sums and 128 x 32 of out are 192 registers of a thread. Eight atoms of x take 128 KB, so three stages
// of 20 KB remain. Cluster: two CTAs with adjacent row tiles each load half of a stage of up and multicast it.
#pragma once

#include "gemm/epilogue.cuh"
#include "mlp/narrow_sm90_config.h"
#include "ptx/barrier.cuh"
#include "ptx/cluster.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/pipeline.cuh"

namespace tessera {

template <MlpNarrowSm90Config config>
struct MlpNarrowSm90Producer {
  static constexpr mlp_narrow_sm90::Layout kAt = mlp_narrow_sm90::layout(config);

  const MlpNarrowSm90Params& p;
  unsigned shared;

  __forceinline__ void run() {
    using namespace mlp_narrow_sm90;
    pdl_wait_and_launch_dependents();
    constexpr int kRows = config.block_h / config.cluster;
    const unsigned rank = config.cluster > 1 ? cluster_cta_rank() : 0;
    PipelineState<config.stages> pipe;
    unsigned x_parity = 0, down_parity[2] = {};
    int consumer = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < p.row_tiles; tile += static_cast<int>(gridDim.x)) {
      mbarrier_wait_parity(shared + kAt.x_empty, x_parity ^ 1);
      x_parity ^= 1;
      for (int step = 0; step < p.k_steps; ++step) {
        const unsigned full = shared + kAt.x_full + step * kMbarrierBytes;
        mbarrier_arrive_expect_tx(full, kAtomBytes);
        tma_load(shared + kAt.x + step * kAtomBytes, p.x, full, step * 64, tile * kBlockM, 0, 0);
      }
      for (int hidden = 0; hidden < p.hidden_tiles; ++hidden) {
        const int first = hidden * config.block_h;
        for (int step = 0; step < p.k_steps; ++step) {
          const unsigned full = shared + kAt.full + pipe.index * kMbarrierBytes;
          const unsigned to = shared + kAt.up + pipe.index * stage_bytes(config) + rank * kRows * 128;
          mbarrier_wait_parity(shared + kAt.empty + pipe.index * kMbarrierBytes, pipe.parity ^ 1);
          mbarrier_arrive_expect_tx(full, stage_bytes(config));
          if constexpr (config.cluster > 1) {
            tma_load_multicast(to, p.up, full, 3, step * 64, first + static_cast<int>(rank) * kRows, 0, 0);
          } else {
            tma_load(to, p.up, full, step * 64, first, 0, 0);
          }
          pipe.advance();
        }
        // After the tile's stages: by now its consumer has finished with the columns of down before, or is about to.
        const unsigned full = shared + kAt.down_full + consumer * kMbarrierBytes;
        mbarrier_wait_parity(shared + kAt.down_empty + consumer * kMbarrierBytes,
                             (consumer == 0 ? down_parity[0] : down_parity[1]) ^ 1);
        (consumer == 0 ? down_parity[0] : down_parity[1]) ^= 1;
        mbarrier_arrive_expect_tx(full, down_bytes(config));
        for (int atom = 0; atom < down_atoms(config); ++atom) {
          tma_load(shared + kAt.down + consumer * down_bytes(config) + atom * kDownAtomBytes, p.down, full,
                   first + atom * 64, 0, 0, 0);
        }
        consumer ^= 1;
      }
    }
  }
};

template <MlpNarrowSm90Config config>
struct MlpNarrowSm90Consumer {
  static constexpr mlp_narrow_sm90::Layout kAt = mlp_narrow_sm90::layout(config);
  static constexpr int kRowTiles = 2;                            // of 64 rows
  static constexpr int kOut = mlp_narrow_sm90::kOutColumns / 2;  // sums of a lane in 64 rows
  static constexpr int kTurn = 1;      // named barrier of consumer 0: it may wait for its stages
  static constexpr int kExchange = 3;  // named barrier of both consumers

  const MlpNarrowSm90Params& p;
  unsigned shared;
  int consumer;  // warp-uniform, and the compiler knows it
  int lane, warp;
  PipelineState<config.stages> pipe = {};
  unsigned x_parity = 0, down_parity = 0;

  using Sums = float[kRowTiles][config.block_h / 2];  // [64 rows][tile of 8 columns][value of a lane]
  float out[kRowTiles][kOut];

  __forceinline__ void multiply(Sums& sums, int step) const {
    const MatrixDescriptor of_x = matrix_descriptor<64>(shared + kAt.x + step * mlp_narrow_sm90::kAtomBytes, 0);
    const MatrixDescriptor of_up =
        matrix_descriptor<64>(shared + kAt.up + pipe.index * mlp_narrow_sm90::stage_bytes(config), 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
        Wgmma<config.block_h>::template shared_shared<config.dtype, false>(
            sums[row_tile], of_x.at(row_tile * 64 * 128 + k * 32), of_up.at(k * 32), true);
      }
    }
  }

  // To the producers of all CTAs that write to this stage.
  __forceinline__ void release(int stage) const {
    const unsigned empty = shared + kAt.empty + stage * kMbarrierBytes;
    if constexpr (config.cluster > 1) {
      if (lane < config.cluster) mbarrier_arrive_at(empty, lane);
    } else {
      if (lane == 0) mbarrier_arrive(empty);
    }
  }

  // The hidden sums of a tile. A consumer waits for its stages only after the other one has seen all of its own: an
  // mbarrier tells one phase from the next by parity alone.
  __forceinline__ void accumulate(Sums& sums) {
    named_barrier_sync(kTurn + consumer, 256);
    int previous = 0;
    for (int step = 0; step < p.k_steps; ++step) {
      mbarrier_wait_parity(shared + kAt.x_full + step * kMbarrierBytes, x_parity);
      mbarrier_wait_parity(shared + kAt.full + pipe.index * kMbarrierBytes, pipe.parity);
      wgmma_fence();
      multiply(sums, step);
      wgmma_commit_group();
      if (step > 0) {
        wgmma_wait_group<1>();
        release(previous);
      }
      previous = pipe.index;
      pipe.advance();
    }
    named_barrier_arrive(kTurn + 1 - consumer, 256);
    wgmma_wait_group<0>();
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) wgmma_fence_operand(sums[row_tile]);
    release(previous);
  }

  // out += f(sums) down^T. The sums of a row tile become A of the second product where they are.
  __forceinline__ void multiply_down(const Sums& sums) {
    constexpr int kSteps = config.block_h / 16;
    const unsigned down = shared + kAt.down + consumer * mlp_narrow_sm90::down_bytes(config);
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      unsigned hidden[kSteps][4];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = sums[row_tile] + k * 8 + i * 2;
          hidden[k][i] = pack<config.dtype>(activate<config.activation>(pair[0]), activate<config.activation>(pair[1]));
        }
      }
      if (row_tile == 0) mbarrier_wait_parity(shared + kAt.down_full + consumer * kMbarrierBytes, down_parity);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const MatrixDescriptor of_down = matrix_descriptor<64>(down + k / 4 * mlp_narrow_sm90::kDownAtomBytes, 0);
        Wgmma<mlp_narrow_sm90::kOutColumns>::template registers_shared<config.dtype, false>(
            out[row_tile], hidden[k], of_down.at(k % 4 * 32), true);
      }
      wgmma_commit_group();
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) wgmma_fence_operand(out[row_tile]);
    if (lane == 0) mbarrier_arrive(shared + kAt.down_empty + consumer * kMbarrierBytes);
    down_parity ^= 1;
  }

  // The sums of 64 rows, from or for the other consumer, through the shared memory of x, which nobody reads any more.
  __forceinline__ unsigned exchange_address(int giver, int i) const {
    return shared + kAt.x + giver * (kOut * 512) + i * 512 + (warp * 32 + lane) * 16;
  }
  template <int own>
  __forceinline__ void give() const {
#pragma unroll
    for (int i = 0; i < kOut; i += 4) {
      const float* from = out[1 - own] + i;
      store_shared_floats(exchange_address(own, i), from[0], from[1], from[2], from[3]);
    }
  }
  // Both consumers wait at the same places of the code: compute-sanitizer takes bar.sync in two branches for divergence.
  __forceinline__ void exchange() const {
    named_barrier_sync(kExchange, 256);
    if (consumer == 0) {
      give<0>();
    } else {
      give<1>();
    }
    named_barrier_sync(kExchange, 256);
  }
  template <int own>
  __forceinline__ void add_and_store(int tile) const {
    const int row = tile * mlp_narrow_sm90::kBlockM + own * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kOut; i += 4) {
      float others[4];
      load_shared_floats(others, exchange_address(1 - own, i));
      const int column = i / 4 * 8 + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Index at = (row + half * 8) * p.out.row_stride + column;
        const bool exists = row + half * 8 < p.m;
        store_pair<config.dtype, config.pairs>(p.out.data, at, out[own][i + half * 2] + others[half * 2],
                                               out[own][i + half * 2 + 1] + others[half * 2 + 1],
                                               exists && column < p.n, exists && column + 1 < p.n);
      }
    }
    fence_proxy_async();  // TMA writes there next
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared + kAt.x_empty);
  }
  __forceinline__ void store(int tile) const {
    if (consumer == 0) {
      add_and_store<0>(tile);
    } else {
      add_and_store<1>(tile);
    }
  }

  // finish(tile): what becomes of a row tile's sums; it arrives at x_empty when it no longer needs the memory of x.
  template <class Finish>
  __forceinline__ void run(const Finish& finish) {
    if (consumer == 1) named_barrier_arrive(kTurn, 256);  // consumer 0 is first
    int turn = 0;
    for (int tile = static_cast<int>(blockIdx.x); tile < p.row_tiles; tile += static_cast<int>(gridDim.x)) {
#pragma unroll
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) out[row_tile][i] = 0.0f;
      }
      for (int hidden = 0; hidden < p.hidden_tiles; ++hidden) {
        if (turn == consumer) {
          Sums sums = {};  // set here, the last tile's are not kept in registers until now
          accumulate(sums);
          multiply_down(sums);
        } else {
          skip();
        }
        turn ^= 1;
      }
      exchange();
      finish(tile);
      x_parity ^= 1;
    }
  }

  // The stages of the other consumer's tile.
  __forceinline__ void skip() {
    const auto stages = static_cast<unsigned>(pipe.index + p.k_steps);
    pipe.parity ^= stages / config.stages & 1;
    pipe.index = static_cast<int>(stages % config.stages);
  }
};

// Sets up the CTA and runs its roles. consume: runs a consumer, which it gets.
template <MlpNarrowSm90Config config, class Consume>
__forceinline__ void mlp_narrow_sm90_roles(const MlpNarrowSm90Params& p, const Consume& consume) {
  using namespace mlp_narrow_sm90;
  static_assert(config.stages >= 2);
  static_assert(config.block_h % 16 == 0 && config.block_h >= 16 && config.block_h <= 160);
  static_assert(config.cluster == 1 || config.cluster == 2);
  constexpr Layout kAt = layout(config);
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kMostSteps; ++i) mbarrier_init(shared + kAt.x_full + i * kMbarrierBytes, 1);
    mbarrier_init(shared + kAt.x_empty, 8);
    for (int i = 0; i < config.stages; ++i) {
      mbarrier_init(shared + kAt.full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.empty + i * kMbarrierBytes, 4 * config.cluster);
    }
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(shared + kAt.down_full + i * kMbarrierBytes, 1);
      mbarrier_init(shared + kAt.down_empty + i * kMbarrierBytes, 4);
    }
    fence_mbarrier_init();
  }
  if constexpr (config.cluster > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  } else {
    __syncthreads();
  }
  // At the start a thread has 168 registers.
  if (warpgroup == 0) {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) MlpNarrowSm90Producer<config>{p, shared}.run();
    __syncwarp();
  } else {
    setmaxnreg_inc<232>();
    consume(MlpNarrowSm90Consumer<config>{p, shared, warpgroup - 1, static_cast<int>(threadIdx.x) % 32,
                                          static_cast<int>(threadIdx.x) % 128 / 32});
  }
  // The other CTA may still multicast into this one's shared memory, or arrive at its mbarriers.
  if constexpr (config.cluster > 1) {
    cluster_arrive_relaxed();
    cluster_wait();
  }
}

template <MlpNarrowSm90Config config>
__forceinline__ void mlp_narrow_sm90_forward(const MlpNarrowSm90Params& p) {
  mlp_narrow_sm90_roles<config>(
      p, [](MlpNarrowSm90Consumer<config> consumer) { consumer.run([&](int tile) { consumer.store(tile); }); });
}

}  // namespace tessera
