// What every attention kernel takes of a problem and its arguments.
#pragma once

#include <algorithm>

#include "contract/band.h"
#include "ops/attention.h"
#include "ops/extents.h"

namespace tessera {

inline int band_edge(std::int64_t window) {
  return static_cast<int>(window < 0 ? kUnbounded : std::min<std::int64_t>(window, kUnbounded));
}

inline Band band_of(const AttentionProblem& p) {
  return {.left = band_edge(p.window_left),
          .right = p.causal ? 0 : band_edge(p.window_right),
          .bottom_right = p.alignment == Alignment::kBottomRight};
}

// Some keys are hidden from some queries.
inline bool is_banded(const AttentionProblem& p) { return p.causal || p.window_left >= 0 || p.window_right >= 0; }

// More is asked of a score than a positive scale.
inline bool is_general(const AttentionProblem& p) { return p.softcap > 0 || p.alibi || !(p.scale > 0); }

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

// Of a forward.
template <class Params>
void fill_outputs(Params& params, const AttentionArgs& args) {
  params.o = args.o.data;
  params.lse = args.lse.data;
  params.o_strides = strides_of(args.o);
  params.lse_strides = strides_of(args.lse);
}

// Of a kernel that reads q, k and v by their addresses.
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

}  // namespace tessera
