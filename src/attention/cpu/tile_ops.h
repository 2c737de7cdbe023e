// The operations on tiles that attention is made of, one table per instruction set. The algorithms (forward.cc,
// backward.cc, decode.cc) are written once on top of a table; only what is behind it is compiled per target.
//
// Products and their packed forms are those of cpu/products.h.
// Queries are the columns (n) of every score tile: max, sum and log-sum-exp then live in vector lanes, nothing is ever
// reduced across a vector, and with fp32 a score tile is at once a result, an rhs and an lhs, without a copy.
#pragma once

#include <cstdint>

#include "attention/problem.h"
#include "cpu/products.h"

namespace tessera::cpu {

// How scores become logits, in units of log2: cap * tanh(score * scale / cap) - slope * distance.
struct ScoreMap {
  float scale;           // the problem's, times log2(e)
  float softcap;         // 0: none, else the problem's, times log2(e)
  const float* slopes;   // [columns], times log2(e); null: none
  const float* origins;  // [columns], position of the column's query relative to the tile's first key; with slopes
  const std::int32_t* begins;  // [columns], visible rows of the tile; null: all
  const std::int32_t* ends;
};

inline ScoreMap from_panel(ScoreMap map, std::int64_t first_column) {
  if (map.slopes != nullptr) {
    map.slopes += first_column;
    map.origins += first_column;
  }
  if (map.begins != nullptr) {
    map.begins += first_column;
    map.ends += first_column;
  }
  return map;
}

// Forward: scores of a tile become probabilities relative to the running max, with the accumulator rescaled to it.
struct SoftmaxTile {
  ScoreMap map;
  int panels;                 // columns / W
  int rows;                   // keys in the tile
  float shift;                // added to the running max, so that the sum over all keys stays below 1
  float* scores;              // result form [panels][stride][W]; overwritten
  std::int64_t score_stride;  // lines in a panel
  void* probs;                // rhs form; for fp32 the same memory as scores
  std::int64_t prob_stride;   // lines (k) in a panel
  float* row_max;             // [panels * W], in units of log2, kNoMax if no key has been seen
  float* row_sum;             // [panels * W]
  float* accumulator;         // result form [panels][acc_stride][W]
  std::int64_t acc_stride;
  std::int64_t acc_rows;
};

constexpr float kNoMax = -3.0e38f;  // below any logit, and finite: kNoMax - kNoMax is 0
constexpr float kMaxLogit = 3.0e38f;

// Backward: scores and d_probs of a tile become probabilities and d_scores.
struct GradTile {
  ScoreMap map;
  int panels;
  int rows;
  float* scores;         // in: scores, result form; fp32 out: probabilities
  float* d_probs;        // in: gradient of the probabilities, result form; fp32 out: gradient of the scores
  std::int64_t stride;   // lines in a panel of scores and d_probs
  const float* log_sum;  // [panels * W], in units of log2; kMaxLogit makes all probabilities 0
  const float* row_dot;  // [panels * W], rowsum(do * o) - dlse
  void* probs;           // bf16 only: lhs form [q / 32][stride][32]
  void* d_scores;        // bf16 only: lhs form
  void* d_scores_rhs;    // bf16 only: rhs form [panels][stride / 2][W][2]
};

// Decode with few queries: their rows against keys in place, without packing. Sums run along the head dim, so the
// vectors are full even for a single query.
constexpr int kStreamRows = 8;   // queries, at most
constexpr int kStreamKeys = 64;  // keys, at most
constexpr int kStreamAhead = 8;  // pointers beyond `keys`, for prefetching

struct StreamTile {
  DType dtype;
  int rows;
  int keys;
  std::int64_t dim_qk, dim_v;
  const void* const* k;  // [keys + kStreamAhead] rows of K
  const void* const* v;  // likewise
  const float* q;        // [rows][round_up(Dqk, kPad)], zeros behind Dqk
  ScoreMap map;          // one column per row; begins and ends are always given
  float shift;           // as in SoftmaxTile
  float* row_max;        // [rows]
  float* row_sum;
  float* accumulator;  // [rows][round_up(Dv, kPad)]
};

struct Target {
  void* data;
  std::int64_t stride;
  DType dtype;
};

// What is between the products.
struct Tiles {
  // Panels of a score tile that go from the product through the softmax together: all of them if the product works on
  // several at once, else as few as possible, so that scores stay in L1.
  int forward_panels;
  int backward_panels;
  // Keys in a score tile, multiples of kPad.
  std::int64_t forward_keys;
  std::int64_t backward_keys;

  void (*softmax)(const SoftmaxTile&);
  void (*softmax_grad)(const GradTile&);

  // result form [..][stride][W] -> target[rows][cols], times scale (store) or scales[row] (store_t, result transposed:
  // its columns are the target's rows).
  void (*store)(const float* result, std::int64_t stride, std::int64_t rows, std::int64_t cols, float scale,
                const Target&);
  void (*store_t)(const float* result, std::int64_t stride, std::int64_t rows, std::int64_t cols, const float* scales,
                  const Target&);

  void (*stream)(const StreamTile&);
  // source[rows][cols] as fp32 [rows][round_up(cols, kPad)].
  void (*widen)(const Source&, std::int64_t rows, std::int64_t cols, float* dst);
};

struct TileOps : Products, Tiles {};

// Operands in fp32, whatever the tensors' type is. Null if the build or the CPU does not have it.
const TileOps* fp32_ops(Isa isa);
// Operands in bf16, for bf16 tensors.
const TileOps* bf16_ops(Bf16Isa isa);

// The table that serves a type on this CPU.
const TileOps* ops_for(DType dtype);

}  // namespace tessera::cpu
