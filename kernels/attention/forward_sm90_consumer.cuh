// A consumer of attention/forward_sm90.cuh and attention/forward_fp8_sm90.cuh: a warpgroup that computes 64 rows of O from
// scores to store. Here is its part of the pipeline; what it computes with is its Math (forward_sm90_math.cuh,
// forward_fp8_sm90_math.cuh).
#pragma once

#include "attention/forward_sm90_work_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/mask.h"
#include "tile/pipeline.cuh"

namespace tessera {

template <auto config, class Math>
struct ForwardSm90Consumer {
  using WorkTileInfo = ForwardSm90WorkTileInfo;
  static constexpr auto kAt = layout_of(config);
  static constexpr int kValueTiles = config.dim_v / 8;
  static constexpr bool kReleasesQLate = loads_q_late(config);
  static constexpr int kStep = config.intra_cta_split ? config.consumers : 1;  // from one key tile to the next
  static constexpr int kPingPongBarrier = 1;  // named barrier of consumer 0; those of the other consumers follow

  Math math;  // with its rows, scores, probabilities and output
  unsigned shared;

  PipelineState<config.q_stages> q_pipe = {};
  PipelineState<config.stages, kStep> k_pipe = {config.intra_cta_split ? math.rows.consumer : 0}, v_pipe = k_pipe;
  PipelineState<kWorkTileSlots> work_pipe = {};
  PipelineState<1> parts_pipe = {};

  __forceinline__ void run() {
    if constexpr (config.few_keys) {
      attend_few_keys();
    } else {
      attend_keys_in_tiles();
    }
  }

  // few_keys: K and V are released after the last work tile that needs them. Stages follow from two counts, because four
  // CTAs share the registers.
  __forceinline__ void attend_few_keys() {
    unsigned keys = 0;  // released so far
    for (unsigned tile = 0;; ++tile) {
      const unsigned q_stage = tile % config.q_stages, slot = tile % kWorkTileSlots;
      const unsigned k_stage = keys % config.stages, k_parity = keys / config.stages % 2;
      wait(kAt.q_full, q_stage, tile / config.q_stages % 2);
      const WorkTileInfo info = read_info(slot);
      if (info.first_q == WorkTileInfo::kNoWork) break;
      math.rows.start(info);
      // S = Q K^T.
      wait(kAt.k_full, k_stage, k_parity);
      wgmma_discard(math.scores);
      wgmma_fence();
      math.issue_scores(shared + kAt.q + q_stage * kAt.q_stage, shared + kAt.k + k_stage * kAt.k_stage);
      wgmma_commit_group();
      wgmma_wait_group<0>();
      wgmma_fence_operand(math.scores);
      mbarrier_arrive(shared + kAt.q_empty + q_stage * kMbarrierBytes);  // every lane, as in release_q()
      if (info.ends_keys) release(kAt.k_empty, k_stage);
      math.softmax_of_few_keys();
      math.pack_weights();
      // O = P V.
      wait(kAt.v_full, k_stage, k_parity);
      wgmma_discard(math.output);
      wgmma_fence();
      math.issue_output(shared + kAt.v + k_stage * kAt.v_stage);
      wgmma_commit_group();
      wgmma_wait_group<0>();
      math.finish_output();
      if (info.ends_keys) {
        release(kAt.v_empty, k_stage);
        ++keys;
      }
      math.store(read_info(slot));  // again: registers are scarce until here
    }
  }

  __forceinline__ void attend_keys_in_tiles() {
    if (math.rows.consumer == config.consumers - 1) ping_pong_arrive();  // consumer 0 goes first
    while (true) {
      wait(kAt.q_full, q_pipe.index, q_pipe.parity);
      const WorkTileInfo info = read_info(work_pipe.index);
      if (info.first_q == WorkTileInfo::kNoWork) break;
      const KeyTiles tiles = tiles_of(info);
      start_scores(tiles);
      math.reset();
      if (tiles.sees_keys()) main_loop(tiles);
      for (int i = 0; i < tiles.after(); ++i) skip_tile();
      math.finish();
      if constexpr (kReleasesQLate) release_q();
      epilogue(read_info(work_pipe.index));  // again: registers are scarce until here
      work_pipe.advance();
    }
  }

  // Key tiles of a work tile that this consumer's rows see, processed from last to first. All key tiles of the CTA pass
  // through the pipeline, so those before and after are skipped. With an intra-CTA split, the consumer gets every
  // kStep-th tile from `last` on, and no others.
  struct KeyTiles {
    int cta_first, cta_last;
    int first, last;
    KeyRange keys;

    __forceinline__ bool sees_keys() const { return last >= first; }
    __forceinline__ int before() const { return sees_keys() ? cta_last - last : 0; }  // tiles to skip
    __forceinline__ int after() const { return sees_keys() ? first - cta_first : cta_last - cta_first + 1; }
  };

  __forceinline__ WorkTileInfo read_info(int slot) const {
    WorkTileInfo info;
    Words4(&words)[2] = reinterpret_cast<Words4(&)[2]>(info);
    words[0] = load_shared_16(shared + kAt.work_tiles + slot * kWorkTileBytes);
    words[1] = load_shared_16(shared + kAt.work_tiles + slot * kWorkTileBytes + 16);
    return info;
  }

  __forceinline__ KeyTiles tiles_of(const WorkTileInfo& info) {
    math.rows.start(info);
    KeyTiles tiles{info.first_tile, info.last_tile, 0, -1,
                   info.keys_of<config>(math.rows.p, math.rows.first_q, kConsumerRows)};
    if constexpr (config.intra_cta_split) {
      const int consumer = math.rows.consumer;
      const int after_first = consumer < info.first_consumer ? consumer + config.consumers - info.first_consumer
                                                             : consumer - info.first_consumer;
      tiles.first = info.first_tile;
      tiles.last = tiles.cta_last = info.last_tile - after_first;
    } else if (info.has_keys()) {
      tiles.first = tiles.keys.first_tile(config.block_k);
      tiles.last = tiles.keys.last_tile(config.block_k);
    }
    math.start(info, tiles.sees_keys());
    return tiles;
  }

  __forceinline__ void wait(int mbarriers, int index, unsigned parity) {
    mbarrier_wait_parity(shared + mbarriers + index * kMbarrierBytes, parity);
  }
  // One arrival per warp: a warp's reads by wgmma are complete when its own wait for the product returns.
  __forceinline__ void release(int mbarriers, int index) {
    if (math.rows.lane == 0) mbarrier_arrive(shared + mbarriers + index * kMbarrierBytes);
  }
  __forceinline__ void release_q() {
    // Every lane arrives: each has read the work tile info before, and the slot may be reused after this.
    mbarrier_arrive(shared + kAt.q_empty + q_pipe.index * kMbarrierBytes);
    q_pipe.advance();
  }

  __forceinline__ void ping_pong_wait() {
    if constexpr (config.ping_pong && config.consumers > 1) {
      named_barrier_sync(kPingPongBarrier + math.rows.consumer, 2 * kWarpgroup);
    }
  }
  __forceinline__ void ping_pong_arrive() {
    if constexpr (config.ping_pong && config.consumers > 1) {
      const int next = math.rows.consumer + 1 == config.consumers ? 0 : math.rows.consumer + 1;
      named_barrier_arrive(kPingPongBarrier + next, 2 * kWarpgroup);
    }
  }

  // A key tile that none of these rows sees. No product keeps the lanes together here: a stage is released when all have
  // seen it full, because the mbarrier of a stage that is filled again has the parity of the phase before.
  __forceinline__ void skip_tile() {
    ping_pong_wait();
    ping_pong_arrive();
    wait(kAt.k_full, k_pipe.index, k_pipe.parity);
    __syncwarp();
    release(kAt.k_empty, k_pipe.index);
    k_pipe.advance();
    wait(kAt.v_full, v_pipe.index, v_pipe.parity);
    __syncwarp();
    release(kAt.v_empty, v_pipe.index);
    v_pipe.advance();
  }

  // On return, the scores of the last key tile are in flight.
  __forceinline__ void start_scores(const KeyTiles& tiles) {
    for (int i = 0; i < tiles.before(); ++i) skip_tile();
    if (tiles.sees_keys()) {
      if constexpr (Math::kRoundsQ) {
        math.round_q(q_stage(), q_tile());
        if constexpr (!kReleasesQLate) release_q();
      }
      math.load_scales(tiles.last);
      ping_pong_wait();
      wgmma_fence();
      issue_scores();
      ping_pong_arrive();
    } else if constexpr (!kReleasesQLate) {
      release_q();
    }
  }

  // O and the row sums over all key tiles.
  __forceinline__ void main_loop(const KeyTiles& tiles) {
    wgmma_wait_group<0>();
    for (int tile = tiles.last;; tile -= kStep) {
      wgmma_fence_operand(math.scores);
      const bool grown = math.softmax_of(tile, tiles.keys, [&] { math.recompute_scores(q_tile(), k_tile()); });
      release(kAt.k_empty, k_pipe.index);
      k_pipe.advance();
      wgmma_fence_operand(math.scores);  // keeps the exponentials before the wait: the product with V runs meanwhile
      const bool is_last = tile - kStep < tiles.first;
      if (!Math::kRoundsQ && is_last) release_q();
      if (tile < tiles.last) {
        wgmma_wait_group<0>();
        finish_output();
        math.rescale_output(grown);
      }
      math.pack_weights();
      if (is_last) break;
      math.load_scales(tile - kStep);
      ping_pong_wait();
      wgmma_fence();
      issue_scores();
      issue_output();
      ping_pong_arrive();
      wgmma_wait_group<1>();
    }
    wgmma_fence();
    issue_output();
    wgmma_wait_group<0>();
    finish_output();
  }

  // After a wait for the product with V.
  __forceinline__ void finish_output() {
    math.finish_output();
    release(kAt.v_empty, v_pipe.index);
    v_pipe.advance();
  }

  __forceinline__ unsigned q_stage() const { return shared + kAt.q + q_pipe.index * kAt.q_stage; }
  // As the products take it.
  __forceinline__ unsigned q_tile() const {
    if constexpr (Math::kRoundsQ) {
      return shared + kAt.q_rounded;
    } else {
      return q_stage();
    }
  }
  __forceinline__ unsigned k_tile() const { return shared + kAt.k + k_pipe.index * kAt.k_stage; }

  // S = Q K^T.
  __forceinline__ void issue_scores() {
    wait(kAt.k_full, k_pipe.index, k_pipe.parity);
    math.issue_scores(q_tile(), k_tile());
    wgmma_commit_group();
  }
  // O += P V.
  __forceinline__ void issue_output() {
    wait(kAt.v_full, v_pipe.index, v_pipe.parity);
    math.issue_output(shared + kAt.v + v_pipe.index * kAt.v_stage);
    wgmma_commit_group();
  }

  __forceinline__ void epilogue(const WorkTileInfo& info) {
    if constexpr (config.intra_cta_split) {
      if (math.rows.consumer > 0) return store_partial();
      combine_partials();
    }
    math.store(info);
  }

  // Intra-CTA split: where this thread's values of consumer `of`, which is not the first, are in shared memory. Threads
  // are adjacent, so that a warp has no bank conflicts.
  __forceinline__ unsigned partial_of(int of) const {
    return shared + kAt.parts + (of - 1) * kAt.part + (math.rows.warp * 32 + math.rows.lane) * 16;
  }
  __forceinline__ void store_partial() {
    wait(kAt.parts_empty, 0, parts_pipe.parity ^ 1);
    const unsigned partial = partial_of(math.rows.consumer);
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const float* const o = math.output + n * 4;
      store_shared_floats(partial + n * kWarpgroup * 16, o[0], o[1], o[2], o[3]);
    }
    store_shared_floats(partial + kValueTiles * kWarpgroup * 16, math.softmax.reference[0][0],
                        math.softmax.reference[0][1], math.softmax.row_sum[0][0], math.softmax.row_sum[0][1]);
    mbarrier_arrive(shared + kAt.parts_full);
    parts_pipe.advance();
  }
  __forceinline__ void combine_partials() {
    wait(kAt.parts_full, 0, parts_pipe.parity);
#pragma unroll 1  // registers suffice for one partial at a time
    for (int of = 1; of < config.consumers; ++of) {
      float of_rows[4], mine[1][2], theirs[1][2];
      load_shared_floats(of_rows, partial_of(of) + kValueTiles * kWarpgroup * 16);
      math.softmax.merge({{of_rows[0], of_rows[1]}}, {{of_rows[2], of_rows[3]}}, mine, theirs);
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        float other[4];
        load_shared_floats(other, partial_of(of) + n * kWarpgroup * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          math.output[n * 4 + i] = math.output[n * 4 + i] * mine[0][i / 2] + other[i] * theirs[0][i / 2];
      }
    }
    mbarrier_arrive(shared + kAt.parts_empty);
    parts_pipe.advance();
  }
};

}  // namespace tessera
