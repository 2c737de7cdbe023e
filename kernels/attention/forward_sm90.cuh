// Attention forward on Hopper's own instructions: the copy engine (TMA), wgmma, roles for warps.
//
// A block stays and takes one tile of queries after the other. One thread of its first warpgroup, the producer, works
// out what the tile is, leaves a note of it, and has Q, K and V loaded; each of the other warpgroups, the consumers,
// owns 64 query rows from end to end. Keys come in tiles of block_k, last tile first. Q, K and V have places in shared
// memory, and each place two barriers: full (the bytes are there) and empty (every consumer's warp is done with it).
//
//   shared:     Q [q_stages][block_q, Dqk]    K [stages][block_k, Dqk]    V [stages][block_k, Dv]
//   registers:  S [64, block_k] fp32    P [64, block_k] 16 bit    O [64, Dv] fp32, spread over a warpgroup
//
//   producer    note Q K0 | K1 V0 | K2 V1 | ...                     | note' Q' K0' | ...
//   consumer    S0=QK0  softmax | S1=QK1           | S2=QK2         |              S0'=Q'K0'
//                               | O+=P0 V0 ------- | O+=P1 V1 ----- | O+=P2 V2     |           tensor cores,
//                               asynchronous |         softmax  |       softmax  |              store O     of the S
//                               just made
//
// Where consumers take turns (ping_pong), one gives its products to the tensor cores, lets the next one do so, and
// turns to its softmax. Tiles that the mask empties for a whole block are never loaded; those that it empties for one
// consumer are let pass. Queries and keys beyond a sequence's end come as zeros from the copy engine, so that whatever
// lies behind them in memory meets no product.
//
// Where there are too few queries to give every SM some (split), all consumers of a block own the same 64 rows and deal
// the tiles of keys out among them. Each place of K and V then belongs to one of them, and in the end consumer 0 adds
// up what all have, by way of shared memory:
//
//   consumer 0  tiles 0 3 6 ..  |            | adds parts, stores |
//   consumer 1  tiles 1 4 7 ..  | leave part |
//   consumer 2  tiles 2 5 8 ..  | leave part |
#pragma once

#include "contract/attention_forward_sm90.h"
#include "contract/work_order.h"
#include "ptx/barrier.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/online_softmax.cuh"
#include "tile/quad.cuh"
#include "tile/ring.cuh"
#include "tile/sequence.cuh"

namespace tessera {

// What the producer tells the consumers of a tile of queries, beside its Q.
struct ForwardSm90Note {
  unsigned batch, head;
  int first_q;  // row of the tile, a query's, or where joined a query's head's; none: there is no more work
  int len_q, len_k;
  int first_tile, last_tile;  // of keys that some row of the block sees; last < first: none
  int turn;                   // split: whose is the last tile, and so the first to be loaded

  static constexpr int kNoWork = -1;

  __forceinline__ bool has_keys() const { return last_tile >= first_tile; }
  __forceinline__ int position_offset(const AttentionForwardSm90Params& p) const {  // query i stands at key i + it
    return p.band.bottom_right ? len_k - len_q : 0;
  }
  template <AttentionForwardSm90Config config>
  __forceinline__ int rows_of_sequence(const AttentionForwardSm90Params& p) const {
    return config.joined ? len_q * static_cast<int>(p.group) : len_q;
  }
  template <AttentionForwardSm90Config config>
  static __forceinline__ int query_at(const AttentionForwardSm90Params& p, int row) {
    return config.joined ? static_cast<int>(p.by_group.quotient(row)) : row;
  }
  template <AttentionForwardSm90Config config>
  __forceinline__ KeyRange keys_of(const AttentionForwardSm90Params& p, int first, int rows) const {
    const int last = min(first + rows, rows_of_sequence<config>(p)) - 1;
    if (last < first) return KeyRange{0, 0, 0, 0};
    if constexpr (!config.banded) return KeyRange{0, len_k, 0, len_k};
    return key_range(p.band, position_offset(p), query_at<config>(p, first), query_at<config>(p, last), len_k);
  }
};
static_assert(sizeof(ForwardSm90Note) == kNoteBytes);

template <AttentionForwardSm90Config config>
struct ForwardSm90Producer {
  static constexpr ForwardSm90Layout kAt = forward_sm90_layout(config);
  static constexpr int kPanels = config.narrowest_panel;
  static constexpr int kAhead = config.split ? config.consumers : 1;  // tiles of K before V

  const AttentionForwardSm90Params& p;
  unsigned shared;
  Ring<config.q_stages> q_use = {};
  Ring<config.stages> k_use = {}, v_use = {};
  Ring<kNotes> notes = {};

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

  // Until Q's next place is free; its barrier.
  __forceinline__ unsigned wait_for_q() {
    barrier_wait_parity(shared + kAt.q_empty + q_use.index * kBarrierBytes, q_use.parity ^ 1);
    return shared + kAt.q_full + q_use.index * kBarrierBytes;
  }
  // Joined, the map has heads on its second axis and queries on its third, and a box has all heads of a group.
  __forceinline__ void load_q(const ForwardSm90Note& note, unsigned full, const RowOrigin& origin) {
    const unsigned destination = shared + kAt.q + q_use.index * kAt.q_stage;
    const int head = static_cast<int>(note.head);
    if constexpr (config.joined) {
      const int query = origin.y + ForwardSm90Note::query_at<config>(p, note.first_q);
      load<block_q_of(config), config.dim_qk>(destination, p.q, full, head, query, {0, origin.z});
    } else {
      load<block_q_of(config), config.dim_qk>(destination, p.q, full, note.first_q, head, origin);
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

  // Tiles of its own, or by tickets from a counter, the next one drawn while the present one is loaded.
  __forceinline__ unsigned next_index(unsigned round) {
    return config.tickets ? gridDim.x + atomicAdd(p.ticket, 1u) : own_index(round, blockIdx.x, gridDim.x);
  }

  __forceinline__ ForwardSm90Note note_of(unsigned index) const {
    const WorkItem item = work_item(index, p.q_tiles, p.columns, p.by_heads, p.together);
    ForwardSm90Note note = {};
    note.batch = item.batch;
    note.head = config.joined ? item.head * p.group : item.head;
    note.first_q = static_cast<int>(p.q_tiles - 1 - item.tile) * block_q_of(config);
    note.len_q = length_of(p.cu_seqlens_q, item.batch, p.seq_q);
    note.len_k = length_of(p.cu_seqlens_k, item.batch, p.seq_k);
    const KeyRange keys = note.keys_of<config>(p, note.first_q, block_q_of(config));
    note.first_tile = keys.first_tile(config.block_k);
    note.last_tile = keys.last_tile(config.block_k);
    if constexpr (config.split) note.turn = k_use.index % config.consumers;
    return note;
  }
  __forceinline__ void write(const ForwardSm90Note& note) {
    const unsigned place = shared + kAt.notes + notes.index * kNoteBytes;
    const Words4(&words)[2] = reinterpret_cast<const Words4(&)[2]>(note);
    store_shared_16(place, words[0]);
    store_shared_16(place + 16, words[1]);
    notes.advance();
  }

  __forceinline__ void init_barriers() const {
    constexpr unsigned kWarps = config.consumers * 4;
    constexpr unsigned kWarpsOfPlace = config.split ? 4 : kWarps;  // of K or V
    for (int i = 0; i < config.q_stages; ++i) {
      barrier_init(shared + kAt.q_full + i * kBarrierBytes, 1);
      barrier_init(shared + kAt.q_empty + i * kBarrierBytes, kWarps * 32);
    }
    for (int i = 0; i < config.stages; ++i) {
      barrier_init(shared + kAt.k_full + i * kBarrierBytes, 1);
      barrier_init(shared + kAt.k_empty + i * kBarrierBytes, kWarpsOfPlace);
      barrier_init(shared + kAt.v_full + i * kBarrierBytes, 1);
      barrier_init(shared + kAt.v_empty + i * kBarrierBytes, kWarpsOfPlace);
    }
    if constexpr (config.split) {
      barrier_init(shared + kAt.parts_full, (config.consumers - 1) * kWarpgroup);
      barrier_init(shared + kAt.parts_empty, kWarpgroup);
    }
    barrier_init_done();
  }
  __forceinline__ void prefetch_maps() const {
    prefetch_map(p.q.by_width[map_index(panel_at(config.dim_qk, kPanels, 0).width)]);
    prefetch_map(p.k.by_width[map_index(panel_at(config.dim_qk, kPanels, 0).width)]);
    prefetch_map(p.v.by_width[map_index(panel_at(config.dim_v, kPanels, 0).width)]);
  }

  __forceinline__ void run() {
    follow_grids_before();
    unsigned index = blockIdx.x;
    for (unsigned round = 1; index < p.columns * p.q_tiles; ++round) {
      const ForwardSm90Note note = note_of(index);
      index = next_index(round);
      const unsigned q_full = wait_for_q();
      write(note);
      if (!note.has_keys()) {
        barrier_arrive(q_full);
        q_use.advance();
        continue;
      }
      const RowOrigin q_origin = row_origin(p.cu_seqlens_q, note.batch, p.seq_q, note.len_q);
      const RowOrigin k_origin = row_origin(p.cu_seqlens_k, note.batch, p.seq_k, note.len_k);
      const int head = static_cast<int>(p.by_group.quotient(note.head));
      load_q(note, q_full, q_origin);
      q_use.advance();
      for (int tile = note.last_tile + kAhead; tile >= note.first_tile; --tile) {
        if (tile - kAhead >= note.first_tile) load_k(tile - kAhead, head, k_origin);
        if (tile <= note.last_tile) load_v(tile, head, k_origin);
      }
    }
    ForwardSm90Note end = {};
    end.first_q = ForwardSm90Note::kNoWork;
    const unsigned q_full = wait_for_q();
    write(end);
    barrier_arrive(q_full);
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
  static constexpr int kStep = config.split ? config.consumers : 1;  // from one tile of keys to the next
  static constexpr int kFirstTurn = 1;  // named barrier: consumer 0's turn; the others' follow

  const AttentionForwardSm90Params& p;
  unsigned shared;
  int consumer;  // the same in all lanes, and the compiler knows
  int lane, warp;

  Ring<config.q_stages> q_use = {};
  Ring<config.stages, kStep> k_use = {config.split ? consumer : 0}, v_use = k_use;
  Ring<kNotes> notes = {};
  Ring<1> parts_use = {};

  // Of the tile of queries whose scores are being made.
  int first_q = 0;  // of this consumer
  int len_k = 0;
  int position_offset = 0;
  float slope = 0;

  float scores[kKeyTiles * 4];    // [tile of 8 keys][value of a lane]
  unsigned weights[kPvSteps][4];  // P as wgmma's first operand
  float output[kValueTiles * 4];  // [tile of 8 columns][value of a lane]
  OnlineSoftmax<kKeyTiles, config.polynomial> softmax = {};

  __forceinline__ int first_row() const { return config.split ? 0 : consumer * kConsumerRows; }  // in the tile
  __forceinline__ int row_of(int half) const { return warp * 16 + half * 8 + lane / 4; }
  __forceinline__ int query_of(int half) const { return ForwardSm90Note::query_at<config>(p, first_q + row_of(half)); }

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
    const unsigned q_tile = shared + kAt.q + q_use.index * kAt.q_stage;
    const unsigned k_tile = shared + kAt.k + k_use.index * kAt.k_stage;
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      issue_score_step(step, panel_at(config.dim_qk, kPanels, step * 16), q_tile, k_tile);
    }
    wgmma_commit();
  }
  __forceinline__ void issue_score_step(int step, const Panel& panel, unsigned q_tile, unsigned k_tile) {
    const unsigned from_q =
        q_tile + panel_offset(panel, block_q_of(config)) + static_cast<unsigned>(first_row() * panel.width) * 2;
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

  __forceinline__ void pack_weights() {
#pragma unroll
    for (int step = 0; step < kPvSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[step][i] = pack<kType>(scores[step * 8 + i * 2], scores[step * 8 + i * 2 + 1]);
      }
    }
  }

  // Scores to probabilities. Says whether O, which may still be added to, is to be scaled afterwards.
  __forceinline__ bool softmax_of(int tile, const KeyRange& keys) {
    const int first_k = tile * config.block_k;
    const bool masked = first_k < keys.clear_begin || first_k + config.block_k > keys.clear_end;
    transform_scores(first_k);
    if (masked) mask_scores(first_k);
    return softmax.update(scores, masked || config.general, [&] { remake_scores(); });
  }

  // S once more, by each lane for itself: wgmma would need all warps of the consumer. K is still held. Next to never
  // called, so short code matters, and speed does not.
  __forceinline__ void remake_scores() {
    const unsigned q_tile = shared + kAt.q + q_use.index * kAt.q_stage;
    const unsigned k_tile = shared + kAt.k + k_use.index * kAt.k_stage;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      float sum[4] = {};
#pragma unroll 1
      for (int column = 0; column < config.dim_qk; column += 2) {
        unsigned q[2], k[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          q[i] = load_shared_4(
              q_tile + offset_in_tile(first_row() + row_of(i), column, block_q_of(config), config.dim_qk, kPanels));
          k[i] = load_shared_4(
              k_tile + offset_in_tile(n * 8 + lane % 4 * 2 + i, column, config.block_k, config.dim_qk, kPanels));
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

  // What this consumer has to do of a tile of queries: of the tiles of keys from last to first, those that its rows see
  // something of. All of the block's pass by. Split, it is every kStep-th tile from last on, and no other passes by.
  struct Share {
    int block_first, block_last;
    int first, last;
    KeyRange keys;

    __forceinline__ bool sees_keys() const { return last >= first; }
    __forceinline__ int before() const { return sees_keys() ? block_last - last : 0; }  // tiles to let pass
    __forceinline__ int after() const { return sees_keys() ? first - block_first : block_last - block_first + 1; }
  };

  __forceinline__ ForwardSm90Note read_note(int place) const {
    ForwardSm90Note note;
    Words4(&words)[2] = reinterpret_cast<Words4(&)[2]>(note);
    words[0] = load_shared_16(shared + kAt.notes + place * kNoteBytes);
    words[1] = load_shared_16(shared + kAt.notes + place * kNoteBytes + 16);
    return note;
  }

  __forceinline__ Share share_of(const ForwardSm90Note& note) {
    first_q = note.first_q + first_row();
    len_k = note.len_k;
    position_offset = note.position_offset(p);
    if constexpr (config.general) {
      slope = p.alibi_slopes ? p.alibi_slopes[note.batch * p.alibi_batch_stride + note.head] : 0.0f;
    }
    Share share{note.first_tile, note.last_tile, 0, -1, note.keys_of<config>(p, first_q, kConsumerRows)};
    if constexpr (config.split) {
      const int after_turn = consumer < note.turn ? consumer + config.consumers - note.turn : consumer - note.turn;
      share.first = note.first_tile;
      share.last = share.block_last = note.last_tile - after_turn;
    } else if (note.has_keys()) {
      share.first = share.keys.first_tile(config.block_k);
      share.last = share.keys.last_tile(config.block_k);
    }
    return share;
  }

  // The scores of a share's last keys are in flight when it returns.
  __forceinline__ void begin(const Share& share) {
    for (int i = 0; i < share.before(); ++i) let_pass();
    if (share.sees_keys()) {
      take_turn();
      wgmma_fence();
      issue_scores();
      pass_turn();
    } else {
      release_q();
    }
  }
  __forceinline__ void release_q() {
    // Every lane for itself: it has read the notes before, whose places this may free.
    barrier_arrive(shared + kAt.q_empty + q_use.index * kBarrierBytes);
    q_use.advance();
  }

  // O and the row sums over a share's keys. The last product of O is in flight when it returns.
  __forceinline__ void attend(const Share& share) {
    wgmma_wait<0>();
    for (int tile = share.last;; tile -= kStep) {
      wgmma_done(scores);
      const bool grown = softmax_of(tile, share.keys);
      release(kAt.k_empty, k_use.index);
      k_use.advance();
      wgmma_done(scores);  // the exponentials stay before the wait: O's product runs meanwhile
      if (tile < share.last) {
        wgmma_wait<0>();
        finish_output();
        if (grown) {
#pragma unroll
          for (int i = 0; i < kValueTiles * 4; ++i) output[i] *= softmax.decay[i / 2 % 2];
        }
      }
      pack_weights();
      if (tile - kStep < share.first) break;
      take_turn();
      wgmma_fence();
      issue_scores();
      issue_output();
      pass_turn();
      wgmma_wait<1>();
    }
    release_q();
    wgmma_fence();
    issue_output();
  }
  // O's product has been waited for.
  __forceinline__ void finish_output() {
    wgmma_done(output);
    release(kAt.v_empty, v_use.index);
    v_use.advance();
  }

  // Split, of this thread's values: where consumer `of`, not the first, leaves them for the first one. Side by side for
  // the threads, so that no two of a warp meet in a bank.
  __forceinline__ unsigned part_of(int of) const {
    return shared + kAt.parts + (of - 1) * kAt.part + (warp * 32 + lane) * 16;
  }
  __forceinline__ void leave_part() {
    wait(kAt.parts_empty, 0, parts_use.parity ^ 1);
    const unsigned part = part_of(consumer);
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const float* const o = output + n * 4;
      store_shared_floats(part + n * kWarpgroup * 16, o[0], o[1], o[2], o[3]);
    }
    store_shared_floats(part + kValueTiles * kWarpgroup * 16, softmax.reference[0], softmax.reference[1],
                        softmax.row_sum[0], softmax.row_sum[1]);
    barrier_arrive(shared + kAt.parts_full);
    parts_use.advance();
  }
  __forceinline__ void add_parts() {
    wait(kAt.parts_full, 0, parts_use.parity);
#pragma unroll 1  // one part at a time has registers
    for (int of = 1; of < config.consumers; ++of) {
      float rows[4], mine[2], theirs[2];
      load_shared_floats(rows, part_of(of) + kValueTiles * kWarpgroup * 16);
      softmax.take_in({rows[0], rows[1]}, {rows[2], rows[3]}, mine, theirs);
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        float other[4];
        load_shared_floats(other, part_of(of) + n * kWarpgroup * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) output[n * 4 + i] = output[n * 4 + i] * mine[i / 2] + other[i] * theirs[i / 2];
      }
    }
    barrier_arrive(shared + kAt.parts_empty);
    parts_use.advance();
  }

  // Divides by the row sums and writes O and LSE. A quad's lanes hold a row in pieces of two columns; they exchange
  // them so that each lane has 8 columns, 16 bytes, of one of four neighbouring tiles, and a quad writes 64 bytes.
  __forceinline__ void store(const ForwardSm90Note& of) {
    Bits16* const out = rows_of(p.o, p.o_strides, p.cu_seqlens_q, of.batch, of.head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = softmax.total(half);
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      const int row = of.first_q + first_row() + row_of(half);
      const int query = ForwardSm90Note::query_at<config>(p, row);
      const int head = config.joined ? row - query * static_cast<int>(p.group) : 0;  // from of.head on
      if (p.lse && lane % 4 == 0 && query < of.len_q) {
        p.lse[offset_of(p.lse_strides, p.cu_seqlens_q, of.batch, of.head + head) + query] =
            sum == 0.0f ? -infinity() : softmax.log_of(sum, half);
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
        if (query < of.len_q && n + lane % 4 < kValueTiles) {
          store_16(out + head * p.o_strides.head + query * p.o_strides.seq + (n + lane % 4) * 8, words);
        }
      }
    }
  }

  __forceinline__ void run() {
    if (consumer == config.consumers - 1) pass_turn();  // the first turn is consumer 0's
    softmax.scale_log2 = (config.general ? 1.0f : p.scale) * kLog2E;
    int unstored = -1;       // place of the note of the tile whose O is here
    bool in_flight = false;  // O's last product, which holds V
    while (true) {
      wait(kAt.q_full, q_use.index, q_use.parity);
      const ForwardSm90Note note = read_note(notes.index);
      const bool more = note.first_q != ForwardSm90Note::kNoWork;
      Share share = {0, -1, 0, -1, {}};
      if (more) {
        share = share_of(note);
        // A tile of keys may not be let pass while V is held: the next one's place could be just that.
        if (share.before() > 0) settle<0>(in_flight);
        begin(share);
      }
      // The first scores of a tile run while the O of the one before is finished and stored.
      if (share.sees_keys()) {
        settle<1>(in_flight);
      } else {
        settle<0>(in_flight);
      }
      if (unstored >= 0) finish(read_note(unstored));
      if (!more) break;
      softmax.reset();
#pragma unroll
      for (int i = 0; i < kValueTiles * 4; ++i) output[i] = 0;
      if (share.sees_keys()) {
        attend(share);
        in_flight = true;
      }
      if (share.after() > 0) {
        settle<0>(in_flight);
        for (int i = 0; i < share.after(); ++i) let_pass();
      }
      unstored = notes.index;
      notes.advance();
    }
  }
  __forceinline__ void finish(const ForwardSm90Note& note) {
    if constexpr (config.split) {
      if (consumer > 0) return leave_part();
      add_parts();
    }
    store(note);
  }
  // Waits for O's last product, where there is one; `behind` products were issued after it.
  template <int behind>
  __forceinline__ void settle(bool& in_flight) {
    if (!in_flight) return;
    wgmma_wait<behind>();
    finish_output();
    in_flight = false;
  }
};

template <AttentionForwardSm90Config config>
__forceinline__ void attention_forward_sm90(const AttentionForwardSm90Params& p) {
  static_assert(config.consumers >= 1 && config.consumers <= 3 && config.stages >= 2);
  static_assert(config.blocks >= 1 && (config.blocks == 1 || !config.split));
  static_assert(!config.split || (config.consumers > 1 && config.stages % config.consumers == 0 && !config.ping_pong));
  static_assert(!config.split || !config.tickets);  // who has which keys would be chance, and so would be rounding
  static_assert(config.q_stages == 1 || config.q_stages == 2);
  static_assert(!config.joined || !config.general);  // slopes are a head's
  static_assert(config.block_k % 16 == 0 && config.block_k <= 256);
  static_assert(config.dim_qk % 8 == 0 && config.dim_v % 8 == 0 && config.dim_v <= 256);
  // One consumer alone on an SM: each thread may have as many registers as it can name from the start.
  constexpr bool kMovesRegisters = config.consumers * config.blocks > 1;
  constexpr RegisterSplit kRegisters = register_split(config);
  constexpr int kBarriersAreThere = 0;  // a named barrier; those who load do not wait for the others
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    ForwardSm90Producer<config> producer{p, shared};
    if (threadIdx.x == 32) producer.prefetch_maps();  // by a warp that has nothing else to do
    if (threadIdx.x == 0) producer.init_barriers();
    __syncwarp();
    barrier_arrive(kBarriersAreThere, threads_of(config));
    if constexpr (kMovesRegisters) give_registers<kRegisters.producer>();
    if (threadIdx.x == 0) producer.run();
  } else {
    barrier_wait(kBarriersAreThere, threads_of(config));
    if constexpr (kMovesRegisters) take_registers<kRegisters.consumer>();
    ForwardSm90Consumer<config> consumer{p, shared, warpgroup - 1, static_cast<int>(threadIdx.x) % 32,
                                         static_cast<int>(threadIdx.x) % kWarpgroup / 32};
    consumer.run();
  }
}

}  // namespace tessera
