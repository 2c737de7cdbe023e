// The online softmax of a block of queries over tiles of keys; forward and decode are loops around it.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "attention/cpu/common.h"

namespace tessera::cpu {

// K as lhs and V as transposed lhs, one tile of keys.
struct KeyTile {
  const char* k;  // lhs [Dqk / line][keys][line]
  const char* v;  // transposed lhs of [keys][Dv]

  static std::int64_t k_bytes(const TileOps& ops, const AttentionProblem& p) {
    return ops.forward_keys * round_up(p.dim_qk, kPad) * static_cast<std::int64_t>(ops.elem);
  }
  static std::int64_t v_bytes(const TileOps& ops, const AttentionProblem& p) {
    return ops.forward_keys * round_up(p.dim_v, kPad) * static_cast<std::int64_t>(ops.elem);
  }
};

// What survives from tile to tile.
struct RowState {
  float* accumulator;  // result form [kQueryBlock / W][round_up(Dv, kPad)][W], transposed O before division by sum
  float* row_max;      // [kQueryBlock]
  float* row_sum;      // [kQueryBlock]

  static RowState cut(Arena& arena, const AttentionProblem& p) {
    float* accumulator = arena.take<float>(kQueryBlock * round_up(p.dim_v, kPad));
    float* row_max = arena.take<float>(kQueryBlock);
    return {accumulator, row_max, arena.take<float>(kQueryBlock)};
  }

  void clear(const AttentionProblem& p) const {
    std::fill(accumulator, accumulator + kQueryBlock * round_up(p.dim_v, kPad), 0.0f);
    std::fill(row_max, row_max + kQueryBlock, kNoMax);
    std::fill(row_sum, row_sum + kQueryBlock, 0.0f);
  }
};

// A tile's scratch.
struct ScoreScratch {
  float* scores;  // result form [kQueryBlock / W][keys][W]
  void* probs;    // rhs form

  static ScoreScratch cut(Arena& arena, const TileOps& ops) {
    float* scores = arena.take<float>(kQueryBlock * ops.forward_keys);
    void* probs = ops.elem == sizeof(float)
                      ? scores
                      : static_cast<void*>(arena.take<std::uint16_t>(kQueryBlock * ops.forward_keys));
    return {scores, probs};
  }
};

// Probabilities are relative to 2^(max + shift): their sum over every key stays below 1, so that V may be as large as
// its type allows without overflowing the accumulator.
inline float headroom(std::int64_t keys) {
  float shift = 1;
  while ((std::int64_t{1} << static_cast<int>(shift - 1)) < keys) ++shift;
  return shift;
}

inline void attend(const TileOps& ops, const AttentionProblem& p, Columns& columns, const KeyTile& tile,
                   std::int64_t key, std::int64_t rows, float shift, const void* q, const ScoreScratch& scratch,
                   const RowState& state) {
  const std::int64_t w = ops.width, elem = static_cast<std::int64_t>(ops.elem);
  const std::int64_t dim_qk = round_up(p.dim_qk, kPad), dim_v = round_up(p.dim_v, kPad);
  const int panels = static_cast<int>(round_up(columns.count, w) / w);
  const ScoreMap map = columns.map(p, key, rows);
  for (int panel = 0; panel < panels; panel += ops.forward_panels) {
    const int now = std::min(panels - panel, ops.forward_panels);
    float* accumulator = state.accumulator + panel * dim_v * w;
    ops.multiply(tile.k, ops.forward_keys * ops.line, static_cast<const char*>(q) + panel * dim_qk * w * elem,
                 dim_qk * w, scratch.scores, ops.forward_keys * w, rows, now, p.dim_qk, false);
    SoftmaxTile softmax;
    softmax.map = from_panel(map, panel * w);
    softmax.panels = now;
    softmax.rows = static_cast<int>(rows);
    softmax.shift = shift;
    softmax.scores = scratch.scores;
    softmax.score_stride = ops.forward_keys;
    softmax.probs = scratch.probs;
    softmax.prob_stride = ops.forward_keys;
    softmax.row_max = state.row_max + panel * w;
    softmax.row_sum = state.row_sum + panel * w;
    softmax.accumulator = accumulator;
    softmax.acc_stride = dim_v;
    softmax.acc_rows = p.dim_v;
    ops.softmax(softmax);
    ops.multiply_t(tile.v, transposed_stride(ops, ops.forward_keys, p.dim_v), scratch.probs, ops.forward_keys * w,
                   accumulator, dim_v * w, p.dim_v, now, rows, true);
  }
}

// 1 / sum, 0 for a row that saw no key.
inline float inverse_of(float sum) { return sum > 0 ? 1.0f / sum : 0.0f; }

inline float log_sum_exp(float row_max, float shift, float sum) {
  if (!(sum > 0)) return sum == 0 ? -std::numeric_limits<float>::infinity() : sum;
  const float base = row_max + shift;
  return static_cast<float>(static_cast<double>(base) * kLn2 + std::log(static_cast<double>(sum)));
}

}  // namespace tessera::cpu
