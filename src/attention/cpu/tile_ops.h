// The operations on tiles that attention is made of, one table per instruction set. The algorithms (forward.cc,
// backward.cc, decode.cc) are written once on top of a table; only what is behind it is compiled per target.
//
// A product is result[m][n] (+)= lhs[m][k] * rhs[k][n]. Its operands are packed into panels whose lines are one vector
// (one cache line with AVX-512), W = width columns of fp32:
//   lhs     [ceil(k / line)][m][line]       line = W for fp32, 32 for bf16
//   rhs     [ceil(n / W)][k][W]             bf16: [ceil(n / W)][k / 2][W][2], pairs of k side by side
//   result  [ceil(n / W)][m][W]             always fp32
// Queries are the columns (n) of every score tile: max, sum and log-sum-exp then live in vector lanes, nothing is ever
// reduced across a vector, and with fp32 a score tile is at once a result, an rhs and an lhs, without a copy.
// Everything is padded with zeros up to the whole panel: m and k to kPad, n to W.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/problem.h"

namespace tessera::cpu {

constexpr std::int64_t kPad = 32;
constexpr int kMaxWidth = 16;  // W of the widest table

constexpr std::int64_t round_up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

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

struct Source {
  const void* data;
  std::int64_t stride;  // elements between rows
  DType dtype;
};

struct Target {
  void* data;
  std::int64_t stride;
  DType dtype;
};

struct TileOps {
  int width;         // W
  int line;          // of lhs
  std::size_t elem;  // bytes of an operand's element

  // Panels of a score tile that go from the product through the softmax together: all of them if the product works on
  // several at once, else as few as possible, so that scores stay in L1.
  int forward_panels;
  int backward_panels;
  // Keys in a score tile, multiples of kPad.
  std::int64_t forward_keys;
  std::int64_t backward_keys;

  // Packs source[rows][cols]. `capacity` is the number of lines in a panel of dst, a multiple of kPad; the rest of the
  // last line and, if the product reads them (bf16), the lines up to a multiple of kPad are zeroed. The transposed
  // lhs of bf16 has round_up(cols, kPad) lines instead: see transposed_stride().
  void (*pack_lhs)(const Source&, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst);    // m, k
  void (*pack_lhs_t)(const Source&, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst);  // k, m
  void (*pack_rhs)(const Source&, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst);    // k, n
  void (*pack_rhs_t)(const Source&, std::int64_t rows, std::int64_t cols, std::int64_t capacity, void* dst);  // n, k

  // Strides count elements between panels. rhs is always [panels][k][W].
  void (*multiply)(const void* lhs, std::int64_t lhs_stride, const void* rhs, std::int64_t rhs_stride, float* result,
                   std::int64_t result_stride, std::int64_t m, int panels, std::int64_t k, bool accumulate);
  // The same with an lhs from pack_lhs_t.
  void (*multiply_t)(const void* lhs, std::int64_t lhs_stride, const void* rhs, std::int64_t rhs_stride, float* result,
                     std::int64_t result_stride, std::int64_t m, int panels, std::int64_t k, bool accumulate);

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

  // Tile registers are configured before a thread's work and released after it; null if there are none.
  void (*enter)();
  void (*leave)();
};

// Elements between panels of an lhs made by pack_lhs_t from source[rows][cols] with this capacity.
inline std::int64_t transposed_stride(const TileOps& ops, std::int64_t capacity, std::int64_t cols) {
  return ops.elem == sizeof(float) ? capacity * ops.line : round_up(cols, kPad) * ops.line;
}

enum class Isa { kNone, kSse4, kAvx2, kAvx512 };
enum class Bf16Isa { kNone, kAvx512Bf16, kAmx };

Isa detect_isa();
Bf16Isa detect_bf16_isa();
// Tests only: use nothing above these.
void limit_isa(Isa isa, Bf16Isa bf16_isa);
const char* name_of(Isa isa);
const char* name_of(Bf16Isa isa);

// Operands in fp32, whatever the tensors' type is. Null if the build or the CPU does not have it.
const TileOps* fp32_ops(Isa isa);
// Operands in bf16, for bf16 tensors.
const TileOps* bf16_ops(Bf16Isa isa);

// The table that serves a type on this CPU.
const TileOps* ops_for(DType dtype);

}  // namespace tessera::cpu
