// A consumer of attention/forward_fp8_sm90.cuh: a warpgroup that computes 64 rows of O from scores to store.
#pragma once

#include "attention/forward_fp8_sm90_config.h"
#include "attention/forward_fp8_sm90_work_tile.cuh"
#include "attention/fp8_softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "tile/mask.h"
#include "tile/pipeline.cuh"
#include "tile/probability.cuh"
#include "tile/quad.cuh"
#include "tile/sequence.cuh"

namespace tessera {

template <AttentionForwardFp8Sm90Config config>
struct ForwardFp8Sm90Consumer {
  using WorkTileInfo = ForwardFp8Sm90WorkTileInfo;
  static constexpr ForwardFp8Sm90Layout kAt = forward_fp8_sm90_layout(config);
  static constexpr int kKeyTiles = config.block_k / 8;
  static constexpr int kValueTiles = config.dim_v / 8;
  static constexpr int kQkColumns = fp8_columns(config.dim_qk);
  static constexpr int kKeyColumns = fp8_columns(config.block_k);
  static constexpr int kQkSteps = (config.dim_qk + 31) / 32;
  static constexpr int kPvSteps = config.block_k / 32;
  static constexpr int kFactors = config.k_blocks ? config.block_k / kScaleKeys : 1;
  static constexpr int kPingPongBarrier = 1;  // named barrier of consumer 0; those of the other consumers follow

  const AttentionForwardFp8Sm90Params& p;
  unsigned shared;
  int consumer;  // warp-uniform, and the compiler knows it
  int lane, warp;

  PipelineState<config.q_stages> q_pipe = {};
  PipelineState<config.stages> k_pipe = {}, v_pipe = {};
  PipelineState<kWorkTileSlots> work_pipe = {};

  // Of the work tile whose scores are being computed.
  int first_q = 0;  // first row of this consumer
  int len_k = 0;
  int position_offset = 0;
  float slope = 0;
  float q_factor = 0;               // scale and Q's scale; in exp2 units, unless scores are modified
  const float* k_scales = nullptr;  // of the head
  const float* v_scales = nullptr;
  float v_unit = 1;  // of O: V's scale

  float scores[kKeyTiles * 4];                           // [tile of 8 keys][value of a lane]
  unsigned weights[kPvSteps][4];                         // P as wgmma's A operand
  float output[kValueTiles * 4];                         // [tile of 8 columns][value of a lane]
  float partial[config.promotes ? kValueTiles * 4 : 4];  // the product with the last tile of V
  Fp8Softmax<kKeyTiles, kFactors, config.polynomial> softmax = {};
  float rescale[2];         // factors for O if its rows' references were raised
  float k_scale[kFactors];  // of the key tile whose scores are in flight
  float v_scale = 1;

  __forceinline__ int first_row() const { return consumer * kConsumerRows; }  // in the tile
  __forceinline__ int row_of(int half) const { return warp * 16 + half * 8 + lane / 4; }
  __forceinline__ int query_of(int half) const { return first_q + row_of(half); }

  __forceinline__ void run() {
    if (consumer == config.consumers - 1) ping_pong_arrive();  // consumer 0 goes first
    int unstored = -1;  // slot of the work tile info whose O is still in registers
    float unstored_unit = 1;
    bool in_flight = false;  // the last product with V, which still holds its stage
    while (true) {
      wait(kAt.q_full, q_pipe.index, q_pipe.parity);
      const WorkTileInfo info = read_info(work_pipe.index);
      const bool more = info.first_q != WorkTileInfo::kNoWork;
      KeyTiles tiles = {0, -1, 0, -1, {}};
      unstored_unit = v_unit;
      // ptxas would serialise all products if partial sums were read while scores are in flight.
      if constexpr (config.promotes) wait_for_output<0>(in_flight);
      if (more) {
        tiles = tiles_of(info);
        // No key tile may be skipped while a stage of V is held: the skipped tile might need that very stage.
        if (!config.promotes && tiles.before() > 0) wait_for_output<0>(in_flight);
        start_scores(tiles);
      }
      // The first scores of this work tile run while O of the previous one is completed and stored.
      if constexpr (!config.promotes) {
        if (tiles.sees_keys()) {
          wait_for_output<1>(in_flight);
        } else {
          wait_for_output<0>(in_flight);
        }
      }
      if (unstored >= 0) store(read_info(unstored), unstored_unit);
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
  // through the pipeline, so those before and after are skipped.
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
    const unsigned key_head = p.by_group.quotient(info.head);
    k_scales = p.k_scale.of(info.batch, key_head);
    v_scales = p.v_scale.of(info.batch, key_head);
    if constexpr (config.score_mod) {
      slope = p.alibi_slopes ? p.alibi_slopes[info.batch * p.alibi_batch_stride + info.head] : 0.0f;
    }
    KeyTiles tiles{info.first_tile, info.last_tile, 0, -1, info.keys_of<config.masked>(p, first_q, kConsumerRows)};
    if (info.has_keys()) {
      tiles.first = tiles.keys.first_tile(config.block_k);
      tiles.last = tiles.keys.last_tile(config.block_k);
    }
    if (tiles.sees_keys()) {
      q_factor = p.q_scale.of(info.batch, info.head)[first_q >> p.q_scale.shift] * p.scale *
                 (config.score_mod ? 1.0f : kLog2E);
      if constexpr (!config.k_blocks) k_scale[0] = *k_scales;
      if constexpr (!config.v_blocks) v_unit = *v_scales;
    }
    return tiles;
  }

  // The scales of a key tile; keys beyond the sequence have those of the last block.
  __forceinline__ void load_scales(int tile) {
    if constexpr (config.k_blocks) {
#pragma unroll
      for (int g = 0; g < kFactors; ++g) {
        k_scale[g] = k_scales[min(tile * config.block_k + g * kScaleKeys, len_k - 1) >> p.k_scale.shift];
      }
    }
    if constexpr (config.v_blocks) v_scale = v_scales[(tile * config.block_k) >> p.v_scale.shift];
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
      load_scales(tiles.last);
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
    if constexpr (config.v_blocks) v_unit = v_scale;
    wgmma_wait_group<0>();
    for (int tile = tiles.last;; --tile) {
      wgmma_fence_operand(scores);
      bool grown = softmax_of(tile, tiles.keys);
      release(kAt.k_empty, k_pipe.index);
      k_pipe.advance();
      wgmma_fence_operand(scores);  // keeps the exponentials before the wait: the product with V runs meanwhile
      if (tile < tiles.last) {
        wgmma_wait_group<0>();
        finish_output();
        if constexpr (config.v_blocks) change_unit(grown);
        if (grown) {
#pragma unroll
          for (int i = 0; i < kValueTiles * 4; ++i) output[i] *= rescale[i / 2 % 2];
        }
      }
      pack_weights();
      if (tile == tiles.first) break;
      load_scales(tile - 1);
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

  // Exact if V's scales are powers of two.
  __forceinline__ void change_unit(bool& grown) {
    if (v_scale == v_unit) return;
    const float ratio = v_unit / v_scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) rescale[half] = grown ? rescale[half] * ratio : ratio;
    v_unit = v_scale;
    grown = true;
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
    if constexpr (config.promotes) {
      wgmma_fence_operand(partial);
#pragma unroll
      for (int i = 0; i < kValueTiles * 4; ++i) output[i] += partial[i];
    } else {
      wgmma_fence_operand(output);
    }
    release(kAt.v_empty, v_pipe.index);
    v_pipe.advance();
  }

  template <class Issue>
  static __forceinline__ void with_descriptors(const SwizzleAtom& atom, unsigned a, unsigned b, const Issue& issue) {
    if (atom.width == 64) {
      issue(matrix_descriptor<64>(a, 16), matrix_descriptor<64>(b, 16));
    } else if (atom.width == 32) {
      issue(matrix_descriptor<32>(a, 16), matrix_descriptor<32>(b, 16));
    } else {
      issue(matrix_descriptor<16>(a, 16), matrix_descriptor<16>(b, 16));
    }
  }

  // S = Q K^T.
  __forceinline__ void issue_scores() {
    wait(kAt.k_full, k_pipe.index, k_pipe.parity);
    const unsigned q_tile = shared + kAt.q + q_pipe.index * kAt.q_stage;
    const unsigned k_tile = shared + kAt.k + k_pipe.index * kAt.k_stage;
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      const SwizzleAtom atom = atom_at(kQkColumns, kFp8MinAtom, step * 16);
      const unsigned within = (step * 16 - atom.column) * 2;
      with_descriptors(
          atom, q_tile + atom_offset(atom, block_q_of(config)) + static_cast<unsigned>(first_row() * atom.width) * 2,
          k_tile + atom_offset(atom, config.block_k), [&](const MatrixDescriptor& q, const MatrixDescriptor& k) {
            WgmmaE4m3<config.block_k>::shared_shared(scores, q.at(within), k.at(within), step > 0);
          });
    }
    wgmma_commit_group();
  }

  // O += P V.
  __forceinline__ void issue_output() {
    wait(kAt.v_full, v_pipe.index, v_pipe.parity);
    const unsigned v_tile = shared + kAt.v + v_pipe.index * kAt.v_stage;
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) {
      const SwizzleAtom atom = atom_at(kKeyColumns, kFp8MinAtom, step * 16);
      const unsigned within = (step * 16 - atom.column) * 2;
      const unsigned from = v_tile + atom_offset(atom, config.dim_v);
      with_descriptors(atom, from, from, [&](const MatrixDescriptor& v, const MatrixDescriptor&) {
        if constexpr (config.promotes) {
          WgmmaE4m3<config.dim_v>::registers_shared(partial, weights[step], v.at(within), step > 0);
        } else {
          WgmmaE4m3<config.dim_v>::registers_shared(output, weights[step], v.at(within), true);
        }
      });
    }
    wgmma_commit_group();
  }

  // Scores to probabilities. Returns whether O, which a product may still be adding to, must be rescaled afterwards.
  __forceinline__ bool softmax_of(int tile, const KeyRange& keys) {
    const int first_k = tile * config.block_k;
    const bool masked = keys.is_masked(first_k, config.block_k);
    float factor[kFactors];
#pragma unroll
    for (int g = 0; g < kFactors; ++g) factor[g] = q_factor * k_scale[g];
    modify_scores(first_k, factor);
    if (masked) mask_scores(first_k);
    return softmax.update(scores, factor, masked || config.score_mod, rescale, [&] { recompute_scores(); });
  }

  // score_mod: the scores in natural units, after softcap and ALiBi.
  __forceinline__ void modify_scores(int first_k, float (&factor)[kFactors]) {
    if constexpr (config.score_mod) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int key = first_k + n * 8 + lane % 4 * 2 + i % 2;
          modify_score(scores[n * 4 + i], factor[softmax.group_of(n * 4)], p.softcap, slope,
                       query_of(i / 2) + position_offset - key);
        }
      }
#pragma unroll
      for (int g = 0; g < kFactors; ++g) factor[g] = kLog2E;
    }
  }

  // Sets the scores of keys outside a row's band, or beyond the sequence, to -inf.
  __forceinline__ void mask_scores(int first_k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Interval<int> keys = visible_keys<config.masked>(p.band, query_of(half) + position_offset, len_k);
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
        const float* const s = scores + step * 16 + i / 2 * 8 + i % 2 * 2;
        weights[step][i] = pack_e4m3(s[0], s[1], s[4], s[5]);
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
      for (int column = 0; column < kQkColumns; column += 2) {
        float q[2][4], k[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          unpack_e4m3(load_shared_4(q_tile + offset_in_tile(first_row() + row_of(i), column, block_q_of(config),
                                                            kQkColumns, kFp8MinAtom)),
                      q[i]);
          unpack_e4m3(load_shared_4(k_tile + offset_in_tile(n * 8 + lane % 4 * 2 + i, column, config.block_k,
                                                            kQkColumns, kFp8MinAtom)),
                      k[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i] += q[i / 2][j] * k[i % 2][j];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n * 4 + i] = sum[i];
    }
  }

  // Divides by the row sums and writes O and LSE. The lanes of a quad hold a row in pieces of two columns; they
  // exchange them so that each lane has 8 columns, 16 bytes, of one of four adjacent tiles, and a quad writes 64 bytes.
  __forceinline__ void store(const WorkTileInfo& info, float unit) {
    Bits16* const out = rows_of(p.o, p.o_strides, p.cu_seqlens_q, info.batch, info.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.total(half);
      const float inverse = sum == 0.0f ? 0.0f : unit / sum;
      const int query = info.first_q + first_row() + row_of(half);
      if (p.lse && lane % 4 == 0 && query < info.len_q) {
        p.lse[offset_of(p.lse_strides, p.cu_seqlens_q, info.batch, info.head) + query] = softmax.log_sum_exp(sum, half);
      }
#pragma unroll
      for (int n = 0; n < kValueTiles; n += 4) {
        Words4 words = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (n + j >= kValueTiles) continue;
          const float* const pair = output + (n + j) * 4 + half * 2;
          words.word[j] = tessera::pack<config.dtype>(pair[0] * inverse, pair[1] * inverse);
        }
        transpose_quad(words.word, lane);
        if (query < info.len_q && n + lane % 4 < kValueTiles) {
          store_16(out + query * p.o_strides.seq + (n + lane % 4) * 8, words);
        }
      }
    }
  }
};

}  // namespace tessera
