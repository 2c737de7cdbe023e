// Arguments and tile shapes of attention/forward.cuh.
#pragma once

#include "contract/arch.h"
#include "contract/types.h"

namespace tessera {

struct AttentionForwardConfig {
  DType dtype;
  int dim_qk;
  int dim_v;
  int block_q;     // query rows of a block
  int block_k;     // keys of a step
  int warps;       // each takes block_q / warps rows, 16 or 32
  bool in_halves;  // scores are summed in two halves: more exact, more registers
  int vector;      // elements per load and store: 8 (16 bytes), or 1 where a pointer or a stride does not allow it
  bool banded;     // causal or a window: some tiles are skipped and some masked
  bool general;    // softcap, ALiBi or a negative scale: scores are transformed one by one
};

template <class Visitor>
constexpr void visit_fields(const AttentionForwardConfig& config, Visitor&& visit) {
  visit("dtype", config.dtype);
  visit("dim_qk", config.dim_qk);
  visit("dim_v", config.dim_v);
  visit("block_q", config.block_q);
  visit("block_k", config.block_k);
  visit("warps", config.warps);
  visit("in_halves", config.in_halves);
  visit("vector", config.vector);
  visit("banded", config.banded);
  visit("general", config.general);
}

constexpr int forward_shared_bytes(const AttentionForwardConfig& config) {
  const int q_or_o = config.block_q * (config.dim_qk > config.dim_v ? config.dim_qk : config.dim_v);
  return 2 * (q_or_o + config.block_k * (config.dim_qk + config.dim_v));
}

struct ForwardTile {
  int block_q;
  int block_k;
  int warps;
};

// The largest tiles whose scores and output fit the registers without spilling (the compile gate sees to it), and whose
// Q, K and V fit the architecture's shared memory. 32 rows a warp halve the shared-memory traffic of 16, so they come
// first; scores that are transformed one by one need the registers for that.
constexpr ForwardTile forward_tile(int arch, int dim_qk, int dim_v, bool banded, bool general) {
  const int dim = dim_qk > dim_v ? dim_qk : dim_v;
  if (arch < 80) return dim <= 128 ? ForwardTile{64, 64, 4} : ForwardTile{64, general ? 16 : 32, 4};
  if (general || dim > 128) return {64, 64, 4};
  if (dim <= 64) return banded || arch < 90 ? ForwardTile{128, 96, 4} : ForwardTile{128, 112, 4};
  if (dim <= 80) return {128, 64, 4};
  return banded || dim < 128 || arch < 90 ? ForwardTile{128, 32, 4} : ForwardTile{128, 64, 4};
}

// Wastes less where the mask cuts through many tiles or there are few queries.
constexpr ForwardTile small_forward_tile(int arch, int dim_qk, int dim_v, bool banded, bool general) {
  return arch < 80 ? forward_tile(arch, dim_qk, dim_v, banded, general) : ForwardTile{64, 64, 4};
}

// Where the small tile has the registers for it.
constexpr bool can_sum_in_halves(int arch, int dim_v, int vector, bool general) {
  return arch >= 80 && dim_v <= 128 && vector == 8 && !general;
}

// A sequence's query i stands at key i + offset and sees keys from position - left to position + right.
struct Band {
  int left;   // kUnbounded: all
  int right;  // likewise; 0 where causal
  bool bottom_right;
};
constexpr int kUnbounded = 1 << 30;

struct AttentionForwardParams {
  const void* q;  // [B, Sq, Hq, Dqk], or [total_q, Hq, Dqk]
  const void* k;
  const void* v;
  void* o;                  // [B, Sq, Hq, Dv]
  float* lse;               // [B, Hq, Sq], natural log, may be null
  const int* cu_seqlens_q;  // [B + 1], null: every sequence has seq_q queries
  const int* cu_seqlens_k;
  const float* alibi_slopes;  // [Hq] or [B, Hq], may be null
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides o_strides;
  RowStrides lse_strides;
  Index alibi_batch_stride;
  int seq_q;
  int seq_k;
  unsigned heads_q;
  unsigned group;    // query heads that share a key head
  unsigned q_tiles;  // blocks of the longest sequence
  Band band;
  float scale;
  float softcap;  // 0: none
};

}  // namespace tessera
