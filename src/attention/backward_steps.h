// The workspace that every backward on a GPU has, its first step, and the predicted time of its main one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "attention/backward_config.h"
#include "attention/params.h"
#include "attention/problem.h"
#include "base/status.h"
#include "cuda/kernel.h"
#include "engine/device.h"

namespace tessera::attention {

// Buffers in the workspace.
struct BackwardBuffers {
  RowView delta;     // [B, Hq, Sq]
  RowView lse_log2;  // likewise
  DqSums sums;
  DqSums dk_sums;      // of the same layout, only if CTAs share dK and dV
  DqSums dv_sums;      // likewise
  unsigned* turns;     // [rows of the sums / block_q * turns], only if they are added to in a fixed order
  unsigned* dk_turns;  // [rows of dK's sums / 16], likewise
  unsigned* dv_turns;
  unsigned* progress;  // steps of all CTAs, only if they are counted
  float* slice_sums;   // of the slices of key tiles (attention/backward_slices.h)
  unsigned* slices_added;
  // The sums and the counter of steps; in a fixed order, the sums of dK and dV and the turns: dQ's first key tile stores its
  // sums.
  void* zeroed;
  std::int64_t zeroed_bytes;
};

// What a main kernel adds to in the workspace.
struct BackwardSums {
  int block_q = 0;               // queries of a tile, for the sums of dQ; 0: there are none
  int block_k = 0;               // keys of a tile, for those of dK and dV, likewise
  int turns = 0;                 // counters of a query tile if dQ's sums are added to in a fixed order
  std::int64_t sliced_keys = 0;  // of key tiles whose queries are divided
  bool counts_steps = false;     // of all CTAs, if they stay in step
};
// Saturated if sizes overflow.
std::int64_t backward_bytes(const AttentionProblem& problem, const BackwardSums& sums);
BackwardBuffers backward_buffers(const AttentionProblem& problem, const BackwardSums& sums, void* workspace);

// Bytes for delta, LSE, the sums of dQ and, if groups or queries are split, of dK and dV, the counter of steps if they are
// counted, and, in a fixed order, the turns; TESSERA_UNSUPPORTED if that is beyond what can be addressed, or one of the
// kernels would need more CTAs than a grid has.
// For the Hopper backwards; kernel: its name, for messages. block_k: keys of a CTA.
Result<std::size_t> hopper_backward_workspace(const AttentionProblem& problem, const char* kernel, int block_k,
                                              const BackwardSums& sums);

// What both Hopper backwards refuse; what is left depends on head dims and the workspace.
std::optional<std::string> hopper_backward_refuses(const AttentionProblem& problem, const engine::Device& device);

// What the CTAs of a query head read or add to: Q and dO, of 16 bits, and dQ's sums, of 32.
inline std::int64_t streamed_bytes(const AttentionProblem& p) {
  return saturating_product(p.seq_q, 6 * p.dim_qk + 2 * p.dim_v, 1);
}

// Everything in the Params of a Hopper backward but tensor maps and buffers. The caller has checked that one grid covers
// the problem. part_heads: query heads of a CTA. heads_at_once: how many of them the CTAs of a key head are at, at about
// the same time.
template <class Params>
cuda::Work<Params> hopper_backward_work(const AttentionArgs& args, int block_k, std::int64_t part_heads,
                                        std::int64_t heads_at_once) {
  const AttentionProblem& p = args.problem;
  const std::int64_t k_tiles = ceil_div(p.seq_k, block_k), group = p.heads_q / p.heads_kv;
  Params params = {};
  params.dk = args.dk.data;
  params.dv = args.dv.data;
  params.cu_seqlens_q = args.cu_seqlens_q;
  params.cu_seqlens_k = args.cu_seqlens_k;
  params.dk_strides = strides_of(args.dk);
  params.dv_strides = strides_of(args.dv);
  params.seq_q = static_cast<int>(p.seq_q);
  params.seq_k = static_cast<int>(p.seq_k);
  params.heads_q = static_cast<unsigned>(p.heads_q);
  params.group = static_cast<unsigned>(group);
  params.k_tiles = static_cast<unsigned>(k_tiles);
  params.band = band_of(p);
  params.scale = p.scale;
  params.softcap = p.softcap;
  params.alibi_slopes = args.alibi_slopes;
  params.alibi_batch_stride = args.alibi_batch_stride;
  const std::int64_t parts = ceil_div(group, part_heads);
  params.part_heads = static_cast<unsigned>(part_heads);
  params.by_parts = divisor(static_cast<unsigned>(parts));
  const std::int64_t columns = p.batch * p.heads_kv * parts;
  const std::int64_t head_bytes = saturating_product(streamed_bytes(p), heads_at_once, 1);
  params.columns = static_cast<unsigned>(columns);
  params.together = divisor(columns_together(columns, head_bytes));
  params.by_heads = divisor(static_cast<unsigned>(p.heads_kv * parts));
  return {params, {static_cast<unsigned>(k_tiles * columns), 1, 1}};
}

// dQ, and what is in the workspace.
template <class Params>
void fill_buffers(Params& params, const AttentionArgs& args, const BackwardBuffers& buffers) {
  params.dq = args.dq.data;
  params.dq_strides = strides_of(args.dq);
  params.lse_log2 = buffers.lse_log2.data;
  params.delta = buffers.delta.data;
  params.row_strides = strides_of(buffers.delta);
  params.dq_sums = buffers.sums;
  params.dq_turns = buffers.turns;
  params.dk_sums = buffers.dk_sums;
  params.dv_sums = buffers.dv_sums;
  params.dk_turns = buffers.dk_turns;
  params.dv_turns = buffers.dv_turns;
}

// Of these key tiles or fewer, a head's are all at work at the same time if they take turns at dQ.
constexpr unsigned kFewKeyTiles = 8;
// For key tiles that take turns: as many columns together as one wave of CTAs holds, so that the sums are still in the L2
// cache when their turns come. 512 keys gained 3 to 8 % on an H200. With more key tiles, one column after the other if query
// heads share keys: 4096 and 8192 keys gained 6 and 2 % with whole groups, 0 to 4 % with divided ones. cluster: CTAs of a key
// tile.
template <class Params>
void keep_turns_close(Params& params, int multiprocessors, int cluster = 1) {
  if (params.k_tiles > kFewKeyTiles) {
    if (params.group > 1) params.together = divisor(1);
    return;
  }
  const std::int64_t wave =
      std::max<std::int64_t>(1, multiprocessors / (cluster * static_cast<std::int64_t>(params.k_tiles)));
  const std::int64_t rounds = ceil_div(params.columns, wave);
  params.together = divisor(std::min(params.together.by, static_cast<unsigned>(ceil_div(params.columns, rounds))));
}

// How the queries of the last key tiles are divided among CTAs (attention/backward_slices.h).
struct QuerySplit {
  std::int64_t tiles = 0;    // divided key tiles
  int slices = 1;            // CTAs of each
  double relative_time = 1;  // predicted; 1 is the time without a division
};
// Of a main kernel one of whose CTAs fits an SM. in_turns: at dQ's sums.
QuerySplit split_queries(const AttentionProblem& problem, const engine::Device& device, int block_q, int block_k,
                         bool in_turns);
std::string split_text(const QuerySplit& split);  // for an offer: empty without a division
// Params and grid of the whole work without a division.
template <class Params>
void slice(cuda::Work<Params>& work, const QuerySplit& split, const BackwardBuffers& buffers) {
  const auto tiles = static_cast<unsigned>(split.tiles), slices = static_cast<unsigned>(split.slices);
  work.params.slices = {work.grid.x - tiles, divisor(tiles), slices, buffers.slice_sums, buffers.slices_added};
  work.grid.x += tiles * (slices - 1);
}

bool fits_a_grid(std::int64_t tiles, const AttentionProblem& problem, std::int64_t heads);

// Also zeroes the sums or their turns.
Status enqueue_preprocess(const cuda::Kernel& kernel, const AttentionArgs& args, const BackwardBuffers& buffers,
                          cuda::CUstream stream);

// Microseconds, roughly, of a main kernel that computes `rows` query rows of each head, at a rate relative to that
// of the portable kernel's large tile.
double predicted_backward_time(const AttentionProblem& problem, const engine::Device& device, double rows,
                               double relative);

// What turns at dQ add to the time of a main kernel, as a fraction, as measured on an H200: key tiles wait for one another,
// and the longest come last, if there are longer ones.
struct TurnCost {
  double unmasked;
  double window;  // its left edge makes key tiles about equally long
  double causal;
};
// Time of a backward whose key tiles take turns at dQ, relative to one that adds in any order. Turns spare the zeroing and the
// conversion of the sums, which is more than they cost if a query sees few keys. Not if CTAs are few, or if query heads share
// keys, since dK and dV are not divided then. block_q, block_k: of a CTA. cluster: CTAs of a key tile.
double relative_time_of_turns(const AttentionProblem& problem, const engine::Device& device, int block_q, int block_k,
                              const TurnCost& cost, int cluster = 1);

// How the query heads of a key head are divided among CTAs: the best of the divisions into two parts or more.
struct GroupSplit {
  int part_heads = 0;        // query heads of a CTA
  double relative_time = 1;  // predicted; 1 is the time without a division
};
std::string split_text(const GroupSplit& split);  // for an offer: empty without a division
// block_q, block_k: of the main kernel, one of whose CTAs fits an SM. missing: how much longer its steps take if the heads
// in flight are twice what fits the L2 cache. in_turns: at dQ's sums.
GroupSplit split_group(const AttentionProblem& problem, const engine::Device& device, int block_q, int block_k,
                       double missing, bool in_turns);

}  // namespace tessera::attention
