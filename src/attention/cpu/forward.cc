// Attention forward. K and V are packed once per KV head, in tiles of keys, and every block of queries of every head in
// the group then runs over the tiles it sees:
//
//   scores[keys][queries] = K tile * Q^T     probabilities = online softmax     O^T += V^T * probabilities
//
// One job, head after head: first its tiles are packed, then its blocks of queries, which find them in L2. A block
// waits only for the tiles of its own head. Its result does not depend on the thread that computes it, so it is the
// same for any number of threads.
#include <atomic>
#include <new>
#include <thread>

#include "attention/cpu/common.h"
#include "attention/cpu/row_block.h"
#include "cpu/thread_pool.h"

namespace tessera::cpu {
namespace {

struct ThreadScratch {
  void* q;  // rhs form of Q^T: [kQueryBlock / W][round_up(Dqk, kPad)][W]
  ScoreScratch tile;
  RowState state;

  static ThreadScratch cut(Arena& arena, const TileOps& ops, const AttentionProblem& p) {
    ThreadScratch scratch;
    scratch.q = arena.take<char>(kQueryBlock * round_up(p.dim_qk, kPad) * static_cast<std::int64_t>(ops.elem));
    scratch.tile = ScoreScratch::cut(arena, ops);
    scratch.state = RowState::cut(arena, p);
    return scratch;
  }
};

struct Workspace {
  std::int64_t tiles;  // a KV head's, over the whole batch
  char* k;             // [Hkv][tiles] packed tiles
  char* v;
  std::atomic<std::int64_t>* packed;  // [B * Hkv], tiles that are ready
  char* threads;
  std::size_t thread_bytes;

  Workspace(Arena& arena, const TileOps& ops, const AttentionProblem& p, int thread_count)
      : tiles(blocks_of(p.varlen, p.batch, p.seq_k, p.total_k, ops.forward_keys)) {
    k = arena.take<char>(p.heads_kv * tiles * KeyTile::k_bytes(ops, p));
    v = arena.take<char>(p.heads_kv * tiles * KeyTile::v_bytes(ops, p));
    packed = arena.take<std::atomic<std::int64_t>>(p.batch * p.heads_kv);
    Arena one(nullptr);
    ThreadScratch::cut(one, ops, p);
    thread_bytes = one.used();
    threads = arena.take<char>(static_cast<std::int64_t>(thread_bytes) * thread_count);
  }
};

void pack_tile(const TileOps& ops, const AttentionArgs& args, const Workspace& space, std::int64_t b,
               std::int64_t head_kv, std::int64_t key) {
  const AttentionProblem& p = args.problem;
  const Sequence seq = sequence_of(args, b);
  const std::int64_t rows = std::min(ops.forward_keys, seq.len_k - key);
  if (rows <= 0) return;
  const std::int64_t tile =
      head_kv * space.tiles + first_block(p.varlen, b, seq.k_begin, p.seq_k, ops.forward_keys) + key / ops.forward_keys;
  ops.pack_lhs(source_of(args.k, p.dtype, seq.batch, seq.k_begin + key, head_kv), rows, p.dim_qk, ops.forward_keys,
               space.k + tile * KeyTile::k_bytes(ops, p));
  ops.pack_lhs_t(source_of(args.v, p.dtype, seq.batch, seq.k_begin + key, head_kv), rows, p.dim_v, ops.forward_keys,
                 space.v + tile * KeyTile::v_bytes(ops, p));
}

void forward_block(const TileOps& ops, const AttentionArgs& args, const Workspace& space, std::int64_t b,
                   std::int64_t head, std::int64_t row, DType out, void* memory) {
  const AttentionProblem& p = args.problem;
  const Sequence seq = sequence_of(args, b);
  const std::int64_t rows = std::min(kQueryBlock, seq.len_q - row);
  if (rows <= 0) return;
  Arena arena(memory);
  ThreadScratch scratch = ThreadScratch::cut(arena, ops, p);
  Columns columns;
  const Mask mask = mask_of(p);
  const Index offset = position_offset(mask, seq.len_q, seq.len_k);
  columns.clear(p.alibi);
  for (std::int64_t i = row; i < row + rows; ++i) {
    columns.add(visible_keys(mask, i, seq.len_q, seq.len_k), i + offset, slope_of(args, b, head));
  }

  const TileScope tile_registers(ops);
  const std::int64_t dim_qk = round_up(p.dim_qk, kPad);
  ops.pack_rhs_t(source_of(args.q, p.dtype, seq.batch, seq.q_begin + row, head), rows, p.dim_qk, dim_qk, scratch.q);
  scratch.state.clear(p);
  const float shift = headroom(seq.len_k);
  const std::int64_t head_kv = head / (p.heads_q / p.heads_kv);
  const std::int64_t tile0 = head_kv * space.tiles + first_block(p.varlen, b, seq.k_begin, p.seq_k, ops.forward_keys);
  for (std::int64_t key = columns.first_key / ops.forward_keys * ops.forward_keys; key < columns.last_key;
       key += ops.forward_keys) {
    const std::int64_t tile = tile0 + key / ops.forward_keys;
    const KeyTile packed = {space.k + tile * KeyTile::k_bytes(ops, p), space.v + tile * KeyTile::v_bytes(ops, p)};
    attend(ops, p, columns, packed, key, std::min(ops.forward_keys, columns.last_key - key), shift, scratch.q,
           scratch.tile, scratch.state);
  }

  alignas(64) float scales[kQueryBlock];
  for (std::int64_t i = 0; i < rows; ++i) scales[i] = inverse_of(scratch.state.row_sum[i]);
  ops.store_t(scratch.state.accumulator, round_up(p.dim_v, kPad), rows, p.dim_v, scales,
              target_of(args.o, out, seq.batch, seq.q_begin + row, head));
  if (args.lse.data != nullptr) {
    float* lse = row_of(args.lse, seq.batch, head, seq.q_begin + row);
    for (std::int64_t i = 0; i < rows; ++i) {
      lse[i] = log_sum_exp(scratch.state.row_max[i], shift, scratch.state.row_sum[i]);
    }
  }
}

}  // namespace

std::size_t forward_workspace(const TileOps& ops, const AttentionProblem& problem, int threads) {
  Arena arena(nullptr);
  Workspace(arena, ops, problem, threads);
  return arena.used();
}

void forward(const TileOps& ops, const AttentionArgs& args, DType out, int threads, void* memory) {
  const AttentionProblem& p = args.problem;
  Arena arena(memory);
  const Workspace space(arena, ops, p, threads);
  const std::int64_t heads = p.batch * p.heads_kv, group = p.heads_q / p.heads_kv;
  const std::int64_t tiles = round_up(p.seq_k, ops.forward_keys) / ops.forward_keys;
  const std::int64_t blocks = round_up(p.seq_q, kQueryBlock) / kQueryBlock;
  const std::int64_t per_head = tiles + group * blocks;
  for (std::int64_t i = 0; i < heads; ++i) new (space.packed + i) std::atomic<std::int64_t>(0);
  parallel_for(heads * per_head, threads, [&](std::int64_t task, int slot) {
    const std::int64_t index = task / per_head, step = task % per_head;
    const std::int64_t b = index / p.heads_kv, head_kv = index % p.heads_kv;
    std::atomic<std::int64_t>& packed = space.packed[index];
    if (step < tiles) {
      pack_tile(ops, args, space, b, head_kv, step * ops.forward_keys);
      packed.fetch_add(1, std::memory_order_release);
      return;
    }
    // Tasks are handed out in order, so the tiles that this waits for are being packed by a running thread.
    while (packed.load(std::memory_order_acquire) < tiles) std::this_thread::yield();
    // Causal: the last block sees the most keys. Starting with long tasks balances the threads at the end.
    const std::int64_t block = blocks - 1 - (step - tiles) % blocks;
    forward_block(ops, args, space, b, head_kv * group + (step - tiles) / blocks, block * kQueryBlock, out,
                  space.threads + static_cast<std::size_t>(slot) * space.thread_bytes);
  });
}

}  // namespace tessera::cpu
