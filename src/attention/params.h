// Params that attention kernels have in common, filled from a problem and its arguments.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "attention/problem.h"
#include "base/arithmetic.h"
#include "tile/kv_cache.h"
#include "tile/mask.h"

namespace tessera::attention {

inline int band_edge(std::int64_t window) {
  return static_cast<int>(window < 0 ? kUnbounded : std::min<std::int64_t>(window, kUnbounded));
}

inline Band band_of(const AttentionProblem& p) {
  return {.left = band_edge(p.window_left),
          .right = p.causal ? 0 : band_edge(p.window_right),
          .bottom_right = p.alignment == Alignment::kBottomRight,
          .chunk = static_cast<int>(std::min<std::int64_t>(p.chunk, kUnbounded))};
}

// Some keys are hidden from some queries.
inline bool is_masked(const AttentionProblem& p) {
  return p.causal || p.window_left >= 0 || p.window_right >= 0 || p.chunk > 0;
}

// Scores are changed by more than a positive scale.
inline bool has_score_mod(const AttentionProblem& p) { return p.softcap > 0 || p.alibi || !(p.scale > 0); }

// Elements of a load or store: 16 bytes if the rows' alignment allows it.
inline int vector_of(const AttentionProblem& p) { return p.vectors ? 8 : 1; }

// True if every row starts at a multiple of `vector` elements. The stride of a dim of one element does not matter. Both
// sizes are powers of two: every call asks this, and a division takes tens of cycles.
inline bool allows_vectors(const TensorView& view, std::int64_t batch, std::int64_t seq, std::int64_t heads,
                           std::int64_t element_bytes, std::int64_t vector) {
  const std::int64_t strides =
      (batch > 1 ? view.batch_stride : 0) | (seq > 1 ? view.seq_stride : 0) | (heads > 1 ? view.head_stride : 0);
  return (strides & (vector - 1)) == 0 &&
         (reinterpret_cast<std::uintptr_t>(view.data) & static_cast<std::uintptr_t>(element_bytes * vector - 1)) == 0;
}

constexpr std::int64_t kCacheBytes = std::int64_t{32} << 20;  // of L2: two thirds of what an H100 has

// Of `columns` (heads of all sequences), how many are worked on together so that what they read repeatedly, `bytes`
// each, stays in the L2 cache. `group` of them share those bytes. All rounds have the same size, so that the last one
// is not a short remainder that starts with the longest tiles.
inline unsigned columns_together(std::int64_t columns, std::int64_t bytes, std::int64_t group = 1) {
  const std::int64_t fit = std::max<std::int64_t>(1, kCacheBytes / std::max<std::int64_t>(1, bytes)) * group;
  const std::int64_t rounds = std::max<std::int64_t>(1, ceil_div(columns, fit));
  return static_cast<unsigned>(std::min(columns, ceil_div(ceil_div(columns, rounds), group) * group));
}

inline Strides strides_of(const TensorView& view) { return {view.batch_stride, view.seq_stride, view.head_stride}; }
inline RowStrides strides_of(const RowView& view) { return {view.batch_stride, view.head_stride}; }

// Params: any attention kernel's.
template <class Params>
void fill_problem(Params& params, const AttentionArgs& args) {
  const AttentionProblem& p = args.problem;
  params.cu_seqlens_q = args.cu_seqlens_q;
  params.cu_seqlens_k = args.cu_seqlens_k;
  params.alibi_slopes = args.alibi_slopes;
  params.alibi_batch_stride = args.alibi_batch_stride;
  params.seq_q = static_cast<int>(p.seq_q);
  params.seq_k = static_cast<int>(p.seq_k);
  params.heads_q = static_cast<unsigned>(p.heads_q);
  params.group = static_cast<unsigned>(p.heads_q / p.heads_kv);
  params.band = band_of(p);
  params.scale = p.scale;
  params.softcap = p.softcap;
}

// Params: a forward's.
template <class Params>
void fill_outputs(Params& params, const AttentionArgs& args) {
  params.o = args.o.data;
  params.lse = args.lse.data;
  params.o_strides = strides_of(args.o);
  params.lse_strides = strides_of(args.lse);
}

// The cache of decode, all new keys already in it.
inline KvCache kv_cache_of(const AttentionArgs& args) {
  const AttentionProblem& p = args.problem;
  const auto at_most = [](std::int64_t n) { return static_cast<int>(std::min<std::int64_t>(n, INT_MAX)); };
  return {.seqlens = args.cache_seqlens,
          .leftpad = args.leftpad_k,
          .batch_idx = args.cache_batch_idx,
          .page_table = args.page_table,
          .status = args.status,
          .page_table_stride = args.page_table_stride,
          .capacity = static_cast<int>(p.seq_k),
          .rows = at_most(p.cache_rows),
          .num_pages = at_most(p.num_pages),
          .by_page = divisor(static_cast<unsigned>(std::max<std::int64_t>(1, p.page_size)))};
}

// Params: of a kernel that reads q, k and v by their addresses.
template <class Params>
void fill_inputs(Params& params, const AttentionArgs& args) {
  params.q = args.q.data;
  params.k = args.k.data;
  params.v = args.v.data;
  params.q_strides = strides_of(args.q);
  params.k_strides = strides_of(args.k);
  params.v_strides = strides_of(args.v);
  fill_problem(params, args);
}

}  // namespace tessera::attention
