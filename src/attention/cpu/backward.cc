// Attention backward, one fused pass of five products. A task owns a KV head of one sequence, or a stretch of its keys;
// for each query head of the group it runs over tiles of keys, and for each tile over the blocks of queries that see
// it:
//
//   S^T = K Q^T     P^T = exp(S^T - lse)     dP^T = V dO^T     dS^T = P^T o (dP^T - rowdot)
//   dV += P^T dO    dK += dS^T Q             dQ^T += K^T dS^T
//
// dK and dV of the task's keys and dQ of the head at hand are summed in fp32 scratch by one thread in a fixed order.
// If there are too few KV heads for the threads, a head's keys are split into stretches, each with its own dQ; a second
// job adds those up in order.
#include <cstring>

#include "attention/cpu/common.h"
#include "cpu/thread_pool.h"

namespace tessera::cpu {
namespace {

struct Dims {
  std::int64_t qk, v;          // padded
  std::int64_t keys;           // rows of a score tile
  std::int64_t elem;           // bytes
  std::int64_t q_blocks;       // of the longest sequence
  std::int64_t stretches;      // of a KV head's keys
  std::int64_t stretch_tiles;  // tiles in a stretch, at most

  Dims(const TileOps& ops, const AttentionProblem& p, int threads)
      : qk(round_up(p.dim_qk, kPad)),
        v(round_up(p.dim_v, kPad)),
        keys(ops.backward_keys),
        elem(static_cast<std::int64_t>(ops.elem)),
        q_blocks(round_up(p.seq_q, kQueryBlock) / kQueryBlock) {
    const std::int64_t tiles = std::max<std::int64_t>(1, round_up(p.seq_k, keys) / keys);
    const std::int64_t heads = std::max<std::int64_t>(1, p.batch * p.heads_kv);
    stretches = 1;
    if (heads < 4 * threads && heads % threads != 0) {
      stretches = std::min((4 * threads + heads - 1) / heads, std::max<std::int64_t>(1, tiles / 2));
    }
    stretch_tiles = (tiles + stretches - 1) / stretches;
    stretches = (tiles + stretch_tiles - 1) / stretch_tiles;
  }
};

struct ThreadScratch {
  // A query head of one sequence, block by block.
  char* q_t;   // rhs form of Q^T  [q_blocks][kQueryBlock / W][Dqk][W]
  char* q;     // rhs form of Q    [q_blocks][Dqk / W][kQueryBlock][W]
  char* do_t;  // likewise of dO
  char* d_o;
  float* log_sum;  // [q_blocks][kQueryBlock]
  float* row_dot;  // [q_blocks][kQueryBlock]
  float* dq;       // result form of dQ^T [q_blocks][kQueryBlock / W][Dqk][W]; if a head is one stretch
  // A tile of keys.
  char* k;    // lhs
  char* k_t;  // transposed lhs
  char* v;    // lhs
  // A score tile.
  float* scores;       // result form [kQueryBlock / W][keys][W]
  float* d_probs;      // likewise
  char* probs;         // lhs form
  char* d_scores;      // lhs form
  char* d_scores_rhs;  // rhs form
  // The task's keys.
  float* dk;  // result form [stretch_tiles][Dqk / W][keys][W]
  float* dv;

  static ThreadScratch cut(Arena& arena, const Dims& d) {
    ThreadScratch s;
    const std::int64_t rows = d.q_blocks * kQueryBlock;
    s.q_t = arena.take<char>(rows * d.qk * d.elem);
    s.q = arena.take<char>(rows * d.qk * d.elem);
    s.do_t = arena.take<char>(rows * d.v * d.elem);
    s.d_o = arena.take<char>(rows * d.v * d.elem);
    s.log_sum = arena.take<float>(rows);
    s.row_dot = arena.take<float>(rows);
    s.dq = arena.take<float>(d.stretches == 1 ? rows * d.qk : 0);
    s.k = arena.take<char>(d.keys * d.qk * d.elem);
    s.k_t = arena.take<char>(d.keys * d.qk * d.elem);
    s.v = arena.take<char>(d.keys * d.v * d.elem);
    s.scores = arena.take<float>(kQueryBlock * d.keys);
    s.d_probs = arena.take<float>(kQueryBlock * d.keys);
    if (d.elem == sizeof(float)) {
      s.probs = reinterpret_cast<char*>(s.scores);
      s.d_scores = s.d_scores_rhs = reinterpret_cast<char*>(s.d_probs);
    } else {
      s.probs = arena.take<char>(kQueryBlock * d.keys * d.elem);
      s.d_scores = arena.take<char>(kQueryBlock * d.keys * d.elem);
      s.d_scores_rhs = arena.take<char>(kQueryBlock * d.keys * d.elem);
    }
    s.dk = arena.take<float>(d.stretch_tiles * d.keys * d.qk);
    s.dv = arena.take<float>(d.stretch_tiles * d.keys * d.v);
    return s;
  }
};

struct Workspace {
  Dims dims;
  float* dq;  // [stretches][Hq][blocks of the whole batch] blocks of dQ^T, if a head is several stretches
  std::int64_t blocks;
  char* threads;
  std::size_t thread_bytes;

  Workspace(Arena& arena, const TileOps& ops, const AttentionProblem& p, int thread_count)
      : dims(ops, p, thread_count), blocks(blocks_of(p.varlen, p.batch, p.seq_q, p.total_q, kQueryBlock)) {
    const std::int64_t copies = dims.stretches == 1 ? 0 : dims.stretches;
    dq = arena.take<float>(copies * p.heads_q * blocks * kQueryBlock * dims.qk);
    Arena one(nullptr);
    ThreadScratch::cut(one, dims);
    thread_bytes = one.used();
    threads = arena.take<char>(static_cast<std::int64_t>(thread_bytes) * thread_count);
  }

  float* dq_block(const AttentionProblem& p, const Sequence& seq, std::int64_t b, std::int64_t head,
                  std::int64_t stretch) const {
    const std::int64_t block = first_block(p.varlen, b, seq.q_begin, p.seq_q, kQueryBlock);
    return dq + ((stretch * p.heads_q + head) * blocks + block) * kQueryBlock * dims.qk;
  }
};

class Task {
 public:
  Task(const TileOps& ops, const AttentionArgs& args, const Workspace& space, std::int64_t b, std::int64_t head_kv,
       std::int64_t stretch, void* memory)
      : ops_(ops),
        args_(args),
        p_(args.problem),
        space_(space),
        dims_(space.dims),
        seq_(sequence_of(args, b)),
        mask_(mask_of(args.problem)),
        b_(b),
        head_kv_(head_kv),
        stretch_(stretch) {
    Arena arena(memory);
    s_ = ThreadScratch::cut(arena, dims_);
    first_key_ = stretch * dims_.stretch_tiles * dims_.keys;
    last_key_ = std::min(seq_.len_k, first_key_ + dims_.stretch_tiles * dims_.keys);
  }

  void run() {
    const std::int64_t tiles = std::max<std::int64_t>(0, round_up(last_key_ - first_key_, dims_.keys) / dims_.keys);
    std::fill(s_.dk, s_.dk + tiles * dims_.keys * dims_.qk, 0.0f);
    std::fill(s_.dv, s_.dv + tiles * dims_.keys * dims_.v, 0.0f);
    const std::int64_t group = p_.heads_q / p_.heads_kv;
    for (std::int64_t head = head_kv_ * group; head < (head_kv_ + 1) * group; ++head) query_head(head);
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t key = first_key_ + tile * dims_.keys;
      const std::int64_t rows = std::min(dims_.keys, last_key_ - key);
      ops_.store(s_.dk + tile * dims_.keys * dims_.qk, dims_.keys, rows, p_.dim_qk, p_.scale,
                 target_of(args_.dk, p_.dtype, seq_.batch, seq_.k_begin + key, head_kv_));
      ops_.store(s_.dv + tile * dims_.keys * dims_.v, dims_.keys, rows, p_.dim_v, 1.0f,
                 target_of(args_.dv, p_.dtype, seq_.batch, seq_.k_begin + key, head_kv_));
    }
  }

 private:
  void query_head(std::int64_t head) {
    float* dq = dims_.stretches == 1 ? s_.dq : space_.dq_block(p_, seq_, b_, head, stretch_);
    const std::int64_t blocks = round_up(seq_.len_q, kQueryBlock) / kQueryBlock;
    for (std::int64_t block = 0; block < blocks; ++block) pack_queries(head, block);
    std::fill(dq, dq + blocks * kQueryBlock * dims_.qk, 0.0f);
    for (std::int64_t key = first_key_; key < last_key_; key += dims_.keys) {
      const std::int64_t rows = std::min(dims_.keys, last_key_ - key);
      const Range queries = {visible_queries(mask_, key, seq_.len_q, seq_.len_k).begin,
                             visible_queries(mask_, key + rows - 1, seq_.len_q, seq_.len_k).end};
      if (queries.empty()) continue;
      pack_keys(key, rows);
      for (std::int64_t block = queries.begin / kQueryBlock; block * kQueryBlock < queries.end; ++block) {
        tile(head, block, key, rows, dq + block * kQueryBlock * dims_.qk);
      }
    }
    if (dims_.stretches > 1) return;
    alignas(64) float scales[kQueryBlock];
    std::fill(scales, scales + kQueryBlock, p_.scale);
    for (std::int64_t block = 0; block < blocks; ++block) {
      const std::int64_t row = block * kQueryBlock;
      ops_.store_t(dq + row * dims_.qk, dims_.qk, std::min(kQueryBlock, seq_.len_q - row), p_.dim_qk, scales,
                   target_of(args_.dq, p_.dtype, seq_.batch, seq_.q_begin + row, head));
    }
  }

  void pack_queries(std::int64_t head, std::int64_t block) {
    const std::int64_t row = block * kQueryBlock;
    const std::int64_t rows = std::min(kQueryBlock, seq_.len_q - row);
    const Source q = source_of(args_.q, p_.dtype, seq_.batch, seq_.q_begin + row, head);
    const Source o = source_of(args_.o, p_.dtype, seq_.batch, seq_.q_begin + row, head);
    const Source d_o = source_of(args_.d_o, p_.dtype, seq_.batch, seq_.q_begin + row, head);
    const std::int64_t q_at = row * dims_.qk * dims_.elem, do_at = row * dims_.v * dims_.elem;
    ops_.pack_rhs_t(q, rows, p_.dim_qk, dims_.qk, s_.q_t + q_at);
    ops_.pack_rhs(q, rows, p_.dim_qk, kQueryBlock, s_.q + q_at);
    ops_.pack_rhs_t(d_o, rows, p_.dim_v, dims_.v, s_.do_t + do_at);
    ops_.pack_rhs(d_o, rows, p_.dim_v, kQueryBlock, s_.d_o + do_at);
    float* dots = s_.row_dot + row;
    float* sums = s_.log_sum + row;
    row_dots(o, rows, s_.do_t + do_at, dots);
    const float* lse = row_of(args_.lse, seq_.batch, head, seq_.q_begin + row);
    const float* d_lse = p_.with_dlse ? row_of(args_.d_lse, seq_.batch, head, seq_.q_begin + row) : nullptr;
    for (std::int64_t i = 0; i < kQueryBlock; ++i) {
      const bool seen = i < rows && lse[i] >= -kMaxLogit;
      // Rows that saw no key, and columns beyond the last row: probability and gradient 0.
      sums[i] = seen ? std::min(lse[i] * kLog2E, kMaxLogit) : kMaxLogit;
      if (!seen) {
        dots[i] = 0;
      } else if (d_lse != nullptr) {
        dots[i] -= d_lse[i];
      }
    }
  }

  // dots[i] = <o_i, do_i>: the diagonal of a product, so that it is rounded just as the dP it is subtracted from. If a
  // row sees a single key, the two are then equal, as they should be.
  void row_dots(const Source& o, std::int64_t rows, const char* do_t, float* dots) {
    const std::int64_t w = ops_.width;
    ops_.pack_lhs(o, rows, p_.dim_v, dims_.keys, s_.v);
    for (std::int64_t row = 0; row < rows; row += w) {
      ops_.multiply(s_.v + row * ops_.line * dims_.elem, dims_.keys * ops_.line, do_t + row * dims_.v * dims_.elem,
                    dims_.v * w, s_.scores, dims_.keys * w, std::min(w, rows - row), 1, p_.dim_v, false);
      for (std::int64_t i = 0; i < std::min(w, rows - row); ++i) dots[row + i] = s_.scores[i * w + i];
    }
  }

  void pack_keys(std::int64_t key, std::int64_t rows) {
    const Source k = source_of(args_.k, p_.dtype, seq_.batch, seq_.k_begin + key, head_kv_);
    const Source v = source_of(args_.v, p_.dtype, seq_.batch, seq_.k_begin + key, head_kv_);
    ops_.pack_lhs(k, rows, p_.dim_qk, dims_.keys, s_.k);
    ops_.pack_lhs_t(k, rows, p_.dim_qk, dims_.keys, s_.k_t);
    ops_.pack_lhs(v, rows, p_.dim_v, dims_.keys, s_.v);
  }

  void tile(std::int64_t head, std::int64_t block, std::int64_t key, std::int64_t keys, float* dq) {
    const std::int64_t row = block * kQueryBlock;
    const std::int64_t rows = std::min(kQueryBlock, seq_.len_q - row);
    Columns columns;
    columns.clear(p_.alibi);
    const Index offset = position_offset(mask_, seq_.len_q, seq_.len_k);
    for (std::int64_t i = row; i < row + rows; ++i) {
      columns.add(visible_keys(mask_, i, seq_.len_q, seq_.len_k), i + offset, slope_of(args_, b_, head));
    }
    // Keys beyond what the block sees need no work.
    keys = std::min(keys, columns.last_key - key);
    if (keys <= 0) return;

    const std::int64_t w = ops_.width;
    const int panels = static_cast<int>(round_up(rows, w) / w);
    const int panels_qk = static_cast<int>(round_up(p_.dim_qk, w) / w);
    const int panels_v = static_cast<int>(round_up(p_.dim_v, w) / w);
    const std::int64_t q_at = row * dims_.qk * dims_.elem, do_at = row * dims_.v * dims_.elem;
    const std::int64_t lhs_stride = dims_.keys * ops_.line, tile_stride = dims_.keys * w;

    const ScoreMap map = columns.map(p_, key, keys);
    for (int panel = 0; panel < panels; panel += ops_.backward_panels) {
      const int now = std::min(panels - panel, ops_.backward_panels);
      const std::int64_t column = panel * w;
      ops_.multiply(s_.k, lhs_stride, s_.q_t + q_at + column * dims_.qk * dims_.elem, dims_.qk * w, s_.scores,
                    tile_stride, keys, now, p_.dim_qk, false);
      ops_.multiply(s_.v, lhs_stride, s_.do_t + do_at + column * dims_.v * dims_.elem, dims_.v * w, s_.d_probs,
                    tile_stride, keys, now, p_.dim_v, false);
      GradTile grad;
      grad.map = from_panel(map, column);
      grad.panels = now;
      grad.rows = static_cast<int>(keys);
      grad.scores = s_.scores;
      grad.d_probs = s_.d_probs;
      grad.stride = dims_.keys;
      grad.log_sum = s_.log_sum + row + column;
      grad.row_dot = s_.row_dot + row + column;
      grad.probs = s_.probs + column * dims_.keys * dims_.elem;
      grad.d_scores = s_.d_scores + column * dims_.keys * dims_.elem;
      grad.d_scores_rhs = s_.d_scores_rhs + column * dims_.keys * dims_.elem;
      ops_.softmax_grad(grad);
    }
    const std::int64_t at = key - first_key_;
    ops_.multiply(s_.probs, lhs_stride, s_.d_o + do_at, kQueryBlock * w, s_.dv + at * dims_.v, tile_stride, keys,
                  panels_v, rows, true);
    ops_.multiply(s_.d_scores, lhs_stride, s_.q + q_at, kQueryBlock * w, s_.dk + at * dims_.qk, tile_stride, keys,
                  panels_qk, rows, true);
    ops_.multiply_t(s_.k_t, transposed_stride(ops_, dims_.keys, p_.dim_qk), s_.d_scores_rhs, tile_stride, dq,
                    dims_.qk * w, p_.dim_qk, panels, keys, true);
  }

  const TileOps& ops_;
  const AttentionArgs& args_;
  const AttentionProblem& p_;
  const Workspace& space_;
  const Dims& dims_;
  const Sequence seq_;
  const Mask mask_;
  const std::int64_t b_, head_kv_, stretch_;
  ThreadScratch s_;
  std::int64_t first_key_, last_key_;
};

// Adds up the stretches' dQ of one block of queries, in order.
void reduce_dq(const TileOps& ops, const AttentionArgs& args, const Workspace& space, std::int64_t b, std::int64_t head,
               std::int64_t block) {
  const AttentionProblem& p = args.problem;
  const Sequence seq = sequence_of(args, b);
  const std::int64_t row = block * kQueryBlock;
  if (row >= seq.len_q) return;
  const std::int64_t size = kQueryBlock * space.dims.qk;
  float* sum = space.dq_block(p, seq, b, head, 0) + block * size;
  for (std::int64_t stretch = 1; stretch < space.dims.stretches; ++stretch) {
    const float* part = space.dq_block(p, seq, b, head, stretch) + block * size;
    for (std::int64_t i = 0; i < size; ++i) sum[i] += part[i];
  }
  alignas(64) float scales[kQueryBlock];
  std::fill(scales, scales + kQueryBlock, p.scale);
  ops.store_t(sum, space.dims.qk, std::min(kQueryBlock, seq.len_q - row), p.dim_qk, scales,
              target_of(args.dq, p.dtype, seq.batch, seq.q_begin + row, head));
}

}  // namespace

std::size_t backward_workspace(const TileOps& ops, const AttentionProblem& problem, int threads) {
  Arena arena(nullptr);
  Workspace(arena, ops, problem, threads);
  return arena.used();
}

void backward(const TileOps& ops, const AttentionArgs& args, int threads, void* memory) {
  const AttentionProblem& p = args.problem;
  Arena arena(memory);
  const Workspace space(arena, ops, p, threads);
  const std::int64_t stretches = space.dims.stretches;
  parallel_for(p.batch * p.heads_kv * stretches, threads, [&](std::int64_t task, int slot) {
    const TileScope tile_registers(ops);
    Task(ops, args, space, task / stretches / p.heads_kv, task / stretches % p.heads_kv, task % stretches,
         space.threads + static_cast<std::size_t>(slot) * space.thread_bytes)
        .run();
  });
  if (stretches == 1) return;
  const std::int64_t blocks = space.dims.q_blocks;
  parallel_for(p.batch * p.heads_q * blocks, threads, [&](std::int64_t task, int) {
    reduce_dq(ops, args, space, task / blocks / p.heads_q, task / blocks % p.heads_q, task % blocks);
  });
}

}  // namespace tessera::cpu
