// Arguments and tile shapes of attention/backward.cuh, backward_dq.cuh and backward_convert.cuh.
#pragma once

#include "contract/arch.h"
#include "contract/attention_forward.h"
#include "contract/types.h"

namespace tessera {

// attention/backward.cuh: a block owns block_k keys and walks over the queries.
struct AttentionBackwardConfig {
  DType dtype;
  int dim_qk;
  int dim_v;
  int block_q;     // queries of a step
  int block_k;     // keys of a block
  int warps;       // half of them make dV, half dK; each takes 2 * block_k / warps keys, 16 or 32
  int stages;      // of Q, dO and dS: 1 or 2
  int kept_steps;  // of K and V, 16 columns each, that stay in registers as the first operands of S and dP
  bool adds_dq;    // dQ is added up in fp32 in global memory; else backward_dq.cuh makes it
  int dq_unroll;   // steps of dQ's product that ptxas may overlap: fewer save registers
  int blocks_per_sm;
  int vector;  // as the forward's
  bool banded;
  bool general;
};

template <class Visitor>
constexpr void visit_fields(const AttentionBackwardConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("block_q", config.block_q);
  visit("block_k", config.block_k);
  visit("warps", config.warps);
  visit("stages", config.stages);
  visit("kept_steps", config.kept_steps);
  visit("adds_dq", config.adds_dq);
  visit("dq_unroll", config.dq_unroll);
  visit("blocks_per_sm", config.blocks_per_sm);
  visit("vector", config.vector);
  visit("banded", config.banded);
  visit("general", config.general);
}

// Byte offsets in a block's shared memory.
struct BackwardLayout {
  int k;        // [block_k, dim_qk]; dK on the way out
  int v;        // [block_k, dim_v]; dV on the way out
  int weights;  // [block_k, block_q], in the order of mma's fragments
  int ds;       // [stages][block_k, block_q]
  int q;        // [stages][block_q, dim_qk]
  int d_o;      // [stages][block_q, dim_v]
  int rows;     // [stages][2][block_q] floats: LSE and delta
  int facts;    // [kBackwardFacts] ints
  int bytes;
};

constexpr int kBackwardFacts = 8;

constexpr bool keeps_all_of_v(const AttentionBackwardConfig& config) { return config.kept_steps * 16 >= config.dim_v; }

constexpr BackwardLayout backward_layout(const AttentionBackwardConfig& config) {
  BackwardLayout at = {};
  const int tile = config.block_k * config.block_q * 2;
  const int v_bytes = config.block_k * config.dim_v * 2;
  const int work_bytes = tile * (1 + (config.adds_dq ? config.stages : 0));
  at.k = 0;
  at.v = config.block_k * config.dim_qk * 2;
  // Once V is in registers its place is free.
  at.weights = at.v + (keeps_all_of_v(config) ? 0 : v_bytes);
  at.ds = at.weights + tile;
  at.q = at.weights + (keeps_all_of_v(config) && v_bytes > work_bytes ? v_bytes : work_bytes);
  at.d_o = at.q + config.stages * config.block_q * config.dim_qk * 2;
  at.rows = at.d_o + config.stages * config.block_q * config.dim_v * 2;
  at.facts = at.rows + config.stages * 2 * config.block_q * 4;
  at.bytes = at.facts + kBackwardFacts * 4;
  return at;
}

struct BackwardTile {
  int block_q;
  int block_k;
  int warps;
  int stages;
  int kept_steps;
  int dq_unroll;
  int blocks_per_sm;
};

// Found by trying on an H200 (docs/kernels/attention_backward.md); no register spilled, which the compile gate sees to.
// Half-size tiles elsewhere fit what shared memory there is.
constexpr BackwardTile backward_tile(int arch, int dim_qk, int dim_v, bool banded, bool general) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  const int steps = (dim + 15) / 16;
  if (arch < 80) {
    if (dim <= 128) return {32, 64, dim <= 96 ? 4 : 8, 1, 0, 2, 1};
    return dim <= 192 ? BackwardTile{32, 32, 4, 1, 0, 2, 1} : BackwardTile{16, 32, 4, 1, 0, 2, 1};
  }
  if (arch < 90) {
    const bool small = arch != 80;  // 99 KB of shared memory
    if (dim <= 64) return {small ? 32 : 64, 64, 4, 2, general ? 0 : steps / 2, 2, 3};
    if (dim <= 96) return {small ? 32 : 64, small ? 64 : 128, small ? 4 : 8, 2, general ? 0 : steps, 2, 1};
    if (dim <= 128) return {32, small ? 64 : 128, small ? 4 : 8, 2, general ? 0 : 2, 2, 1};
    return small ? BackwardTile{16, 64, 8, 1, 0, 2, 1} : BackwardTile{32, 64, 8, 2, 0, 2, 1};
  }
  if (dim <= 64) return {64, 64, 4, 2, general ? 0 : banded ? dim / 16 : steps, banded ? 2 : 16, 3};
  if (dim <= 96) return {64, 128, 8, 2, general ? 0 : steps, 16, 1};
  if (dim <= 128) return {64, 128, 8, 2, general ? 0 : banded && dim == 128 ? 6 : 4, 16, 1};
  return {64, 64, 8, 2, 0, banded ? 2 : 16, 1};
}

// Without 16-byte copies, what is on its way is in registers: one stage, and nothing kept.
constexpr BackwardTile staged_backward_tile(int arch, int dim_qk, int dim_v, bool banded, bool general) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  const BackwardTile tile = backward_tile(arch, dim_qk, dim_v, banded, general);
  if (arch < 80) return tile;
  if (dim <= 96) return {tile.block_q, tile.block_k, tile.warps, 1, 0, 2, 1};
  return {arch != 80 && arch < 90 && dim > 128 ? 16 : 32, 64, 8, 1, 0, 2, 1};
}

// For few queries: one strip a tile. It wastes less, and has registers to sum the scores more exactly.
constexpr BackwardTile small_backward_tile(int arch, int dim_qk, int dim_v) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (dim <= 128) return {16, 64, arch < 80 && dim > 96 ? 8 : 4, 1, 0, 2, 1};
  return {16, arch < 80 ? 32 : 64, arch < 80 ? 4 : 8, 1, 0, 2, 1};
}

// attention/backward_dq.cuh: a block owns block_q queries and walks over the keys.
struct BackwardDqConfig {
  DType dtype;
  int dim_qk;
  int dim_v;
  int block_q;
  int block_k;
  int warps;   // each takes block_q / warps queries, 16 or 32
  int stages;  // of K and V
  int blocks_per_sm;
  int vector;
  bool banded;
  bool general;
};

template <class Visitor>
constexpr void visit_fields(const BackwardDqConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("block_q", config.block_q);
  visit("block_k", config.block_k);
  visit("warps", config.warps);
  visit("stages", config.stages);
  visit("blocks_per_sm", config.blocks_per_sm);
  visit("vector", config.vector);
  visit("banded", config.banded);
  visit("general", config.general);
}

constexpr int backward_dq_shared_bytes(const BackwardDqConfig& config) {
  return 2 * (config.block_q + config.stages * config.block_k) * (config.dim_qk + config.dim_v);
}

struct BackwardDqTile {
  int block_q;
  int block_k;
  int warps;
  int stages;
  int blocks_per_sm;
};

constexpr BackwardDqTile backward_dq_tile(int arch, int dim_qk, int dim_v, bool general) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (arch < 80) {
    if (dim <= 128) return {64, 32, 4, 1, 1};
    return dim <= 192 ? BackwardDqTile{64, 16, 4, 1, 1} : BackwardDqTile{32, 16, 2, 1, 1};
  }
  if (dim <= 80 && !general) return {128, 64, 4, 2, dim <= 64 ? 3 : 2};
  if (dim <= 128) return general ? BackwardDqTile{64, 64, 4, 1, 2} : BackwardDqTile{128, 64, 4, 1, 2};
  if (arch >= 90) return {128, 32, 8, 2, 1};
  return {64, arch == 80 ? 32 : 16, 4, 2, 1};
}

// fp32 sums of dQ before they are rounded: [B, Hq, rows / 16, Dqk / 8] tiles of 16 x 8 in the order of mma's
// accumulators, so that a warp adds whole lines. Where lengths vary, [Hq, rows / 16, ...], and every sequence starts at
// a multiple of block_q rows.
struct DqSums {
  float* data;
  Index rows;  // per head
};

constexpr Index padded_start(Index start, Index sequence, Index block_q) {
  return (start + sequence * block_q) / block_q * block_q;
}

struct AttentionBackwardParams {
  const void* q;
  const void* k;
  const void* v;
  const void* d_o;
  const float* lse_log2;    // [B, Hq, Sq], of backward_preprocess.cuh
  const float* delta;       // likewise
  void* dq;                 // backward_dq.cuh
  void* dk;                 // backward.cuh
  void* dv;                 // backward.cuh
  DqSums dq_sums;           // backward.cuh, where it adds dQ
  const int* cu_seqlens_q;  // [B + 1], null: every sequence has seq_q queries
  const int* cu_seqlens_k;
  const float* alibi_slopes;
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides d_o_strides;
  Strides dq_strides;
  Strides dk_strides;
  Strides dv_strides;
  RowStrides row_strides;  // of lse_log2 and delta
  Index alibi_batch_stride;
  int seq_q;
  int seq_k;
  unsigned heads_q;
  unsigned group;  // query heads that share a key head
  unsigned tiles;  // blocks of the longest sequence
  Band band;
  float scale;
  float softcap;  // 0: none
};

// attention/backward_convert.cuh: dQ = scale * sums, rounded.
constexpr int kConvertTiles = 4;  // of 16 x 8, side by side, that a warp takes

struct BackwardConvertConfig {
  DType dtype;
  int vector;
  int threads;
};

template <class Visitor>
constexpr void visit_fields(const BackwardConvertConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("vector", config.vector);
  visit("threads", config.threads);
}

struct BackwardConvertParams {
  DqSums dq_sums;
  void* dq;
  const int* cu_seqlens_q;
  Strides dq_strides;
  int seq_q;
  int block_q;  // of the kernel that made the sums
  unsigned heads;
  unsigned chunks;  // of 8 columns
  unsigned blocks;  // of the longest sequence of a head
  float scale;
};

}  // namespace tessera
