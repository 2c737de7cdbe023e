// Attention backward on Hopper's own instructions: the copy engine (TMA), wgmma, roles for warps.
//
// A block owns block_k keys of one key head and walks over the queries in steps of block_q, over all query heads that
// share its key head, so that dK and dV stay in registers until the end. Scores are computed transposed, keys by
// queries: what leaves one product in registers enters the next as its first operand.
//
//   producer   one thread has K, V and then Q and dO of each step loaded; one warp copies LSE and delta beside them
//   consumers  64 keys each:   S^T = K Q^T     P^T = exp2(S^T - LSE)             dV += P^T dO
//                             dP^T = V dO^T   dS^T = P^T (dP^T - delta) --dS-->  dK += dS^T Q
//   dQ maker   dQ = dS K over all keys of the block, added to fp32 sums in global memory (tile/dq_sums.cuh)
//
//   shared:     K [block_k, Dqk]   V [block_k, Dv]   Q [stages][block_q, Dqk]   dO [stages][block_q, Dv]
//               dS^T [ds_stages][block_k, block_q]   LSE, delta [stages][block_q]        (contract/tensor_map.h)
//   registers:  dK [64, Dqk] and dV [64, Dv] fp32; S^T and dP^T [64, block_q] fp32, in one place or, where Config
//               overlaps, in two; P^T and dS^T [64, block_q] 16 bit; spread over a warpgroup
//
//   consumer            S0  exp   dP0  dS  | dV0 dK0 S1  exp   dP1  dS | ...          one place
//   consumer, overlaps  S0  dP0 | exp  S1 | dS | dV0 dK0 dP1 | exp  S2 | dS | ...     two: products run under exp
//
// A dQ maker apart from the consumers costs them no registers and no time, and they need not wait for each other: while
// one is at its exponentials, the tensor cores have the other's products and dQ's.
//
// Rows beyond a sequence's end come as zeros from the copy engine; their LSE is set to +inf, so that P is 0.
#pragma once

#include "contract/attention_backward_sm90.h"
#include "contract/work_order.h"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/dq_sums.cuh"
#include "tile/probability.cuh"
#include "tile/quad.cuh"
#include "tile/ring.cuh"
#include "tile/sequence.cuh"

namespace tessera {

constexpr int kPanelRow = kWidestPanel * 2;  // bytes

// What a block has to do. A step is a tile of queries of one head: heads of the group one after the other.
template <AttentionBackwardSm90Config config>
struct BackwardSm90Work {
  int batch, kv_head;
  int first_k;
  int len_q, len_k;
  int position_offset;  // query i stands at key i + it
  QueryTiles tiles;     // of each head
  int steps;

  __forceinline__ BackwardSm90Work(const AttentionBackwardSm90Params& p, unsigned block) {
    const WorkItem item = work_item(block, p.k_tiles, p.columns, p.by_heads, p.together);
    batch = static_cast<int>(item.batch);
    kv_head = static_cast<int>(item.head);
    first_k = static_cast<int>(item.tile) * block_k_of(config);
    len_q = length_of(p.cu_seqlens_q, item.batch, p.seq_q);
    len_k = length_of(p.cu_seqlens_k, item.batch, p.seq_k);
    position_offset = p.band.bottom_right ? len_k - len_q : 0;
    const int last_k = min(first_k + block_k_of(config), len_k) - 1;
    tiles = first_k < len_k ? query_tiles(p.band, position_offset, first_k, last_k, len_q, config.block_q)
                            : QueryTiles{0, 0};
    steps = tiles.count * static_cast<int>(p.group);
  }
};

template <AttentionBackwardSm90Config config>
struct BackwardSm90Producer {
  static constexpr BackwardSm90Layout kAt = backward_sm90_layout(config);

  const AttentionBackwardSm90Params& p;
  unsigned shared;
  const BackwardSm90Work<config>& work;

  // All panels of `rows` rows from `row` on.
  template <int rows, int dim>
  __forceinline__ void load(unsigned destination, const TensorMap& map, unsigned full, int row, int head,
                            const RowOrigin& origin) {
    barrier_expect(full, rows * padded_dim(dim, kWidestPanel) * 2);
#pragma unroll
    for (int column = 0; column < dim; column += kWidestPanel) {
      load_box(destination + column * rows * 2, map, full, column, origin.y + row, head, origin.z);
    }
  }
  __forceinline__ void wait_for_place(const Ring<config.stages>& use) {
    barrier_wait_parity(shared + kAt.empty + use.index * kBarrierBytes, use.parity ^ 1);
  }

  // One thread.
  __forceinline__ void load_tiles() {
    const RowOrigin q_origin = row_origin(p.cu_seqlens_q, work.batch, p.seq_q, work.len_q);
    const RowOrigin k_origin = row_origin(p.cu_seqlens_k, work.batch, p.seq_k, work.len_k);
    int head = work.kv_head * static_cast<int>(p.group);
    int row = work.tiles.first * config.block_q;
    int tiles_left = work.tiles.count;
    Ring<config.stages> use;
    load<block_k_of(config), config.dim_qk>(shared + kAt.k, p.k, shared + kAt.k_full, work.first_k, work.kv_head,
                                            k_origin);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      wait_for_place(use);
      load<config.block_q, config.dim_qk>(shared + kAt.q + use.index * kAt.q_stage, p.q,
                                          shared + kAt.q_full + use.index * kBarrierBytes, row, head, q_origin);
      if (step == 0) {
        load<block_k_of(config), config.dim_v>(shared + kAt.v, p.v, shared + kAt.v_full, work.first_k, work.kv_head,
                                               k_origin);
      }
      load<config.block_q, config.dim_v>(shared + kAt.d_o + use.index * kAt.d_o_stage, p.d_o,
                                         shared + kAt.d_o_full + use.index * kBarrierBytes, row, head, q_origin);
      use.advance();
      row += config.block_q;
      if (--tiles_left == 0) {
        tiles_left = work.tiles.count;
        row -= tiles_left * config.block_q;
        ++head;
      }
    }
  }

  // One warp. Values are on their way while it waits for their place.
  __forceinline__ void load_rows(int lane) {
    constexpr int kPasses = config.block_q / 32;
    const int first = work.tiles.first * config.block_q + lane;
    Index row = offset_of(p.row_strides, p.cu_seqlens_q, work.batch, work.kv_head * static_cast<int>(p.group)) + first;
    int rows_left = work.len_q - first;
    int distance = work.first_k - work.position_offset - work.tiles.first * config.block_q;
    int tiles_left = work.tiles.count;
    Ring<config.stages> use;
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      float lse[kPasses], delta[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        lse[pass] = load_read_only(p.lse_log2 + row + pass * 32, pass * 32 < rows_left);
        delta[pass] = load_read_only(p.delta + row + pass * 32, pass * 32 < rows_left);
        if (pass * 32 >= rows_left) lse[pass] = infinity();
      }
      wait_for_place(use);
      const unsigned rows = shared + kAt.rows + use.index * kAt.rows_stage;
      const unsigned own = rows + row_slot(lane) * 4;  // 32 queries on, the slots are 32 on
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        store_shared_4(own + pass * 32 * 4, bits_from_float(lse[pass]));
        store_shared_4(own + (config.block_q + pass * 32) * 4, bits_from_float(delta[pass]));
      }
      if (lane == 0) {
        store_shared_4(rows + (2 * config.block_q + kStepDistance) * 4, distance);
        store_shared_4(rows + (2 * config.block_q + kStepKeys) * 4, work.len_k - work.first_k);
      }
      barrier_arrive(shared + kAt.q_full + use.index * kBarrierBytes);
      use.advance();
      row += config.block_q;
      rows_left -= config.block_q;
      distance -= config.block_q;
      if (--tiles_left == 0) {  // on to the next head
        tiles_left = work.tiles.count;
        const int all = work.tiles.count * config.block_q;
        row += p.row_strides.head - all;
        rows_left += all;
        distance += all;
      }
    }
  }
};

// dQ += dS K.
template <AttentionBackwardSm90Config config>
struct BackwardSm90DqMaker {
  static constexpr BackwardSm90Layout kAt = backward_sm90_layout(config);
  static constexpr int kChunks = config.dim_qk / 8;

  const AttentionBackwardSm90Params& p;
  unsigned shared;
  const BackwardSm90Work<config>& work;

  // 64 queries by dq_columns from `first` on, over all keys of the block: both operands are transposed, keys being
  // their rows. to: this lane's first sum of this warp's 16 queries. read(): called when dS has been read.
  template <int first, class Read>
  __forceinline__ void add_columns(float (&sums)[config.dq_columns / 2], unsigned ds_panel, float* to,
                                   const Read& read) {
    const MatrixDescriptor ds = describe_panel<64>(ds_panel, 16);
    const MatrixDescriptor k =
        describe_panel<64>(shared + kAt.k + first * block_k_of(config) * 2, block_k_of(config) * kPanelRow);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < block_k_of(config) / 16; ++step) {
      Wgmma<config.dq_columns>::template shared_shared<config.dtype, true, true>(sums, ds.at(step * 16 * kPanelRow),
                                                                                 k.at(step * 16 * kPanelRow), step > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_done(sums);
    read();
#pragma unroll
    for (int n = 0; n < config.dq_columns / 8 && first / 8 + n < kChunks; ++n) {
      add_to_sums(to + (first / 8 + n) * 128, reinterpret_cast<const float(&)[4]>(sums[n * 4]), 0);
    }
  }

  __forceinline__ void run(int lane, int warp) {
    constexpr int kPanels = config.block_q / kConsumerRows;
    constexpr int kTile = config.block_q * config.dim_qk;
    float* to = dq_sums_of(p.dq_sums, p.cu_seqlens_q, work.batch, work.kv_head * static_cast<int>(p.group),
                           static_cast<int>(p.heads_q), config.block_q, config.dim_qk) +
                static_cast<Index>(work.tiles.first) * kTile + warp * (kChunks * 128) + sum_index(lane, 0);
    int tiles_left = work.tiles.count;
    Ring<config.ds_stages> use;
    barrier_wait_parity(shared + kAt.k_full, 0);
#pragma unroll 1
    for (int step = 0; step < work.steps; ++step) {
      barrier_wait_parity(shared + kAt.ds_full + use.index * kBarrierBytes, use.parity);
#pragma unroll
      for (int panel = 0; panel < kPanels; ++panel) {
        const unsigned ds = shared + kAt.ds + use.index * kAt.ds_stage + panel * (block_k_of(config) * kPanelRow);
        const auto read = [&] {
          if (panel + 1 == kPanels && lane == 0) barrier_arrive(shared + kAt.ds_empty + use.index * kBarrierBytes);
        };
        float sums[config.dq_columns / 2];
        if constexpr (config.dq_columns == config.dim_qk) {
          add_columns<0>(sums, ds, to, read);
        } else {
          add_columns<0>(sums, ds, to, [] {});
          add_columns<config.dq_columns>(sums, ds, to, read);
        }
        to += 4 * kChunks * 128;
      }
      use.advance();
      if (--tiles_left == 0) {  // on to the next head
        tiles_left = work.tiles.count;
        to += (p.dq_sums.rows - static_cast<Index>(tiles_left) * config.block_q) * config.dim_qk;
      }
    }
  }
};

template <AttentionBackwardSm90Config config>
struct BackwardSm90Consumer {
  static constexpr DType kType = config.dtype;
  static constexpr BackwardSm90Layout kAt = backward_sm90_layout(config);
  static constexpr int kQueryTiles = config.block_q / 8;
  static constexpr int kQuerySteps = config.block_q / 16;
  static constexpr int kQkSteps = (config.dim_qk + 15) / 16;
  static constexpr int kVSteps = (config.dim_v + 15) / 16;

  using Scores = float[kQueryTiles * 4];     // [tile of 8 queries][value of a lane]
  using Operand = unsigned[kQuerySteps][4];  // the same, rounded, as wgmma's first operand

  const AttentionBackwardSm90Params& p;
  unsigned shared;
  int consumer;  // the same in all lanes, and the compiler knows
  // What a lane needs in every step; the rest of what it is it looks up when it is asked.
  bool is_first;        // of its warp
  unsigned own_matrix;  // byte offset of its row and 16-byte chunk in step 0 of a tile of block_k rows (matrix_address)

  Ring<config.stages> use = {};
  Ring<config.ds_stages> ds_use = {};
  float dk[config.dim_qk / 2];  // [tile of 8 columns][value of a lane]
  float dv[config.dim_v / 2];
  unsigned kept_k[config.keeps_k ? kQkSteps : 1][4];
  unsigned kept_v[config.keeps_v ? kVSteps : 1][4];

  __forceinline__ void wait(int barriers, int index, unsigned parity) {
    barrier_wait_parity(shared + barriers + index * kBarrierBytes, parity);
  }
  // A warp's products are done when its wait for them returns; each warp speaks for itself.
  __forceinline__ void release(int barriers, int index) {
    if (is_first) barrier_arrive(shared + barriers + index * kBarrierBytes);
  }
  __forceinline__ unsigned rows_at(int index) const { return shared + kAt.rows + index * kAt.rows_stage; }

  static __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }
  static __forceinline__ int first_row() { return static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane() / 4; }

  __forceinline__ BackwardSm90Consumer(const AttentionBackwardSm90Params& params, unsigned shared_memory, int number)
      : p(params), shared(shared_memory), consumer(number) {
    const int row = consumer * kConsumerRows + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane() % 16;
    is_first = lane() == 0;
    own_matrix = row * kPanelRow + ((lane() / 16) ^ (lane() % 8)) * 16;
  }
  // Byte offset of this lane's LSE or delta among those of 16 queries (row_slot): lane % 4 * 16.
  __forceinline__ unsigned own_slot() const { return recomputed(own_matrix) / kPanelRow % 4 * 16; }

  // Address of the row that this lane gives to ldmatrix or stmatrix for a 16 x 16 of this warp's keys, columns `step`
  // of a tile of block_k rows: the four 8 x 8 are in the order of wgmma's first operand. Chunks are swizzled by row.
  __forceinline__ unsigned matrix_address(unsigned tile, int step) const {
    return (tile + step / 4 * (block_k_of(config) * kPanelRow) + own_matrix) ^ (step % 4 * 32);
  }

  template <int steps>
  __forceinline__ void keep(unsigned (&kept)[steps][4], unsigned tile) {
#pragma unroll
    for (int step = 0; step < steps; ++step) load_matrix_x4(kept[step], matrix_address(tile, step));
  }

  // x = A B^T: A this consumer's rows of K or V, B the step's Q or dO.
  template <int dim, bool is_kept, int kept_steps>
  __forceinline__ void rows_by_rows(Scores& x, int a_tile, const unsigned (&kept)[kept_steps][4], unsigned b_tile) {
#pragma unroll
    for (int step = 0; step < (dim + 15) / 16; ++step) {
      const unsigned within = step % 4 * 32;
      const MatrixDescriptor b = describe_panel<64>(b_tile + step / 4 * (config.block_q * kPanelRow), 16);
      if constexpr (is_kept) {
        Wgmma<config.block_q>::template registers_shared<kType, false>(x, kept[step], b.at(within), step > 0);
      } else {
        const MatrixDescriptor a = describe_panel<64>(
            shared + a_tile + step / 4 * (block_k_of(config) * kPanelRow) + consumer * (kConsumerRows * kPanelRow), 16);
        Wgmma<config.block_q>::template shared_shared<kType, false>(x, a.at(within), b.at(within), step > 0);
      }
    }
    wgmma_commit();
  }
  __forceinline__ void issue_scores(Scores& x, const Ring<config.stages>& of) {
    wait(kAt.q_full, of.index, of.parity);
    wgmma_fence();
    rows_by_rows<config.dim_qk, config.keeps_k>(x, kAt.k, kept_k, shared + kAt.q + of.index * kAt.q_stage);
  }
  __forceinline__ void issue_dp(Scores& x, const Ring<config.stages>& of) {
    wait(kAt.d_o_full, of.index, of.parity);
    wgmma_fence();
    rows_by_rows<config.dim_v, config.keeps_v>(x, kAt.v, kept_v, shared + kAt.d_o + of.index * kAt.d_o_stage);
  }

  // sums += A B: A a step's P^T or dS^T, B its dO or Q, read transposed.
  template <int dim>
  __forceinline__ void add_by_columns(float (&sums)[dim / 2], const Operand& a, unsigned b_tile) {
    const MatrixDescriptor b = describe_panel<64>(b_tile, config.block_q * kPanelRow);
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      Wgmma<dim>::template registers_shared<kType, true>(sums, a[step], b.at(step * 16 * kPanelRow), true);
    }
    wgmma_commit();
  }
  __forceinline__ void issue_dv(const Operand& weights, int index) {
    wgmma_fence();
    add_by_columns<config.dim_v>(dv, weights, shared + kAt.d_o + index * kAt.d_o_stage);
  }
  __forceinline__ void issue_dk(const Operand& gradients, int index) {
    wgmma_fence();
    add_by_columns<config.dim_qk>(dk, gradients, shared + kAt.q + index * kAt.q_stage);
  }

  // -inf where a query does not see a key. distance: this consumer's first key from the step's first query. keys: from
  // that one on, in the sequence.
  __forceinline__ void mask_scores(Scores& x, int distance, int keys) {
    const int first_key = recomputed(first_row());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + half * 8;
      // Queries that see this key, relative to this lane's first, so that every comparison is with a constant.
      int begin = 0, end = config.block_q;
      if constexpr (config.banded) {
        const int first = distance + key - recomputed(lane()) % 4 * 2;
        begin = first - p.band.right;
        end = first + p.band.left + 1;
      }
      if (key >= keys) end = begin;
#pragma unroll
      for (int n = 0; n < kQueryTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int query = n * 8 + i;
          if (query >= end || (config.banded && query < begin)) x[n * 4 + half * 2 + i] = -infinity();
        }
      }
    }
  }

  // S^T to P^T.
  __forceinline__ void exponentiate(Scores& x, Operand& weights, unsigned rows) {
    const Words4 step = load_shared_16(rows + 2 * config.block_q * 4);
    const int distance = static_cast<int>(step.word[kStepDistance]) + consumer * kConsumerRows;
    const int keys = static_cast<int>(step.word[kStepKeys]) - consumer * kConsumerRows;
    bool masked = keys < kConsumerRows;
    if constexpr (config.banded) {
      masked |= distance + kConsumerRows - 1 > p.band.right || distance - (config.block_q - 1) < -p.band.left;
    }
    if (masked) mask_scores(x, distance, keys);
    rows += own_slot();
    const float scale_log2 = p.scale * kLog2E;
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      const Words4 lse = load_shared_16(rows + step * 16 * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // of the operand's registers: tile of 8 queries i / 2, row half i % 2
        const float* const pair = x + step * 8 + i * 2;
        weights[step][i] = pack<kType>(probability(pair[0], scale_log2, float_from_bits(lse.word[i / 2 * 2])),
                                       probability(pair[1], scale_log2, float_from_bits(lse.word[i / 2 * 2 + 1])));
      }
    }
  }

  // dP^T to dS^T, to registers, which may be those of the weights, and to shared memory.
  __forceinline__ void differentiate(const Scores& x, const Operand& weights, Operand& gradients, unsigned rows) {
    rows += config.block_q * 4 + own_slot();
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      const Words4 delta = load_shared_16(rows + step * 16 * 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = x + step * 8 + i * 2;
        const unsigned weight = weights[step][i];
        gradients[step][i] =
            pack<kType>((pair[0] - float_from_bits(delta.word[i / 2 * 2])) * low_to_float<kType>(weight),
                        (pair[1] - float_from_bits(delta.word[i / 2 * 2 + 1])) * high_to_float<kType>(weight));
      }
    }
    wait(kAt.ds_empty, ds_use.index, ds_use.parity ^ 1);
    const unsigned tile = shared + kAt.ds + ds_use.index * kAt.ds_stage;
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) store_matrix_x4(matrix_address(tile, step), gradients[step]);
    fence_async_proxy();
    __syncwarp();
    release(kAt.ds_full, ds_use.index);
    ds_use.advance();
  }

  // One place for S^T and dP^T, one for P^T and dS^T. Q and dO of a step are used up when the next S is there.
  __forceinline__ void walk_in_turn(int steps) {
    Scores x;
    Operand operand;
    issue_scores(x, use);
    for (int step = 0;;) {
      wgmma_wait<0>();
      wgmma_done(x);
      if (step > 0) release(kAt.empty, use.index_before());
      exponentiate(x, operand, rows_at(use.index));
      issue_dp(x, use);
      issue_dv(operand, use.index);
      wgmma_wait<0>();
      wgmma_done(x);
      differentiate(x, operand, operand, rows_at(use.index));
      issue_dk(operand, use.index);
      if (++step == steps) break;
      use.advance();
      issue_scores(x, use);
    }
  }

  // Two places of each. At the top, P^T of a step is there, and its dP is under way behind dK of the step before.
  // ptxas keeps products under way across the end of the loop only if somewhere in it all are waited for.
  __forceinline__ void walk_overlapped(int steps) {
    Scores s, dp;
    Operand weights, gradients;
    issue_scores(s, use);
    issue_dp(dp, use);
    wgmma_wait<1>();
    wgmma_done(s);
    exponentiate(s, weights, rows_at(use.index));
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      Ring<config.stages> next = use;
      next.advance();
      issue_dv(weights, use.index);
      issue_scores(s, next);
      wgmma_wait<0>();
      wgmma_done(s);
      wgmma_done(dp);
      if (step > 1) release(kAt.empty, use.index_before());
      differentiate(dp, weights, gradients, rows_at(use.index));
      issue_dk(gradients, use.index);
      issue_dp(dp, next);
      exponentiate(s, weights, rows_at(next.index));
      use = next;
    }
    issue_dv(weights, use.index);
    wgmma_wait<0>();
    wgmma_done(dp);
    differentiate(dp, weights, gradients, rows_at(use.index));
    issue_dk(gradients, use.index);
  }

  // A quad's lanes hold a row in pieces of two columns; they exchange them so that each has 16 bytes.
  template <int dim>
  __forceinline__ void store(const float (&sums)[dim / 2], Bits16* out, Index row_stride, int keys, float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row() + half * 8;
#pragma unroll
      for (int n = 0; n < dim / 8; n += 4) {
        unsigned words[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (n + j >= dim / 8) continue;
          const float* const pair = sums + (n + j) * 4 + half * 2;
          words[j] = pack<kType>(pair[0] * factor, pair[1] * factor);
        }
        transpose_quad(words, lane());
        if (row < keys && n + lane() % 4 < dim / 8) {
          store_16(out + row * row_stride + (n + lane() % 4) * 8, {words[0], words[1], words[2], words[3]});
        }
      }
    }
  }

  __forceinline__ void run(int steps) {
#pragma unroll
    for (int i = 0; i < config.dim_qk / 2; ++i) dk[i] = 0;
#pragma unroll
    for (int i = 0; i < config.dim_v / 2; ++i) dv[i] = 0;
    wgmma_done(dk);  // the zeros are written here, not by the compiler's choice while products are under way
    wgmma_done(dv);
    if (steps > 0) {
      wait(kAt.k_full, 0, 0);
      wait(kAt.v_full, 0, 0);
      if constexpr (config.keeps_k) keep(kept_k, shared + kAt.k);
      if constexpr (config.keeps_v) keep(kept_v, shared + kAt.v);
      if constexpr (config.overlaps) {
        walk_overlapped(steps);
      } else {
        walk_in_turn(steps);
      }
      wgmma_wait<0>();
      wgmma_done(dk);
      wgmma_done(dv);
    }
    // Worked out again: it would take registers all the way.
    const BackwardSm90Work<config> work(p, recomputed(blockIdx.x));
    const Index row = work.first_k + consumer * kConsumerRows;
    const int keys = work.len_k - work.first_k - consumer * kConsumerRows;
    store<config.dim_qk>(dk,
                         rows_of(p.dk, p.dk_strides, p.cu_seqlens_k, work.batch, work.kv_head) + row * p.dk_strides.seq,
                         p.dk_strides.seq, keys, p.scale);
    store<config.dim_v>(dv,
                        rows_of(p.dv, p.dv_strides, p.cu_seqlens_k, work.batch, work.kv_head) + row * p.dv_strides.seq,
                        p.dv_strides.seq, keys, 1.0f);
  }
};

template <AttentionBackwardSm90Config config>
__forceinline__ void attention_backward_sm90(const AttentionBackwardSm90Params& p) {
  static_assert(config.consumers == 2 && config.block_q % kConsumerRows == 0 && config.ds_stages >= 1);
  // Where it overlaps, a step's Q is wanted before the place of the one before last is given free.
  static_assert(config.stages >= (config.overlaps ? 3 : 2));
  static_assert(config.dim_qk % 8 == 0 && config.dim_v % 8 == 0);
  static_assert(config.dim_qk <= 256 && config.dim_v <= 256);
  static_assert(config.dq_columns == config.dim_qk ||
                (config.dq_columns == 64 && config.dim_qk > 64 && config.dim_qk <= 128));
  constexpr BackwardSm90Layout kAt = backward_sm90_layout(config);
  extern __shared__ __align__(kTileAlignment) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  if (threadIdx.x == 0) {
    constexpr unsigned kWarps = config.consumers * 4;
    barrier_init(shared + kAt.k_full, 1);
    barrier_init(shared + kAt.v_full, 1);
    for (int i = 0; i < config.stages; ++i) {
      barrier_init(shared + kAt.q_full + i * kBarrierBytes, 1 + 32);
      barrier_init(shared + kAt.d_o_full + i * kBarrierBytes, 1);
      barrier_init(shared + kAt.empty + i * kBarrierBytes, kWarps);
    }
    for (int i = 0; i < config.ds_stages; ++i) {
      barrier_init(shared + kAt.ds_full + i * kBarrierBytes, kWarps);
      barrier_init(shared + kAt.ds_empty + i * kBarrierBytes, 4);
    }
    barrier_init_done();
  }
  follow_grids_before();
  const BackwardSm90Work<config> work(p, blockIdx.x);
  if (work.first_k >= work.len_k) return;
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) % kWarpgroup / 32, 0);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (warpgroup == 0) {
    give_registers<producer_registers(config)>();
    BackwardSm90Producer<config> producer{p, shared, work};
    if (work.steps > 0 && warp == 0 && lane == 0) producer.load_tiles();
    if (warp == 1) producer.load_rows(lane);
  } else if (warpgroup == 1) {
    give_registers<config.dq_registers>();
    BackwardSm90DqMaker<config> maker{p, shared, work};
    if (work.steps > 0) maker.run(lane, warp);
  } else {
    take_registers<consumer_registers(config)>();
    const int consumer = warpgroup - 2;
    BackwardSm90Consumer<config> worker(p, shared, consumer);
    worker.run(work.steps);
  }
}

}  // namespace tessera
