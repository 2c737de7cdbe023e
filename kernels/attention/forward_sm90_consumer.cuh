// A consumer of attention/forward_sm90.cuh: a warpgroup that computes 64 rows of O from scores to store.
#pragma once

#include "attention/forward_sm90_config.h"
#include "attention/forward_sm90_work_tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/mask.h"
#include "tile/online_softmax.cuh"
#include "tile/pipeline.cuh"
#include "tile/quad.cuh"
#include "tile/sequence.cuh"

namespace tessera {

template <AttentionForwardSm90Config config>
struct ForwardSm90Consumer {
  using WorkTileInfo = ForwardSm90WorkTileInfo;
  static constexpr DType kType = config.dtype;
  static constexpr ForwardSm90Layout kAt = forward_sm90_layout(config);
  static constexpr int kMinAtom = config.min_atom;
  static constexpr int kKeyTiles = config.block_k / 8;
  static constexpr int kValueTiles = config.dim_v / 8;
  static constexpr int kQkSteps = (config.dim_qk + 15) / 16;
  static constexpr int kPvSteps = config.block_k / 16;
  static constexpr int kStep = config.intra_cta_split ? config.consumers : 1;  // from one key tile to the next
  static constexpr int kPingPongBarrier = 1;  // named barrier of consumer 0; those of the other consumers follow

  const AttentionForwardSm90Params& p;
  unsigned shared;
  int consumer;  // warp-uniform, and the compiler knows it
  int lane, warp;

  PipelineState<config.q_stages> q_pipe = {};
  PipelineState<config.stages, kStep> k_pipe = {config.intra_cta_split ? consumer : 0}, v_pipe = k_pipe;
  PipelineState<kWorkTileSlots> work_pipe = {};
  PipelineState<1> parts_pipe = {};

  // Of the work tile whose scores are being computed.
  int first_q = 0;  // first row of this consumer
  int len_k = 0;
  int position_offset = 0;
  float slope = 0;

  float scores[kKeyTiles * 4];    // [tile of 8 keys][value of a lane]
  unsigned weights[kPvSteps][4];  // P as wgmma's A operand
  float output[kValueTiles * 4];  // [tile of 8 columns][value of a lane]
  OnlineSoftmax<kKeyTiles> softmax = {};
  float rescale[2];  // factors for O if its rows' references were raised

  __forceinline__ int first_row() const {
    return config.intra_cta_split ? 0 : consumer * kConsumerRows;
  }  // in the tile
  __forceinline__ int row_of(int half) const { return warp * 16 + half * 8 + lane / 4; }
  __forceinline__ int query_of(int half) const { return WorkTileInfo::query_at<config>(p, first_q + row_of(half)); }

  __forceinline__ void run() {
    if (consumer == config.consumers - 1) ping_pong_arrive();  // consumer 0 goes first
    softmax.scale_log2 = (config.score_mod ? 1.0f : p.scale) * kLog2E;
    int unstored = -1;       // slot of the work tile info whose O is still in registers
    bool in_flight = false;  // the last product with V, which still holds its stage
    while (true) {
      wait(kAt.q_full, q_pipe.index, q_pipe.parity);
      const WorkTileInfo info = read_info(work_pipe.index);
      const bool more = info.first_q != WorkTileInfo::kNoWork;
      KeyTiles tiles = {0, -1, 0, -1, {}};
      if (more) {
        tiles = tiles_of(info);
        // No key tile may be skipped while a stage of V is held: the skipped tile might need that very stage.
        if (tiles.before() > 0) wait_for_output<0>(in_flight);
        start_scores(tiles);
      }
      // The first scores of this work tile run while O of the previous one is completed and stored.
      if (tiles.sees_keys()) {
        wait_for_output<1>(in_flight);
      } else {
        wait_for_output<0>(in_flight);
      }
      if (unstored >= 0) epilogue(read_info(unstored));
      if (!more) break;
      softmax.reset();
#pragma unroll
      for (int i = 0; i < kValueTiles * 4; ++i) output[i] = 0;
      if (tiles.sees_keys()) {
        main_loop(tiles);
        in_flight = true;
      }
      if (tiles.after() > 0) {
        wait_for_output<0>(in_flight);
        for (int i = 0; i < tiles.after(); ++i) skip_tile();
      }
      unstored = work_pipe.index;
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
    first_q = info.first_q + first_row();
    len_k = info.len_k;
    position_offset = info.position_offset(p);
    if constexpr (config.score_mod) {
      slope = p.alibi_slopes ? p.alibi_slopes[info.batch * p.alibi_batch_stride + info.head] : 0.0f;
    }
    KeyTiles tiles{info.first_tile, info.last_tile, 0, -1, info.keys_of<config>(p, first_q, kConsumerRows)};
    if constexpr (config.intra_cta_split) {
      const int after_first = consumer < info.first_consumer ? consumer + config.consumers - info.first_consumer
                                                             : consumer - info.first_consumer;
      tiles.first = info.first_tile;
      tiles.last = tiles.cta_last = info.last_tile - after_first;
    } else if (info.has_keys()) {
      tiles.first = tiles.keys.first_tile(config.block_k);
      tiles.last = tiles.keys.last_tile(config.block_k);
    }
    return tiles;
  }

  __forceinline__ void wait(int mbarriers, int index, unsigned parity) {
    mbarrier_wait_parity(shared + mbarriers + index * kMbarrierBytes, parity);
  }
  // One arrival per warp: a warp's reads by wgmma are complete when its own wait for the product returns.
  __forceinline__ void release(int mbarriers, int index) {
    if (lane == 0) mbarrier_arrive(shared + mbarriers + index * kMbarrierBytes);
  }
  __forceinline__ void release_q() {
    // Every lane arrives: each has read the work tile info before, and the slot may be reused after this.
    mbarrier_arrive(shared + kAt.q_empty + q_pipe.index * kMbarrierBytes);
    q_pipe.advance();
  }

  __forceinline__ void ping_pong_wait() {
    if constexpr (config.ping_pong && config.consumers > 1) {
      named_barrier_sync(kPingPongBarrier + consumer, 2 * kWarpgroup);
    }
  }
  __forceinline__ void ping_pong_arrive() {
    if constexpr (config.ping_pong && config.consumers > 1) {
      const int next = consumer + 1 == config.consumers ? 0 : consumer + 1;
      named_barrier_arrive(kPingPongBarrier + next, 2 * kWarpgroup);
    }
  }

  // A key tile that none of these rows sees.
  __forceinline__ void skip_tile() {
    ping_pong_wait();
    ping_pong_arrive();
    wait(kAt.k_full, k_pipe.index, k_pipe.parity);
    release(kAt.k_empty, k_pipe.index);
    k_pipe.advance();
    wait(kAt.v_full, v_pipe.index, v_pipe.parity);
    release(kAt.v_empty, v_pipe.index);
    v_pipe.advance();
  }

  // On return, the scores of the last key tile are in flight.
  __forceinline__ void start_scores(const KeyTiles& tiles) {
    for (int i = 0; i < tiles.before(); ++i) skip_tile();
    if (tiles.sees_keys()) {
      ping_pong_wait();
      wgmma_fence();
      issue_scores();
      ping_pong_arrive();
    } else {
      release_q();
    }
  }

  // O and the row sums over all key tiles. On return, the last product with V is in flight.
  __forceinline__ void main_loop(const KeyTiles& tiles) {
    wgmma_wait_group<0>();
    for (int tile = tiles.last;; tile -= kStep) {
      wgmma_fence_operand(scores);
      const bool grown = softmax_of(tile, tiles.keys);
      release(kAt.k_empty, k_pipe.index);
      k_pipe.advance();
      wgmma_fence_operand(scores);  // keeps the exponentials before the wait: the product with V runs meanwhile
      if (tile < tiles.last) {
        wgmma_wait_group<0>();
        finish_output();
        if (grown) {
#pragma unroll
          for (int i = 0; i < kValueTiles * 4; ++i) output[i] *= rescale[i / 2 % 2];
        }
      }
      pack_weights();
      if (tile - kStep < tiles.first) break;
      ping_pong_wait();
      wgmma_fence();
      issue_scores();
      issue_output();
      ping_pong_arrive();
      wgmma_wait_group<1>();
    }
    release_q();
    wgmma_fence();
    issue_output();
  }

  // Waits for the last product with V if there is one; `behind` groups were committed after it.
  template <int behind>
  __forceinline__ void wait_for_output(bool& in_flight) {
    if (!in_flight) return;
    wgmma_wait_group<behind>();
    finish_output();
    in_flight = false;
  }
  // After a wait for the product with V.
  __forceinline__ void finish_output() {
    wgmma_fence_operand(output);
    release(kAt.v_empty, v_pipe.index);
    v_pipe.advance();
  }

  // S = Q K^T.
  __forceinline__ void issue_scores() {
    wait(kAt.k_full, k_pipe.index, k_pipe.parity);
    const unsigned q_tile = shared + kAt.q + q_pipe.index * kAt.q_stage;
    const unsigned k_tile = shared + kAt.k + k_pipe.index * kAt.k_stage;
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      issue_score_step(step, atom_at(config.dim_qk, kMinAtom, step * 16), q_tile, k_tile);
    }
    wgmma_commit_group();
  }
  __forceinline__ void issue_score_step(int step, const SwizzleAtom& atom, unsigned q_tile, unsigned k_tile) {
    const unsigned from_q =
        q_tile + atom_offset(atom, block_q_of(config)) + static_cast<unsigned>(first_row() * atom.width) * 2;
    const unsigned from_k = k_tile + atom_offset(atom, config.block_k);
    const unsigned within = (step * 16 - atom.column) * 2;
    const auto issue = [&](const MatrixDescriptor& q, const MatrixDescriptor& k) {
      Wgmma<config.block_k>::template shared_shared<kType, false>(scores, q.at(within), k.at(within), step > 0);
    };
    if (atom.width == 64) {
      issue(matrix_descriptor<64>(from_q, 16), matrix_descriptor<64>(from_k, 16));
    } else if (atom.width == 32) {
      issue(matrix_descriptor<32>(from_q, 16), matrix_descriptor<32>(from_k, 16));
    } else {
      issue(matrix_descriptor<16>(from_q, 16), matrix_descriptor<16>(from_k, 16));
    }
  }

  // O += P V: one product covers all atoms of 64 columns, and each narrower atom has its own.
  __forceinline__ void issue_output() {
    constexpr int kWide = padded_dim(config.dim_v, kMinAtom) / kWidestAtom * kWidestAtom;
    constexpr int kWideColumns = kWide < config.dim_v ? kWide : config.dim_v;
    wait(kAt.v_full, v_pipe.index, v_pipe.parity);
    const unsigned v_tile = shared + kAt.v + v_pipe.index * kAt.v_stage;
    if constexpr (kWideColumns > 0) add_columns<64, 0, kWideColumns>(v_tile);
    if constexpr (kWideColumns < config.dim_v) {
      constexpr SwizzleAtom kNext = atom_at(config.dim_v, kMinAtom, kWide);
      constexpr int kEnd = kNext.column + kNext.width < config.dim_v ? kNext.column + kNext.width : config.dim_v;
      add_columns<kNext.width, kNext.column, kEnd - kNext.column>(v_tile);
      if constexpr (kEnd < config.dim_v) add_columns<16, kEnd, config.dim_v - kEnd>(v_tile);
    }
    wgmma_commit_group();
  }
  template <int width, int first, int count>
  __forceinline__ void add_columns(unsigned v_tile) {
    const MatrixDescriptor v =
        matrix_descriptor<width>(v_tile + first * config.block_k * 2, config.block_k * kWidestAtom * 2);
    float(&sums)[count / 2] = reinterpret_cast<float(&)[count / 2]>(output[first / 2]);
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) {
      Wgmma<count>::template registers_shared<kType, true>(sums, weights[step], v.at(step * 16 * width * 2), true);
    }
  }

  // Scores to probabilities. Returns whether O, which a product may still be adding to, must be rescaled afterwards.
  __forceinline__ bool softmax_of(int tile, const KeyRange& keys) {
    const int first_k = tile * config.block_k;
    const bool masked = keys.is_masked(first_k, config.block_k);
    modify_scores(first_k);
    if (masked) mask_scores(first_k);
    return softmax.update_speculatively(
        reinterpret_cast<float(&)[1][kKeyTiles * 4]>(scores), masked || config.score_mod, [&] { recompute_scores(); },
        [&](int, int half, float factor) { rescale[half] = factor; });
  }

  // score_mod: the scores in natural units, after softcap and ALiBi.
  __forceinline__ void modify_scores(int first_k) {
    if constexpr (config.score_mod) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float s = scores[n * 4 + i] * p.scale;
          if (p.softcap > 0) s = p.softcap * accurate_tanh(s / p.softcap);
          const int distance = query_of(i / 2) + position_offset - (first_k + n * 8 + lane % 4 * 2 + i % 2);
          scores[n * 4 + i] = s - slope * static_cast<float>(distance < 0 ? -distance : distance);
        }
      }
    }
  }

  // Sets the scores of keys outside a row's band, or beyond the sequence, to -inf.
  __forceinline__ void mask_scores(int first_k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Interval<int> keys =
          visible_keys<config.masked, config.chunked>(p.band, query_of(half) + position_offset, len_k);
      // Relative to this lane's first key, so that every comparison is with a constant.
      const int begin = keys.begin - (first_k + lane % 4 * 2);
      const int end = keys.end - (first_k + lane % 4 * 2);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = n * 8 + i;
          if (key >= end || (config.masked && key < begin)) scores[n * 4 + half * 2 + i] = -infinity();
        }
      }
    }
  }

  __forceinline__ void pack_weights() {
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[step][i] = pack<kType>(scores[step * 8 + i * 2], scores[step * 8 + i * 2 + 1]);
      }
    }
  }

  // Recomputes S on the CUDA cores, each lane its own values: wgmma would need all warps of the consumer. The stage of
  // K is still held. This almost never runs, so code size matters and speed does not.
  __forceinline__ void recompute_scores() {
    const unsigned q_tile = shared + kAt.q + q_pipe.index * kAt.q_stage;
    const unsigned k_tile = shared + kAt.k + k_pipe.index * kAt.k_stage;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      float sum[4] = {};
#pragma unroll 1
      for (int column = 0; column < config.dim_qk; column += 2) {
        unsigned q[2], k[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          q[i] = load_shared_4(
              q_tile + offset_in_tile(first_row() + row_of(i), column, block_q_of(config), config.dim_qk, kMinAtom));
          k[i] = load_shared_4(
              k_tile + offset_in_tile(n * 8 + lane % 4 * 2 + i, column, config.block_k, config.dim_qk, kMinAtom));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[i] += low_to_float<kType>(q[i / 2]) * low_to_float<kType>(k[i % 2]) +
                    high_to_float<kType>(q[i / 2]) * high_to_float<kType>(k[i % 2]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n * 4 + i] = sum[i];
    }
  }

  __forceinline__ void epilogue(const WorkTileInfo& info) {
    if constexpr (config.intra_cta_split) {
      if (consumer > 0) return store_partial();
      combine_partials();
    }
    store(info);
  }

  // Intra-CTA split: where this thread's values of consumer `of`, which is not the first, are in shared memory. Threads
  // are adjacent, so that a warp has no bank conflicts.
  __forceinline__ unsigned partial_of(int of) const {
    return shared + kAt.parts + (of - 1) * kAt.part + (warp * 32 + lane) * 16;
  }
  __forceinline__ void store_partial() {
    wait(kAt.parts_empty, 0, parts_pipe.parity ^ 1);
    const unsigned partial = partial_of(consumer);
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const float* const o = output + n * 4;
      store_shared_floats(partial + n * kWarpgroup * 16, o[0], o[1], o[2], o[3]);
    }
    store_shared_floats(partial + kValueTiles * kWarpgroup * 16, softmax.reference[0][0], softmax.reference[0][1],
                        softmax.row_sum[0][0], softmax.row_sum[0][1]);
    mbarrier_arrive(shared + kAt.parts_full);
    parts_pipe.advance();
  }
  __forceinline__ void combine_partials() {
    wait(kAt.parts_full, 0, parts_pipe.parity);
#pragma unroll 1  // registers suffice for one partial at a time
    for (int of = 1; of < config.consumers; ++of) {
      float rows[4], mine[1][2], theirs[1][2];
      load_shared_floats(rows, partial_of(of) + kValueTiles * kWarpgroup * 16);
      softmax.merge({{rows[0], rows[1]}}, {{rows[2], rows[3]}}, mine, theirs);
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        float other[4];
        load_shared_floats(other, partial_of(of) + n * kWarpgroup * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          output[n * 4 + i] = output[n * 4 + i] * mine[0][i / 2] + other[i] * theirs[0][i / 2];
      }
    }
    mbarrier_arrive(shared + kAt.parts_empty);
    parts_pipe.advance();
  }

  // Divides by the row sums and writes O and LSE. The lanes of a quad hold a row in pieces of two columns; they
  // exchange them so that each lane has 8 columns, 16 bytes, of one of four adjacent tiles, and a quad writes 64 bytes.
  __forceinline__ void store(const WorkTileInfo& info) {
    Bits16* const out = rows_of(p.o, p.o_strides, p.cu_seqlens_q, info.batch, info.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.total(0, half);
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      const int row = info.first_q + first_row() + row_of(half);
      const int query = WorkTileInfo::query_at<config>(p, row);
      const int head = config.pack_gqa ? row - query * static_cast<int>(p.group) : 0;  // relative to info.head
      if (p.lse && lane % 4 == 0 && query < info.len_q) {
        p.lse[offset_of(p.lse_strides, p.cu_seqlens_q, info.batch, info.head + head) + query] =
            softmax.log_sum_exp(sum, 0, half);
      }
#pragma unroll
      for (int n = 0; n < kValueTiles; n += 4) {
        Words4 words = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (n + j >= kValueTiles) continue;
          const float* const pair = output + (n + j) * 4 + half * 2;
          words.word[j] = pack<kType>(pair[0] * inverse, pair[1] * inverse);
        }
        transpose_quad(words.word, lane);
        if (query < info.len_q && n + lane % 4 < kValueTiles) {
          store_16(out + head * p.o_strides.head + query * p.o_strides.seq + (n + lane % 4) * 8, words);
        }
      }
    }
  }
};

}  // namespace tessera
