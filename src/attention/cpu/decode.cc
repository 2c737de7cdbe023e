// Attention of a few queries against a KV cache. The queries of a group, all heads and positions, are the columns of
// one score tile, so K and V are read once for the whole group. Keys are split into stretches of fixed length, one task
// each: a task packs a tile of keys at a time from the cache or its pages, runs the online softmax over its stretch and
// leaves accumulator, max and sum in the workspace; a second job weighs the stretches by their log-sum-exp and adds
// them in order. The split depends on the problem alone, and on nothing of the batch, so a sequence's result is the same
// for any number of threads and whatever else is in the batch. New keys are written to the cache, and queries rotated
// into the workspace, by a job of its own before that.
#include <cstring>

#include "attention/cpu/common.h"
#include "attention/cpu/e4m3.h"
#include "attention/cpu/row_block.h"
#include "cpu/thread_pool.h"

namespace tessera::cpu {
namespace {

std::int64_t size_in(const AttentionProblem& p) { return static_cast<std::int64_t>(size_of(p.dtype)); }

// Of rows that are copied. What a scale of its own makes of e4m3 takes fp32.
DType type_of_copies(const AttentionProblem& p) { return has_key_scales(p) ? DType::kFloat32 : p.dtype; }

// Rows of the cache that are copied before they are used: out of pages, or from e4m3 to another type.
std::int64_t copied_rows(const TileOps& ops, const AttentionProblem& p) {
  const std::int64_t streamed = p.fp8_cache ? kStreamKeys + kStreamAhead : 0;
  return p.paged || p.fp8_cache ? std::max<std::int64_t>(ops.forward_keys, streamed) : 0;
}

struct Dims {
  std::int64_t group;      // query heads of a KV head
  std::int64_t rows;       // queries of a group
  std::int64_t blocks;     // of kQueryBlock rows
  std::int64_t stretch;    // keys in a stretch
  std::int64_t stretches;  // of a whole cache

  Dims(const TileOps& ops, const AttentionProblem& p)
      : group(p.heads_q / p.heads_kv), rows(group * p.seq_q), blocks(round_up(rows, kQueryBlock) / kQueryBlock) {
    // Long enough that the partial results stay small compared with the keys they come from.
    stretch = round_up(std::max<std::int64_t>(512, 8 * rows), ops.forward_keys);
    stretches = std::max<std::int64_t>(1, round_up(p.seq_k, stretch) / stretch);
  }
};

struct ThreadScratch {
  char* q;       // rhs form of Q^T [blocks][kQueryBlock / W][round_up(Dqk, kPad)][W]
  char* rows;    // [kQueryBlock][max(Dqk, Dv)] rows of Q or O of one block, gathered
  char* k_rows;  // [keys][Dqk] rows of one tile, if they are copied
  char* v_rows;  // [keys][Dv]
  char* k;       // packed tile
  char* v;
  ScoreScratch tile;
  float* wide_q;  // [kStreamRows][round_up(Dqk, kPad)]
  float* sums;    // [kStreamRows][round_up(Dv, kPad)]
  float* turned;  // a row's rotated columns, its cosines and its sines
  float* wide;    // a new row of the cache, if fp8_cache

  static ThreadScratch cut(Arena& arena, const TileOps& ops, const AttentionProblem& p, const Dims& d) {
    ThreadScratch s;
    const std::int64_t elem = static_cast<std::int64_t>(ops.elem);
    const std::int64_t size = size_in(p), copied = static_cast<std::int64_t>(size_of(type_of_copies(p)));
    s.q = arena.take<char>(d.blocks * kQueryBlock * round_up(p.dim_qk, kPad) * elem);
    s.rows = arena.take<char>(kQueryBlock * std::max(p.dim_qk, p.dim_v) * size);
    s.k_rows = arena.take<char>(copied_rows(ops, p) * p.dim_qk * copied);
    s.v_rows = arena.take<char>(copied_rows(ops, p) * p.dim_v * copied);
    s.k = arena.take<char>(KeyTile::k_bytes(ops, p));
    s.v = arena.take<char>(KeyTile::v_bytes(ops, p));
    s.tile = ScoreScratch::cut(arena, ops);
    s.wide_q = arena.take<float>(kStreamRows * round_up(p.dim_qk, kPad));
    s.sums = arena.take<float>(kStreamRows * round_up(p.dim_v, kPad));
    s.turned = arena.take<float>(round_up(p.rotary_dim, kPad) + 2 * round_up(p.rotary_dim / 2, kPad));
    s.wide = arena.take<float>(p.fp8_cache ? round_up(std::max(p.dim_qk, p.dim_v), kPad) : 0);
    return s;
  }
};

struct Workspace {
  Dims dims;
  char* q;         // rotated [B][Sq][Hq][Dqk], of the problem's type; if rotary
  char* partials;  // [B][Hkv][stretches][blocks] RowState
  std::size_t partial_bytes;
  char* threads;
  std::size_t thread_bytes;

  Workspace(Arena& arena, const TileOps& ops, const AttentionProblem& p, int thread_count) : dims(ops, p) {
    q = arena.take<char>(p.rotary_dim > 0 ? p.batch * p.seq_q * p.heads_q * p.dim_qk * size_in(p) : 0);
    Arena part(nullptr);
    RowState::cut(part, p);
    partial_bytes = part.used();
    partials = arena.take<char>(p.batch * p.heads_kv * dims.stretches * dims.blocks *
                                static_cast<std::int64_t>(partial_bytes));
    Arena one(nullptr);
    ThreadScratch::cut(one, ops, p, dims);
    thread_bytes = one.used();
    threads = arena.take<char>(static_cast<std::int64_t>(thread_bytes) * thread_count);
  }

  RowState partial(const AttentionProblem& p, std::int64_t b, std::int64_t head_kv, std::int64_t stretch,
                   std::int64_t block) const {
    const std::int64_t index = ((b * p.heads_kv + head_kv) * dims.stretches + stretch) * dims.blocks + block;
    Arena arena(partials + index * static_cast<std::int64_t>(partial_bytes));
    return RowState::cut(arena, p);
  }
};

TensorView rotated_q(const AttentionProblem& p, void* memory) {
  return {memory, p.seq_q * p.heads_q * p.dim_qk, p.heads_q * p.dim_qk, p.dim_qk};
}

std::int64_t keys_in_use(const AttentionArgs& args, std::int64_t b) {  // the new ones included
  return args.cache_seqlens != nullptr ? args.cache_seqlens[b] + args.problem.seq_new : args.problem.seq_k;
}
std::int64_t first_key(const AttentionArgs& args, std::int64_t b) {
  return args.leftpad_k != nullptr ? args.leftpad_k[b] : 0;
}

// Row r of a group is query r % Sq of head r / Sq.
Columns columns_of(const AttentionArgs& args, const Dims& dims, std::int64_t b, std::int64_t head_kv,
                   std::int64_t block, std::int64_t keys) {
  const AttentionProblem& p = args.problem;
  const Mask mask = mask_of(p);
  const Index offset = position_offset(mask, p.seq_q, keys);
  Columns columns;
  columns.clear(p.alibi);
  for (std::int64_t r = block * kQueryBlock; r < std::min(dims.rows, (block + 1) * kQueryBlock); ++r) {
    columns.add(visible_keys(mask, r % p.seq_q, p.seq_q, keys), r % p.seq_q + offset,
                slope_of(args, b, head_kv * dims.group + r / p.seq_q));
  }
  return columns;
}

struct Place {
  std::int64_t row, key;  // of the cache, or a page and a key of it
};
Place place_of(const AttentionArgs& args, std::int64_t b, std::int64_t key) {
  const std::int64_t page_size = args.problem.page_size;
  if (!args.problem.paged) return {args.cache_batch_idx != nullptr ? args.cache_batch_idx[b] : b, key};
  return {args.page_table[b * args.page_table_stride + key / page_size], key % page_size};
}

char* cache_row(const AttentionArgs& args, const TensorView& cache, std::int64_t b, std::int64_t head_kv,
                std::int64_t key) {
  const AttentionProblem& p = args.problem;
  const Place at = place_of(args, b, key);
  if (!p.fp8_cache) return element(cache, p.dtype, at.row, at.key, head_kv);
  return static_cast<char*>(cache.data) + at.row * cache.batch_stride + at.key * cache.seq_stride +
         head_kv * cache.head_stride;
}

// Scales of a whole head; 1 if keys or pages have their own.
float scale_of(const AttentionArgs& args, const ScaleView& scale, std::int64_t b, std::int64_t head_kv) {
  if (!args.problem.fp8_cache || has_key_scales(args.problem)) return 1.0f;
  return scale.data[b * scale.batch_stride + head_kv * scale.head_stride];
}
float* key_scale_of(const AttentionArgs& args, const ScaleView& scale, std::int64_t b, std::int64_t head_kv,
                    std::int64_t key) {
  const Place at = place_of(args, b, key);
  return scale.data + at.row * scale.batch_stride + head_kv * scale.head_stride +
         (args.problem.cache_scales == CacheScales::kPerToken ? at.key : 0);
}

// The scores of a cache's keys as they are stored are those of the keys with another scale.
AttentionProblem of_stored_keys(const AttentionArgs& args, std::int64_t b, std::int64_t head_kv) {
  AttentionProblem p = args.problem;
  p.scale *= scale_of(args, args.k_scale, b, head_kv);
  return p;
}

// The values of e4m3 in a 16-bit type, which has them all.
using Values16 = std::array<std::uint16_t, 256>;
const Values16& e4m3_values_in(const TileOps& ops, DType dtype) {
  const auto made = [&] {
    Values16 values{};
    ops.store(e4m3_values().data(), 1, 1, 256, 1.0f, {values.data(), 256, dtype});
    return values;
  };
  if (dtype == DType::kFloat16) {
    static const Values16 fp16 = made();
    return fp16;
  }
  static const Values16 bf16 = made();
  return bf16;
}

// K or V.
struct Cache {
  const TensorView& rows;
  const ScaleView& scales;
  std::int64_t dim;
};
Cache cached_keys(const AttentionArgs& args) { return {args.k, args.k_scale, args.problem.dim_qk}; }
Cache cached_values(const AttentionArgs& args) { return {args.v, args.v_scale, args.problem.dim_v}; }

// A key's row of the cache, without the scale of its head.
void copy_row(const TileOps& ops, const AttentionArgs& args, const Cache& cache, std::int64_t b, std::int64_t head_kv,
              std::int64_t key, char* to) {
  const AttentionProblem& p = args.problem;
  const std::int64_t dim = cache.dim;
  const char* const row = cache_row(args, cache.rows, b, head_kv, key);
  if (has_key_scales(p)) {
    const float scale = *key_scale_of(args, cache.scales, b, head_kv, key);
    const std::array<float, 256>& values = e4m3_values();
    auto* const out = reinterpret_cast<float*>(to);
    for (std::int64_t d = 0; d < dim; ++d) out[d] = values[static_cast<unsigned char>(row[d])] * scale;
    return;
  }
  if (!p.fp8_cache) {
    std::memcpy(to, row, static_cast<std::size_t>(dim * size_in(p)));
    return;
  }
  const auto copy = [&](const auto& values, auto* out) {
    for (std::int64_t d = 0; d < dim; ++d) out[d] = values[static_cast<unsigned char>(row[d])];
  };
  if (p.dtype == DType::kFloat32) {
    copy(e4m3_values(), reinterpret_cast<float*>(to));
  } else {
    copy(e4m3_values_in(ops, p.dtype), reinterpret_cast<std::uint16_t*>(to));
  }
}

// A tile's rows of the cache: in place, or copied.
Source tile_rows(const TileOps& ops, const AttentionArgs& args, const Cache& cache, std::int64_t b,
                 std::int64_t head_kv, std::int64_t key, std::int64_t rows, char* copied) {
  const AttentionProblem& p = args.problem;
  if (!p.paged && !p.fp8_cache) return {cache_row(args, cache.rows, b, head_kv, key), cache.rows.seq_stride, p.dtype};
  const DType dtype = type_of_copies(p);
  const std::int64_t row_bytes = cache.dim * static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t i = 0; i < rows; ++i) copy_row(ops, args, cache, b, head_kv, key + i, copied + i * row_bytes);
  return {copied, cache.dim, dtype};
}

// Rotates the first columns of a row in fp32 and rounds them to the row's type.
void rotate(const TileOps& ops, const AttentionArgs& args, void* row, std::int64_t position, const ThreadScratch& s) {
  const AttentionProblem& p = args.problem;
  const std::int64_t half = p.rotary_dim / 2, size = size_in(p);
  float* const x = s.turned;
  float* const cos = x + round_up(p.rotary_dim, kPad);
  float* const sin = cos + round_up(half, kPad);
  const auto angles = [&](const void* table, std::int64_t stride, float* to) {
    ops.widen({static_cast<const char*>(table) + position * stride * size, half, p.dtype}, 1, half, to);
  };
  ops.widen({row, p.rotary_dim, p.dtype}, 1, p.rotary_dim, x);
  angles(args.rotary_cos, args.rotary_cos_stride, cos);
  angles(args.rotary_sin, args.rotary_sin_stride, sin);
  for (std::int64_t i = 0; i < half; ++i) {
    float& first = x[p.rotary_interleaved ? 2 * i : i];
    float& second = x[p.rotary_interleaved ? 2 * i + 1 : i + half];
    const float turned = first * cos[i] - second * sin[i];
    second = first * sin[i] + second * cos[i];
    first = turned;
  }
  // One row of a result is its panels side by side.
  ops.store(x, 1, 1, p.rotary_dim, 1.0f, {row, p.rotary_dim, p.dtype});
}

// The scale of a new key or value, if each has one.
float row_scale(const float* row, std::int64_t dim) {
  float largest = 0;
  for (std::int64_t d = 0; d < dim; ++d) largest = std::fmax(largest, std::abs(row[d]));
  return std::ldexp(1.0f, largest == 0 ? kLeastScaleExponent : fp8_scale_exponent(largest));
}

// Writes a KV head's new keys to the cache and its queries, rotated, to the workspace. No other task writes these rows.
void append(const TileOps& ops, const AttentionArgs& args, const Workspace& space, std::int64_t b, std::int64_t head_kv,
            void* memory) {
  const AttentionProblem& p = args.problem;
  Arena arena(memory);
  const ThreadScratch s = ThreadScratch::cut(arena, ops, p, space.dims);
  const std::int64_t length = keys_in_use(args, b) - p.seq_new;
  const std::int64_t position = args.rotary_seqlens != nullptr ? args.rotary_seqlens[b] : length;
  const auto write = [&](const TensorView& from, const TensorView& cache, const ScaleView& scale, std::int64_t dim,
                         std::int64_t i, bool rotates) {
    char* const row = cache_row(args, cache, b, head_kv, length + i);
    char* const made = p.fp8_cache ? s.rows : row;
    std::memmove(made, element(from, p.dtype, b, i, head_kv), static_cast<std::size_t>(dim * size_in(p)));
    if (rotates) rotate(ops, args, made, position + i, s);
    if (!p.fp8_cache) return;
    ops.widen({made, dim, p.dtype}, 1, dim, s.wide);
    float by = scale_of(args, scale, b, head_kv);
    if (has_key_scales(p)) {
      float* const kept = key_scale_of(args, scale, b, head_kv, length + i);
      if (p.cache_scales == CacheScales::kPerToken) *kept = row_scale(s.wide, dim);
      by = *kept;
    }
    for (std::int64_t d = 0; d < dim; ++d) row[d] = static_cast<char>(to_e4m3(s.wide[d] / by));
  };
  for (std::int64_t i = 0; i < p.seq_new; ++i) {
    write(args.k_new, args.k, args.k_scale, p.dim_qk, i, p.rotary_dim > 0);
    write(args.v_new, args.v, args.v_scale, p.dim_v, i, false);
  }
  if (p.rotary_dim == 0) return;
  const bool by_position = !mask_of(p).everything();
  const TensorView turned = rotated_q(p, space.q);
  for (std::int64_t head = head_kv * space.dims.group; head < (head_kv + 1) * space.dims.group; ++head) {
    for (std::int64_t i = 0; i < p.seq_q; ++i) {
      char* const row = element(turned, p.dtype, b, i, head);
      std::memcpy(row, element(args.q, p.dtype, b, i, head), static_cast<std::size_t>(p.dim_qk * size_in(p)));
      rotate(ops, args, row, position + (by_position ? i : 0), s);
    }
  }
}

// The keys of a stretch that are in use and not left padding; there may be none.
struct Keys {
  std::int64_t begin, end;
};
Keys keys_of(const AttentionArgs& args, const Dims& dims, std::int64_t b, std::int64_t stretch) {
  const std::int64_t begin = stretch * dims.stretch;
  return {std::max(begin, first_key(args, b)), std::min(keys_in_use(args, b), begin + dims.stretch)};
}

// A stretch for few rows: keys are read in place, without packing.
void stream_stretch(const TileOps& ops, const AttentionArgs& args, const Workspace& space, std::int64_t b,
                    std::int64_t head_kv, std::int64_t stretch, void* memory) {
  const AttentionProblem p = of_stored_keys(args, b, head_kv);
  const Dims& dims = space.dims;
  const std::int64_t keys = keys_in_use(args, b);
  if (stretch * dims.stretch >= keys) return;
  const auto [begin, end] = keys_of(args, dims, b, stretch);
  Arena arena(memory);
  const ThreadScratch s = ThreadScratch::cut(arena, ops, p, dims);
  const RowState state = space.partial(p, b, head_kv, stretch, 0);
  state.clear(p);
  const std::int64_t dim_v = round_up(p.dim_v, kPad), dim_qk = round_up(p.dim_qk, kPad);
  std::fill(s.sums, s.sums + dims.rows * dim_v, 0.0f);
  for (std::int64_t r = 0; r < dims.rows; ++r) {
    ops.widen(source_of(args.q, p.dtype, b, r % p.seq_q, head_kv * dims.group + r / p.seq_q), 1, p.dim_qk,
              s.wide_q + r * dim_qk);
  }
  Columns columns = columns_of(args, dims, b, head_kv, 0, keys);
  const void* k_rows[kStreamKeys + kStreamAhead];
  const void* v_rows[kStreamKeys + kStreamAhead];
  for (std::int64_t key = begin; key < end; key += kStreamKeys) {
    StreamTile tile;
    tile.dtype = type_of_copies(p);
    tile.rows = static_cast<int>(dims.rows);
    tile.keys = static_cast<int>(std::min<std::int64_t>(kStreamKeys, end - key));
    if (columns.last_key <= key || columns.first_key >= key + tile.keys) continue;
    const auto row = [&, last = end - 1](const Cache& cache, char* copied, int i) -> const void* {
      if (!p.fp8_cache) return cache_row(args, cache.rows, b, head_kv, std::min(key + i, last));
      char* const to = copied + i * cache.dim * static_cast<std::int64_t>(size_of(tile.dtype));
      copy_row(ops, args, cache, b, head_kv, std::min(key + i, last), to);
      return to;
    };
    for (int i = 0; i < tile.keys + kStreamAhead; ++i) {
      k_rows[i] = row(cached_keys(args), s.k_rows, i);
      v_rows[i] = row(cached_values(args), s.v_rows, i);
    }
    tile.dim_qk = p.dim_qk;
    tile.dim_v = p.dim_v;
    tile.k = k_rows;
    tile.v = v_rows;
    tile.q = s.wide_q;
    tile.map = columns.map(p, key, tile.keys, true);
    tile.shift = headroom(keys);
    tile.row_max = state.row_max;
    tile.row_sum = state.row_sum;
    tile.accumulator = s.sums;
    ops.stream(tile);
  }
  const std::int64_t w = ops.width;
  for (std::int64_t r = 0; r < dims.rows; ++r) {
    float* to = state.accumulator + r / w * dim_v * w + r % w;
    for (std::int64_t d = 0; d < p.dim_v; ++d) to[d * w] = s.sums[r * dim_v + d];
  }
}

void run_stretch(const TileOps& ops, const AttentionArgs& args, const Workspace& space, std::int64_t b,
                 std::int64_t head_kv, std::int64_t stretch, void* memory) {
  const AttentionProblem p = of_stored_keys(args, b, head_kv);
  const Dims& dims = space.dims;
  const std::int64_t keys = keys_in_use(args, b);
  if (stretch * dims.stretch >= keys) return;
  const auto [begin, end] = keys_of(args, dims, b, stretch);
  Arena arena(memory);
  const ThreadScratch s = ThreadScratch::cut(arena, ops, p, dims);
  const TileScope tile_registers(ops);
  const std::int64_t dim_qk = round_up(p.dim_qk, kPad);
  const std::int64_t q_block_bytes = kQueryBlock * dim_qk * static_cast<std::int64_t>(ops.elem);
  const std::size_t row_bytes = static_cast<std::size_t>(p.dim_qk) * size_of(p.dtype);
  for (std::int64_t block = 0; block < dims.blocks; ++block) {
    const std::int64_t first = block * kQueryBlock, rows = std::min(kQueryBlock, dims.rows - first);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy(s.rows + static_cast<std::size_t>(r) * row_bytes,
                  element(args.q, p.dtype, b, (first + r) % p.seq_q, head_kv * dims.group + (first + r) / p.seq_q),
                  row_bytes);
    }
    ops.pack_rhs_t({s.rows, p.dim_qk, p.dtype}, rows, p.dim_qk, dim_qk, s.q + block * q_block_bytes);
    space.partial(p, b, head_kv, stretch, block).clear(p);
  }
  const float shift = headroom(keys);
  for (std::int64_t key = begin; key < end; key += ops.forward_keys) {
    const std::int64_t rows = std::min(ops.forward_keys, end - key);
    bool packed = false;
    for (std::int64_t block = 0; block < dims.blocks; ++block) {
      Columns columns = columns_of(args, dims, b, head_kv, block, keys);
      const std::int64_t seen = std::min(rows, columns.last_key - key);
      if (seen <= 0 || columns.first_key >= key + rows) continue;
      if (!packed) {
        ops.pack_lhs(tile_rows(ops, args, cached_keys(args), b, head_kv, key, rows, s.k_rows), rows, p.dim_qk,
                     ops.forward_keys, s.k);
        ops.pack_lhs_t(tile_rows(ops, args, cached_values(args), b, head_kv, key, rows, s.v_rows), rows, p.dim_v,
                       ops.forward_keys, s.v);
        packed = true;
      }
      attend(ops, p, columns, {s.k, s.v}, key, seen, shift, s.q + block * q_block_bytes, s.tile,
             space.partial(p, b, head_kv, stretch, block));
    }
  }
}

// Adds up the stretches of one block of rows and writes O and LSE.
void combine(const TileOps& ops, const AttentionArgs& args, const Workspace& space, std::int64_t b,
             std::int64_t head_kv, std::int64_t block, char* gathered) {
  const AttentionProblem& p = args.problem;
  const Dims& dims = space.dims;
  const std::int64_t keys = keys_in_use(args, b);
  const std::int64_t stretches = (keys + dims.stretch - 1) / dims.stretch;
  const std::int64_t first = block * kQueryBlock, rows = std::min(kQueryBlock, dims.rows - first);
  const std::int64_t w = ops.width, dim_v = round_up(p.dim_v, kPad);
  // The first stretch takes the sum; an empty cache has its memory too.
  const RowState total = space.partial(p, b, head_kv, 0, block);
  if (stretches == 0) total.clear(p);
  for (std::int64_t stretch = 1; stretch < stretches; ++stretch) {
    const RowState part = space.partial(p, b, head_kv, stretch, block);
    alignas(64) float keep[kQueryBlock], add[kQueryBlock];
    for (std::int64_t r = 0; r < kQueryBlock; ++r) {
      const float row_max = std::max(total.row_max[r], part.row_max[r]);
      keep[r] = std::exp2(total.row_max[r] - row_max);
      add[r] = std::exp2(part.row_max[r] - row_max);
      total.row_sum[r] = total.row_sum[r] * keep[r] + part.row_sum[r] * add[r];
      total.row_max[r] = row_max;
    }
    for (std::int64_t panel = 0; panel * w < rows; ++panel) {
      float* to = total.accumulator + panel * dim_v * w;
      const float* from = part.accumulator + panel * dim_v * w;
      for (std::int64_t d = 0; d < p.dim_v; ++d) {
        for (std::int64_t i = 0; i < w; ++i) {
          to[d * w + i] = to[d * w + i] * keep[panel * w + i] + from[d * w + i] * add[panel * w + i];
        }
      }
    }
  }
  const float shift = headroom(keys);
  alignas(64) float scales[kQueryBlock] = {};
  const float value_scale = scale_of(args, args.v_scale, b, head_kv);
  for (std::int64_t r = 0; r < rows; ++r) scales[r] = inverse_of(total.row_sum[r]) * value_scale;
  ops.store_t(total.accumulator, dim_v, rows, p.dim_v, scales, {gathered, p.dim_v, p.dtype});
  const std::size_t row_bytes = static_cast<std::size_t>(p.dim_v) * size_of(p.dtype);
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t query = (first + r) % p.seq_q, head = head_kv * dims.group + (first + r) / p.seq_q;
    std::memcpy(element(args.o, p.dtype, b, query, head), gathered + static_cast<std::size_t>(r) * row_bytes,
                row_bytes);
    if (args.lse.data != nullptr) {
      *row_of(args.lse, b, head, query) = log_sum_exp(total.row_max[r], shift, total.row_sum[r]);
    }
  }
}

}  // namespace

std::size_t decode_workspace(const TileOps& ops, const AttentionProblem& problem, int threads) {
  Arena arena(nullptr);
  Workspace(arena, ops, problem, threads);
  return arena.used();
}

void decode(const TileOps& ops, const AttentionArgs& given, int threads, void* memory) {
  const AttentionProblem& p = given.problem;
  Arena arena(memory);
  const Workspace space(arena, ops, p, threads);
  const std::int64_t stretches = space.dims.stretches, blocks = space.dims.blocks;
  const auto scratch = [&](int slot) { return space.threads + static_cast<std::size_t>(slot) * space.thread_bytes; };
  AttentionArgs args = given;
  if (args.status != nullptr) std::fill(args.status, args.status + p.batch, 0);
  if (p.seq_new > 0) {
    parallel_for(p.batch * p.heads_kv, threads, [&](std::int64_t task, int slot) {
      append(ops, given, space, task / p.heads_kv, task % p.heads_kv, scratch(slot));
    });
    if (p.rotary_dim > 0) args.q = rotated_q(p, space.q);
  }
  parallel_for(p.batch * p.heads_kv * stretches, threads, [&](std::int64_t task, int slot) {
    const auto run = space.dims.rows <= kStreamRows ? stream_stretch : run_stretch;
    run(ops, args, space, task / stretches / p.heads_kv, task / stretches % p.heads_kv, task % stretches,
        scratch(slot));
  });
  parallel_for(p.batch * p.heads_kv * blocks, threads, [&](std::int64_t task, int slot) {
    Arena one(scratch(slot));
    combine(ops, args, space, task / blocks / p.heads_kv, task / blocks % p.heads_kv, task % blocks,
            ThreadScratch::cut(one, ops, p, space.dims).rows);
  });
}

}  // namespace tessera::cpu
