// Attention forward on Hopper's own instructions: the copy engine (TMA), wgmma, roles for warps.
//
// A block stays and takes one tile of queries after the other. One thread of its first warpgroup, the producer, has Q,
// K and V loaded; each of the other warpgroups, the consumers, owns 64 query rows from end to end. Keys come in tiles
// of block_k, last tile first. K and V have `stages` places each, and each place two barriers: full (the bytes are
// there) and empty (every consumer's warp is done with it).
//
//   shared:     Q [block_q, Dqk]    K [stages][block_k, Dqk]    V [stages][block_k, Dv]    (contract/tensor_map.h)
//   registers:  S [64, block_k] fp32    P [64, block_k] 16 bit    O [64, Dv] fp32, spread over a warpgroup
//
//   producer    Q K0 | K1 V0 | K2 V1 | K3 V2 | ...
//   consumer    S0=QK0  max, exp | S1=QK1           | S2=QK2           |
//                                | O+=P0 V0 ------- | O+=P1 V1 ------- |   tensor cores, asynchronous
//                                |        max, exp  |        max, exp  |   of the S just made, under O's product
//
// Where consumers take turns (ping_pong), one gives its products to the tensor cores, lets the next one do so, and
// turns to its softmax. Tiles that the mask empties for a whole block are never loaded; those that it empties for one
// consumer are let pass. Queries and keys beyond a sequence's end come as zeros from the copy engine, so that whatever
// lies behind them in memory meets no product.
#pragma once

#include "contract/attention_forward_sm90.h"
#include "contract/work_order.h"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/exp2_polynomial.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/sequence.cuh"

namespace tessera {

// A place among `stages`, and the parity of the barriers' phase for its present use.
template <int stages>
struct Stage {
  int index = 0;
  unsigned parity = 0;

  __forceinline__ void advance() {
    if (++index == stages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// One tile of queries as both roles see it.
template <AttentionForwardSm90Config config>
struct ForwardSm90Work {
  unsigned batch, head;
  int first_q;
  int len_q, len_k;
  int position_offset;  // query i stands at key i + position_offset
  int first_tile, last_tile;

  __forceinline__ ForwardSm90Work(const AttentionForwardSm90Params& p, unsigned index) {
    const WorkItem item = work_item(index, p.q_tiles, p.columns, p.heads_q, p.together);
    batch = item.batch;
    head = item.head;
    first_q = static_cast<int>(item.q_tile) * block_q_of(config);
    len_q = length_of(p.cu_seqlens_q, batch, p.seq_q);
    len_k = length_of(p.cu_seqlens_k, batch, p.seq_k);
    position_offset = p.band.bottom_right ? len_k - len_q : 0;
    const KeyRange keys = keys_of(p, first_q, block_q_of(config));
    first_tile = keys.first_tile(config.block_k);
    last_tile = keys.last_tile(config.block_k);
  }

  __forceinline__ KeyRange keys_of(const AttentionForwardSm90Params& p, int first, int rows) const {
    const int last = min(first + rows, len_q) - 1;
    if constexpr (!config.banded) return last < first ? KeyRange{0, 0, 0, 0} : KeyRange{0, len_k, 0, len_k};
    return key_range(p.band, position_offset, first, last, len_k);
  }
  __forceinline__ bool has_keys() const { return last_tile >= first_tile; }
};

// Tickets come from a counter through shared memory, the next one while the present tile is worked on.
template <AttentionForwardSm90Config config, bool is_producer>
struct ForwardSm90Queue {
  static constexpr ForwardSm90Layout kAt = forward_sm90_layout(config);
  const AttentionForwardSm90Params& p;
  unsigned shared;
  unsigned index;
  unsigned round = 0;
  Stage<2> place = {};

  __forceinline__ ForwardSm90Queue(const AttentionForwardSm90Params& params, unsigned shared_base)
      : p(params), shared(shared_base), index(blockIdx.x) {}

  __forceinline__ bool has_work() const { return index < p.columns * p.q_tiles; }

  __forceinline__ void next() {
    ++round;
    if constexpr (!config.tickets) {
      index = own_index(round, blockIdx.x, gridDim.x);
    } else {
      const unsigned full = shared + kAt.work_full + place.index * kBarrierBytes;
      const unsigned empty = shared + kAt.work_empty + place.index * kBarrierBytes;
      const unsigned slot = shared + kAt.work + place.index * 4;
      if constexpr (is_producer) {
        index = gridDim.x + atomicAdd(p.ticket, 1u);
        barrier_wait_parity(empty, place.parity ^ 1);
        store_shared_4(slot, index);
        barrier_arrive(full);
      } else {
        barrier_wait_parity(full, place.parity);
        index = load_shared_4(slot);
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(empty);
      }
      place.advance();
    }
  }
};

template <AttentionForwardSm90Config config>
struct ForwardSm90Producer {
  static constexpr ForwardSm90Layout kAt = forward_sm90_layout(config);
  static constexpr int kPanels = config.narrowest_panel;

  const AttentionForwardSm90Params& p;
  unsigned shared;
  Stage<1> q_use = {};
  Stage<config.stages> k_use = {}, v_use = {};

  // All panels of `rows` rows from `row` on.
  template <int rows, int dim>
  __forceinline__ void load(unsigned destination, const PanelMaps& maps, unsigned full, int row, int head,
                            const RowOrigin& origin) {
    barrier_expect(full, rows * padded_dim(dim, kPanels) * 2);
#pragma unroll
    for (int column = 0; column < padded_dim(dim, kPanels); column += panel_at(dim, kPanels, column).width) {
      const Panel panel = panel_at(dim, kPanels, column);
      load_box(destination + panel_offset(panel, rows), maps.by_width[map_index(panel.width)], full, column,
               origin.y + row, head, origin.z);
    }
  }

  __forceinline__ void load_k(int tile, int head, const RowOrigin& origin) {
    const unsigned full = shared + kAt.k_full + k_use.index * kBarrierBytes;
    barrier_wait_parity(shared + kAt.k_empty + k_use.index * kBarrierBytes, k_use.parity ^ 1);
    load<config.block_k, config.dim_qk>(shared + kAt.k + k_use.index * kAt.k_stage, p.k, full, tile * config.block_k,
                                        head, origin);
    k_use.advance();
  }
  __forceinline__ void load_v(int tile, int head, const RowOrigin& origin) {
    const unsigned full = shared + kAt.v_full + v_use.index * kBarrierBytes;
    barrier_wait_parity(shared + kAt.v_empty + v_use.index * kBarrierBytes, v_use.parity ^ 1);
    load<config.block_k, config.dim_v>(shared + kAt.v + v_use.index * kAt.v_stage, p.v, full, tile * config.block_k,
                                       head, origin);
    v_use.advance();
  }

  static __forceinline__ RowOrigin origin_of(const int* cu_seqlens, int longest, int length, unsigned batch) {
    return cu_seqlens ? row_origin(longest, length, cu_seqlens[batch]) : RowOrigin{0, static_cast<int>(batch)};
  }

  __forceinline__ void run() {
    prefetch_map(p.q.by_width[map_index(panel_at(config.dim_qk, kPanels, 0).width)]);
    prefetch_map(p.k.by_width[map_index(panel_at(config.dim_qk, kPanels, 0).width)]);
    prefetch_map(p.v.by_width[map_index(panel_at(config.dim_v, kPanels, 0).width)]);
    ForwardSm90Queue<config, true> queue(p, shared);
    while (queue.has_work()) {
      const ForwardSm90Work<config> work(p, queue.index);
      queue.next();
      if (!work.has_keys()) continue;
      const RowOrigin q_origin = origin_of(p.cu_seqlens_q, p.seq_q, work.len_q, work.batch);
      const RowOrigin k_origin = origin_of(p.cu_seqlens_k, p.seq_k, work.len_k, work.batch);
      const int head = static_cast<int>(work.head / p.group);
      barrier_wait_parity(shared + kAt.q_empty, q_use.parity ^ 1);
      load<block_q_of(config), config.dim_qk>(shared + kAt.q, p.q, shared + kAt.q_full, work.first_q,
                                              static_cast<int>(work.head), q_origin);
      q_use.advance();
      load_k(work.last_tile, head, k_origin);
      for (int tile = work.last_tile; tile > work.first_tile; --tile) {
        load_k(tile - 1, head, k_origin);
        load_v(tile, head, k_origin);
      }
      load_v(work.first_tile, head, k_origin);
    }
  }
};

template <AttentionForwardSm90Config config>
struct ForwardSm90Consumer {
  static constexpr DType kType = config.dtype;
  static constexpr ForwardSm90Layout kAt = forward_sm90_layout(config);
  static constexpr int kPanels = config.narrowest_panel;
  static constexpr int kKeyTiles = config.block_k / 8;
  static constexpr int kValueTiles = config.dim_v / 8;
  static constexpr int kQkSteps = (config.dim_qk + 15) / 16;
  static constexpr int kPvSteps = config.block_k / 16;
  static constexpr int kFirstTurn = 1;  // named barrier of consumer 0's turn

  const AttentionForwardSm90Params& p;
  unsigned shared;
  int consumer;  // the same in all lanes, and the compiler knows
  int lane, warp;

  Stage<1> q_use = {};
  Stage<config.stages> k_use = {}, v_use = {};

  unsigned head = 0, batch = 0;
  int first_q = 0;  // of this consumer
  int len_q = 0, len_k = 0;
  int position_offset = 0;
  float slope = 0;
  float scale_log2 = 0;

  float scores[kKeyTiles * 4];    // [tile of 8 keys][value of a lane]
  unsigned weights[kPvSteps][4];  // P as wgmma's first operand
  float output[kValueTiles * 4];  // [tile of 8 columns][value of a lane]
  float reference[2];             // what a row's exponents are taken relative to
  float row_sum[2];               // this lane's share; summed over the quad at the end
  float decay[2];                 // what O is to be scaled with

  __forceinline__ int query_of(int half) const { return first_q + warp * 16 + half * 8 + lane / 4; }

  __forceinline__ void wait(int barriers, int index, unsigned parity) {
    barrier_wait_parity(shared + barriers + index * kBarrierBytes, parity);
  }
  // A warp's products are done when its wait for them returns; each warp speaks for itself.
  __forceinline__ void release(int barriers, int index) {
    if (lane == 0) barrier_arrive(shared + barriers + index * kBarrierBytes);
  }

  __forceinline__ void take_turn() {
    if constexpr (config.ping_pong && config.consumers > 1) barrier_wait(kFirstTurn + consumer, 2 * kWarpgroup);
  }
  __forceinline__ void pass_turn() {
    if constexpr (config.ping_pong && config.consumers > 1) {
      const int next = consumer + 1 == config.consumers ? 0 : consumer + 1;
      barrier_arrive(kFirstTurn + next, 2 * kWarpgroup);
    }
  }

  // S = Q K^T.
  __forceinline__ void issue_scores() {
    wait(kAt.k_full, k_use.index, k_use.parity);
    const unsigned k_tile = shared + kAt.k + k_use.index * kAt.k_stage;
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      issue_score_step(step, panel_at(config.dim_qk, kPanels, step * 16), k_tile);
    }
    wgmma_commit();
  }
  __forceinline__ void issue_score_step(int step, const Panel& panel, unsigned k_tile) {
    const unsigned from_q = shared + kAt.q + panel_offset(panel, block_q_of(config)) +
                            static_cast<unsigned>(consumer * kConsumerRows * panel.width) * 2;
    const unsigned from_k = k_tile + panel_offset(panel, config.block_k);
    const unsigned within = (step * 16 - panel.column) * 2;
    const auto issue = [&](const MatrixDescriptor& q, const MatrixDescriptor& k) {
      Wgmma<config.block_k>::template shared_shared<kType, false>(scores, q.at(within), k.at(within), step > 0);
    };
    if (panel.width == 64) {
      issue(describe_panel<64>(from_q, 16), describe_panel<64>(from_k, 16));
    } else if (panel.width == 32) {
      issue(describe_panel<32>(from_q, 16), describe_panel<32>(from_k, 16));
    } else {
      issue(describe_panel<16>(from_q, 16), describe_panel<16>(from_k, 16));
    }
  }

  // O += P V: all panels of 64 columns in one product, each narrower one in its own.
  __forceinline__ void issue_output() {
    constexpr int kWide = padded_dim(config.dim_v, kPanels) / kWidestPanel * kWidestPanel;
    constexpr int kWideColumns = kWide < config.dim_v ? kWide : config.dim_v;
    wait(kAt.v_full, v_use.index, v_use.parity);
    const unsigned v_tile = shared + kAt.v + v_use.index * kAt.v_stage;
    if constexpr (kWideColumns > 0) add_columns<64, 0, kWideColumns>(v_tile);
    if constexpr (kWideColumns < config.dim_v) {
      constexpr Panel kNext = panel_at(config.dim_v, kPanels, kWide);
      constexpr int kEnd = kNext.column + kNext.width < config.dim_v ? kNext.column + kNext.width : config.dim_v;
      add_columns<kNext.width, kNext.column, kEnd - kNext.column>(v_tile);
      if constexpr (kEnd < config.dim_v) add_columns<16, kEnd, config.dim_v - kEnd>(v_tile);
    }
    wgmma_commit();
  }
  template <int width, int first, int count>
  __forceinline__ void add_columns(unsigned v_tile) {
    const MatrixDescriptor v =
        describe_panel<width>(v_tile + first * config.block_k * 2, config.block_k * kWidestPanel * 2);
    float(&sums)[count / 2] = reinterpret_cast<float(&)[count / 2]>(output[first / 2]);
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) {
      Wgmma<count>::template registers_shared<kType, true>(sums, weights[step], v.at(step * 16 * width * 2), true);
    }
  }

  // Scores in natural units, where more is asked than a positive scale.
  __forceinline__ void transform_scores(int first_k) {
    if constexpr (config.general) {
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

  // Keys outside a row's band, or beyond the sequence, get -inf.
  __forceinline__ void mask_scores(int first_k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int begin = 0;
      int end = len_k;
      if constexpr (config.banded) {
        const int position = query_of(half) + position_offset;
        begin = position - p.band.left;
        end = min(len_k, position + p.band.right + 1);
      }
      // Relative to this lane's first key, so that every comparison is with a constant.
      begin -= first_k + lane % 4 * 2;
      end -= first_k + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = n * 8 + i;
          if (key >= end || (config.banded && key < begin)) scores[n * 4 + half * 2 + i] = -infinity();
        }
      }
    }
  }

  // The reference in units of exp2. A row that has seen no key: any finite number keeps exp2(-inf - it) at 0.
  __forceinline__ float shift_of(int half) const {
    return reference[half] == -infinity() ? 0.0f : reference[half] * scale_log2;
  }

  // Turns scores into probabilities relative to the row's reference, which follows the running maximum lazily: while no
  // score exceeds it by more than 2^kSlack, exp2 stays small enough for any 16-bit type and nothing summed before has
  // to be scaled. Says whether O, which may still be added to, has to be.
  __forceinline__ bool online_softmax(bool masked) {
    constexpr float kSlack = 8.0f;
    float largest[2];
    bool grown = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_max = scores[half * 2];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
        tile_max = fmaxf(tile_max, fmaxf(scores[n * 4 + half * 2], scores[n * 4 + half * 2 + 1]));
      }
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 1));
      tile_max = fmaxf(tile_max, __shfl_xor_sync(0xffffffffu, tile_max, 2));
      largest[half] = tile_max;
      grown |= (tile_max - reference[half]) * scale_log2 > kSlack;
    }
    grown = __any_sync(0xffffffffu, grown);
    if (grown) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next = fmaxf(reference[half], largest[half]);
        // Both -inf: no key seen yet, and nothing to scale.
        decay[half] = next == -infinity() ? 1.0f : fast_exp2((reference[half] - next) * scale_log2);
        reference[half] = next;
        row_sum[half] *= decay[half];
      }
    }
    // One FMA a score takes the reference out: s * scale - shift, the product unrounded. What the rounding of the shift
    // adds is the same for all scores of a row and leaves with the row sum; only where it could be more than one, and 2
    // to its power overflow, is the reference taken out before the product.
    float shift[2] = {shift_of(0), shift_of(1)};
    if (__any_sync(0xffffffffu, !(fabsf(shift[0]) < (1 << 24) && fabsf(shift[1]) < (1 << 24)))) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (reference[half] == -infinity()) continue;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          scores[n * 4 + half * 2] -= reference[half];
          scores[n * 4 + half * 2 + 1] -= reference[half];
        }
        shift[half] = 0;
      }
    }
    if (config.polynomial > 0 && !masked) {
      exponentiate<config.polynomial>(shift);
    } else {
      exponentiate<0>(shift);
    }
    return grown;
  }
  // polynomial: of 8 exponentials, how many leave the special function unit in peace. Not for -inf.
  template <int polynomial>
  __forceinline__ void exponentiate(const float (&shift)[2]) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& s = scores[n * 4 + i];
        const float x = s * scale_log2 - shift[i / 2];
        s = (n * 4 + i) % 8 < polynomial ? polynomial_exp2(x) : fast_exp2(x);
        row_sum[i / 2] += s;
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

  __forceinline__ bool softmax_of(int tile, const KeyRange& keys) {
    const int first_k = tile * config.block_k;
    const bool masked = first_k < keys.clear_begin || first_k + config.block_k > keys.clear_end;
    transform_scores(first_k);
    if (masked) mask_scores(first_k);
    return online_softmax(masked);
  }

  // A tile of keys that none of these rows sees.
  __forceinline__ void let_pass() {
    take_turn();
    pass_turn();
    wait(kAt.k_full, k_use.index, k_use.parity);
    release(kAt.k_empty, k_use.index);
    k_use.advance();
    wait(kAt.v_full, v_use.index, v_use.parity);
    release(kAt.v_empty, v_use.index);
    v_use.advance();
  }

  // O and the row sums over this consumer's keys, [first, last] of which are tiles that it sees something of.
  __forceinline__ void attend(int first, int last, const KeyRange& keys) {
    take_turn();
    wgmma_fence();
    issue_scores();
    pass_turn();
    wgmma_wait<0>();
    for (int tile = last;; --tile) {
      wgmma_done(scores);
      release(kAt.k_empty, k_use.index);
      k_use.advance();
      const bool grown = softmax_of(tile, keys);
      wgmma_done(scores);  // the exponentials stay before the wait: O's product runs meanwhile
      if (tile < last) {
        wgmma_wait<0>();
        wgmma_done(output);
        release(kAt.v_empty, v_use.index);
        v_use.advance();
        if (grown) {
#pragma unroll
          for (int i = 0; i < kValueTiles * 4; ++i) output[i] *= decay[i / 2 % 2];
        }
      }
      pack_weights();
      if (tile == first) break;
      take_turn();
      wgmma_fence();
      issue_scores();
      issue_output();
      pass_turn();
      wgmma_wait<1>();
    }
    release(kAt.q_empty, 0);
    wgmma_fence();
    issue_output();
    wgmma_wait<0>();
    wgmma_done(output);
    release(kAt.v_empty, v_use.index);
    v_use.advance();
  }

  // Divides by the row sums and writes O and LSE. A quad's lanes hold a row in pieces of two columns; they exchange
  // them so that each lane has 8 columns, 16 bytes, of one of four neighbouring tiles, and a quad writes 64 bytes.
  __forceinline__ void store() {
    Bits16* const out = rows_of(p.o, p.o_strides, p.cu_seqlens_q, batch, head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = row_sum[half];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      const int query = query_of(half);
      if (p.lse && lane % 4 == 0 && query < len_q) {
        p.lse[offset_of(p.lse_strides, p.cu_seqlens_q, batch, head) + query] =
            sum == 0.0f ? -infinity() : (shift_of(half) + fast_log2(sum)) * kLn2;
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
        transpose_quad(words);
        if (query < len_q && n + lane % 4 < kValueTiles) {
          store_16(out + query * p.o_strides.seq + (n + lane % 4) * 8, words);
        }
      }
    }
  }
  // Lane t of a quad has word t of four chunks, and gets the four words of chunk t.
  __forceinline__ void transpose_quad(Words4& w) const {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
      const bool upper = (lane & bit) != 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j & bit) continue;
        const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? w.word[j] : w.word[j + bit], bit);
        (upper ? w.word[j] : w.word[j + bit]) = other;
      }
    }
  }

  __forceinline__ void run() {
    ForwardSm90Queue<config, false> queue(p, shared);
    if (consumer == config.consumers - 1) pass_turn();  // the first turn is consumer 0's
    scale_log2 = (config.general ? 1.0f : p.scale) * kLog2E;
    while (queue.has_work()) {
      const ForwardSm90Work<config> work(p, queue.index);
      batch = work.batch;
      head = work.head;
      first_q = work.first_q + consumer * kConsumerRows;
      len_q = work.len_q;
      len_k = work.len_k;
      position_offset = work.position_offset;
      if constexpr (config.general) {
        slope = p.alibi_slopes ? p.alibi_slopes[batch * p.alibi_batch_stride + head] : 0.0f;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[half] = -infinity();
        row_sum[half] = 0;
        decay[half] = 1;
      }
#pragma unroll
      for (int i = 0; i < kValueTiles * 4; ++i) output[i] = 0;
      if (work.has_keys()) {
        const KeyRange keys = work.keys_of(p, first_q, kConsumerRows);
        const int first = keys.first_tile(config.block_k);
        const int last = keys.last_tile(config.block_k);
        wait(kAt.q_full, 0, q_use.parity);
        q_use.advance();
        if (last >= first) {
          for (int tile = work.last_tile; tile > last; --tile) let_pass();
          attend(first, last, keys);
          for (int tile = first; tile > work.first_tile; --tile) let_pass();
        } else {
          release(kAt.q_empty, 0);
          for (int tile = work.last_tile; tile >= work.first_tile; --tile) let_pass();
        }
      }
      store();
      queue.next();
    }
  }
};

template <AttentionForwardSm90Config config>
__forceinline__ void attention_forward_sm90(const AttentionForwardSm90Params& p) {
  static_assert(config.consumers >= 1 && config.consumers <= 3 && config.stages >= 2);
  static_assert(config.blocks == 1 || (config.blocks == 2 && config.consumers == 1));
  static_assert(config.block_k % 16 == 0 && config.block_k <= 256);
  static_assert(config.dim_qk % 8 == 0 && config.dim_v % 8 == 0 && config.dim_v <= 256);
  // One consumer alone on an SM: each thread may have as many registers as it can name from the start.
  constexpr bool kSplit = config.consumers * config.blocks > 1;
  constexpr RegisterSplit kRegisters = register_split(config);
  constexpr ForwardSm90Layout kAt = forward_sm90_layout(config);
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  if (threadIdx.x == 0) {
    constexpr unsigned kWarps = config.consumers * 4;
    barrier_init(shared + kAt.q_full, 1);
    barrier_init(shared + kAt.q_empty, kWarps);
    for (int i = 0; i < config.stages; ++i) {
      barrier_init(shared + kAt.k_full + i * kBarrierBytes, 1);
      barrier_init(shared + kAt.k_empty + i * kBarrierBytes, kWarps);
      barrier_init(shared + kAt.v_full + i * kBarrierBytes, 1);
      barrier_init(shared + kAt.v_empty + i * kBarrierBytes, kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared + kAt.work_full + i * kBarrierBytes, 1);
      barrier_init(shared + kAt.work_empty + i * kBarrierBytes, kWarps);
    }
    barrier_init_done();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    if constexpr (kSplit) give_registers<kRegisters.producer>();
    if (threadIdx.x == 0) {
      ForwardSm90Producer<config> producer{p, shared};
      producer.run();
    }
  } else {
    if constexpr (kSplit) take_registers<kRegisters.consumer>();
    ForwardSm90Consumer<config> consumer{p, shared, warpgroup - 1, static_cast<int>(threadIdx.x) % 32,
                                         static_cast<int>(threadIdx.x) % kWarpgroup / 32};
    consumer.run();
  }
}

}  // namespace tessera
