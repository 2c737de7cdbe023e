// The online softmax of a block of queries over tiles of keys; forward and decode are loops around it.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/common.h"

namespace tessera::cpu {

constexpr std::int64_t kKeyTile = 128;  // rows of a forward score tile: 64 x 128 floats, with Q, stay in L1

// K as lhs and V as transposed lhs, one tile of keys.
struct KeyTile {
  const char* k;  // lhs [Dqk / line][kKeyTile][line]
  const char* v;  // transposed lhs of [keys][Dv]

  static std::int64_t k_bytes(const TileOps& ops, const AttentionProblem& p) {
    return kKeyTile * round_up(p.dim_qk, kPad) * static_cast<std::int64_t>(ops.elem);
  }
  static std::int64_t v_bytes(const TileOps& ops, const AttentionProblem& p) {
    return kKeyTile * round_up(p.dim_v, kPad) * static_cast<std::int64_t>(ops.elem);
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
  float* scores;  // result form [kQueryBlock / W][kKeyTile][W]
  void* probs;    // rhs form

  static ScoreScratch cut(Arena& arena, const TileOps& ops) {
    float* scores = arena.take<float>(kQueryBlock * kKeyTile);
    void* probs =
        ops.elem == sizeof(float) ? scores : static_cast<void*>(arena.take<std::uint16_t>(kQueryBlock * kKeyTile));
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
  const std::int64_t w = ops.width;
  const std::int64_t dim_qk = round_up(p.dim_qk, kPad), dim_v = round_up(p.dim_v, kPad);
  const int panels = static_cast<int>(round_up(columns.count, w) / w);
  ops.multiply(tile.k, kKeyTile * ops.line, q, dim_qk * w, scratch.scores, kKeyTile * w, rows, panels, p.dim_qk, false);
  SoftmaxTile softmax;
  softmax.map = columns.map(p, key, rows);
  softmax.panels = panels;
  softmax.rows = static_cast<int>(rows);
  softmax.shift = shift;
  softmax.scores = scratch.scores;
  softmax.score_stride = kKeyTile;
  softmax.probs = scratch.probs;
  softmax.prob_stride = kKeyTile;
  softmax.row_max = state.row_max;
  softmax.row_sum = state.row_sum;
  softmax.accumulator = state.accumulator;
  softmax.acc_stride = dim_v;
  softmax.acc_rows = p.dim_v;
  ops.softmax(softmax);
  ops.multiply_t(tile.v, transposed_stride(ops, kKeyTile, p.dim_v), scratch.probs, kKeyTile * w, state.accumulator,
                 dim_v * w, p.dim_v, panels, rows, true);
}

// 1 / sum, 0 for a row that saw no key.
inline float inverse_of(float sum) { return sum > 0 ? 1.0f / sum : 0.0f; }

inline float log_sum_exp(float row_max, float shift, float sum) {
  if (!(sum > 0)) return sum == 0 ? -std::numeric_limits<float>::infinity() : sum;
  const float base = row_max + shift;
  return static_cast<float>(static_cast<double>(base) * kLn2 + std::log(static_cast<double>(sum)));
}

}  // namespace tessera::cpu
