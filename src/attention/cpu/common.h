// What forward, backward and decode share: the position of a sequence in its tensors, and the workspace's layout.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/cpu/tile_ops.h"
#include "attention/problem.h"
#include "tile/mask.h"

namespace tessera::cpu {

constexpr float kLog2E = 1.44269504088896340736f;
constexpr double kLn2 = 0.69314718055994530942;

constexpr std::int64_t kQueryBlock = 64;  // columns of a score tile: four vectors of AVX-512

// Hands out parts of the workspace. Without a base it only counts, so that one function both sizes and divides it.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(std::int64_t count) {
    char* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += static_cast<std::size_t>(round_up(count * static_cast<std::int64_t>(sizeof(T)), 64));
    return reinterpret_cast<T*>(at);
  }
  std::size_t used() const { return used_; }

 private:
  char* base_;
  std::size_t used_ = 0;
};

struct Sequence {
  std::int64_t batch;    // index along the batch stride, 0 if varlen
  std::int64_t q_begin;  // first row
  std::int64_t k_begin;
  std::int64_t len_q;
  std::int64_t len_k;
};

inline Sequence sequence_of(const AttentionArgs& args, std::int64_t b) {
  if (!args.problem.varlen) return {b, 0, 0, args.problem.seq_q, args.problem.seq_k};
  const std::int64_t q = args.cu_seqlens_q[b], k = args.cu_seqlens_k[b];
  return {0, q, k, args.cu_seqlens_q[b + 1] - q, args.cu_seqlens_k[b + 1] - k};
}

inline char* element(const TensorView& view, DType dtype, std::int64_t batch, std::int64_t row, std::int64_t head) {
  const std::int64_t offset = batch * view.batch_stride + row * view.seq_stride + head * view.head_stride;
  return static_cast<char*>(view.data) + offset * static_cast<std::int64_t>(size_of(dtype));
}
inline Source source_of(const TensorView& view, DType dtype, std::int64_t batch, std::int64_t row, std::int64_t head) {
  return {element(view, dtype, batch, row, head), view.seq_stride, dtype};
}
inline Target target_of(const TensorView& view, DType dtype, std::int64_t batch, std::int64_t row, std::int64_t head) {
  return {element(view, dtype, batch, row, head), view.seq_stride, dtype};
}
inline float* row_of(const RowView& view, std::int64_t batch, std::int64_t head, std::int64_t row) {
  return view.data + batch * view.batch_stride + head * view.head_stride + row;
}

inline Mask mask_of(const AttentionProblem& problem) {
  return {problem.causal, problem.op == AttentionOp::kDecode || problem.alignment == Alignment::kBottomRight,
          problem.window_left, problem.window_right, problem.chunk};
}

// Tiles of a packed sequence are numbered from start_of(b): no two sequences overlap, and empty ones cost one at most.
inline std::int64_t blocks_of(bool varlen, std::int64_t batch, std::int64_t longest, std::int64_t total,
                              std::int64_t block) {
  return varlen ? total / block + batch : batch * (round_up(longest, block) / block);
}
inline std::int64_t first_block(bool varlen, std::int64_t b, std::int64_t begin, std::int64_t longest,
                                std::int64_t block) {
  return varlen ? begin / block + b : b * (round_up(longest, block) / block);
}

// The columns of a score tile: the keys that each query sees, and its position. Filled once for a block of queries.
struct Columns {
  std::int64_t count = 0;
  std::int64_t first_key = 0, last_key = 0;         // union of the visible ranges
  std::int64_t latest_begin = 0, earliest_end = 0;  // intersection: tiles within it need no mask
  std::int64_t begin[kQueryBlock], end[kQueryBlock];
  std::int64_t position[kQueryBlock];
  alignas(64) float slope[kQueryBlock];  // in units of log2
  bool sloped = false;
  // Relative to one tile; see ScoreMap.
  alignas(64) float origin[kQueryBlock];
  alignas(64) std::int32_t tile_begin[kQueryBlock], tile_end[kQueryBlock];

  void clear(bool with_slopes) {
    count = 0;
    first_key = latest_begin = 0;
    last_key = earliest_end = 0;
    sloped = with_slopes;
    std::fill(begin, begin + kQueryBlock, 0);
    std::fill(end, end + kQueryBlock, 0);
    std::fill(position, position + kQueryBlock, 0);
    std::fill(slope, slope + kQueryBlock, 0.0f);
  }

  void add(Range keys, std::int64_t at, float slope_value) {
    if (count == 0) {
      latest_begin = keys.begin;
      earliest_end = keys.end;
    } else {
      latest_begin = std::max<std::int64_t>(latest_begin, keys.begin);
      earliest_end = std::min<std::int64_t>(earliest_end, keys.end);
    }
    if (!keys.empty()) {
      first_key = last_key == 0 ? keys.begin : std::min<std::int64_t>(first_key, keys.begin);
      last_key = std::max<std::int64_t>(last_key, keys.end);
    }
    begin[count] = keys.begin;
    end[count] = keys.end;
    position[count] = at;
    slope[count] = slope_value * kLog2E;
    ++count;
  }

  // The map for keys [key, key + rows), without a mask if every column sees all of them.
  ScoreMap map(const AttentionProblem& problem, std::int64_t key, std::int64_t rows, bool always_masked = false) {
    ScoreMap map = {problem.scale * kLog2E, problem.softcap * kLog2E, nullptr, nullptr, nullptr, nullptr};
    if (sloped) {
      for (std::int64_t i = 0; i < kQueryBlock; ++i) origin[i] = static_cast<float>(position[i] - key);
      map.slopes = slope;
      map.origins = origin;
    }
    if (always_masked || latest_begin > key || earliest_end < key + rows) {
      for (std::int64_t i = 0; i < kQueryBlock; ++i) {
        tile_begin[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>(begin[i] - key, 0, rows));
        tile_end[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>(end[i] - key, 0, rows));
      }
      map.begins = tile_begin;
      map.ends = tile_end;
    }
    return map;
  }
};

inline float slope_of(const AttentionArgs& args, std::int64_t b, std::int64_t head) {
  return args.problem.alibi ? args.alibi_slopes[b * args.alibi_batch_stride + head] : 0.0f;
}

// Tile registers are held only while a thread works on a task.
class TileScope {
 public:
  explicit TileScope(const TileOps& ops) : ops_(ops) {
    if (ops_.enter != nullptr) ops_.enter();
  }
  ~TileScope() {
    if (ops_.leave != nullptr) ops_.leave();
  }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;

 private:
  const TileOps& ops_;
};

// The ops behind run().
std::size_t forward_workspace(const TileOps& ops, const AttentionProblem& problem, int threads);
// out: the type of o.
void forward(const TileOps& ops, const AttentionArgs& args, DType out, int threads, void* workspace);
// Of e4m3 tensors: dequantised to fp32, then as above.
std::size_t fp8_workspace(const AttentionProblem& problem, int threads);
void forward_fp8(const AttentionArgs& args, int threads, void* workspace);
std::size_t backward_workspace(const TileOps& ops, const AttentionProblem& problem, int threads);
void backward(const TileOps& ops, const AttentionArgs& args, int threads, void* workspace);
std::size_t decode_workspace(const TileOps& ops, const AttentionProblem& problem, int threads);
void decode(const TileOps& ops, const AttentionArgs& args, int threads, void* workspace);

}  // namespace tessera::cpu
