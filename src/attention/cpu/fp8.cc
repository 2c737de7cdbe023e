// Attention forward on e4m3 on the CPU: q, k and v are dequantised to fp32, which is exact if scales are powers of two,
// and the forward of fp32 does the rest. Tensors of other types are rounded to e4m3 and back first.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "attention/cpu/common.h"
#include "attention/cpu/e4m3.h"
#include "cpu/thread_pool.h"

namespace tessera::cpu {
namespace {

AttentionProblem as_fp32(AttentionProblem p) {
  p.dtype = DType::kFloat32;
  if (p.residuals) p.dim_qk += kResidualColumns;
  p.fp8 = p.rounds_to_fp8 = p.rotates = p.residuals = false;
  p.q_scale_block = p.k_scale_block = p.v_scale_block = 0;
  return p;
}

// Compact fp32 copies [B, S, H, D], or [total, H, D].
struct Workspace {
  float *q, *k, *v;
  char* rest;

  // p: as_fp32.
  Workspace(Arena& arena, const AttentionProblem& p) {
    const std::int64_t rows_q = p.varlen ? p.total_q : p.batch * p.seq_q;
    const std::int64_t rows_k = p.varlen ? p.total_k : p.batch * p.seq_k;
    q = arena.take<float>(rows_q * p.heads_q * p.dim_qk);
    k = arena.take<float>(rows_k * p.heads_kv * p.dim_qk);
    v = arena.take<float>(rows_k * p.heads_kv * p.dim_v);
    rest = arena.take<char>(0);
  }
};

struct Quantised {
  const TensorView& view;
  const ScaleView& scale;
  std::int64_t block;  // rows of a scale; 0: all
  std::int64_t heads, dim;
};

// Rows [begin, begin + length) of sequence b.
void dequantise(const Quantised& from, std::int64_t b, std::int64_t batch, std::int64_t begin, std::int64_t length,
                std::int64_t seq, float* to) {
  const std::array<float, 256>& values = e4m3_values();
  const std::int64_t row_size = from.heads * from.dim;
  for (std::int64_t i = 0; i < length; ++i) {
    for (std::int64_t h = 0; h < from.heads; ++h) {
      const std::int64_t index = from.block == 0 ? 0 : i / from.block;
      const float scale = from.scale.data[b * from.scale.batch_stride + h * from.scale.head_stride + index];
      const auto* in = static_cast<const unsigned char*>(from.view.data) + batch * from.view.batch_stride +
                       (begin + i) * from.view.seq_stride + h * from.view.head_stride;
      float* row = to + (batch * seq + begin + i) * row_size + h * from.dim;
      for (std::int64_t d = 0; d < from.dim; ++d) row[d] = values[in[d]] * scale;
    }
  }
}

// Rows of one head of a sequence, to be rounded.
struct Head {
  const TensorView& view;
  DType dtype;
  bool rotates;
  std::int64_t dim, heads, h, batch, begin, length;

  void load(std::int64_t i, std::vector<float>& row) const {
    load_fp8_row(view.data, dtype, batch * view.batch_stride + (begin + i) * view.seq_stride + h * view.head_stride,
                 rotates, row);
  }
};

// The channels of the largest values; of equal ones, the first.
std::vector<std::size_t> largest_channels(const Head& head) {
  std::vector<float> row(static_cast<std::size_t>(head.dim)), largest(row.size(), 0.0f);
  for (std::int64_t i = 0; i < head.length; ++i) {
    head.load(i, row);
    for (std::size_t d = 0; d < row.size(); ++d) largest[d] = std::max(largest[d], std::abs(row[d]));
  }
  std::vector<std::size_t> order(row.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return largest[a] > largest[b]; });
  order.resize(kResidualChannels);
  return order;
}

// What e4m3 and a scale for the head hold. of_keys: the order of the residual columns; channels: none if empty.
void round_head(const Head& head, const std::vector<std::size_t>& channels, bool of_keys, std::int64_t seq, float* to) {
  std::vector<float> row(static_cast<std::size_t>(head.dim));
  float largest = 0;
  for (std::int64_t i = 0; i < head.length; ++i) {
    head.load(i, row);
    for (const float x : row) largest = std::max(largest, std::abs(x));
  }
  const float scale = std::ldexp(1.0f, fp8_scale_exponent(largest)), inverse = 1 / scale;
  const std::array<float, 256>& values = e4m3_values();
  const auto rounded = [&](float x) { return values[to_e4m3(x * inverse)] * scale; };
  const std::int64_t columns = head.dim + (channels.empty() ? 0 : kResidualColumns);
  for (std::int64_t i = 0; i < head.length; ++i) {
    head.load(i, row);
    float* out = to + ((head.batch * seq + head.begin + i) * head.heads + head.h) * columns;
    for (const float x : row) *out++ = rounded(x);
    for (const bool of_rest : {of_keys, !of_keys}) {
      for (const std::size_t d : channels) *out++ = of_rest ? rounded(row[d] - rounded(row[d])) : rounded(row[d]);
    }
  }
}

}  // namespace

std::size_t fp8_workspace(const AttentionProblem& problem, int threads) {
  Arena arena(nullptr);
  Workspace(arena, as_fp32(problem));
  return arena.used() + forward_workspace(*ops_for(DType::kFloat32), as_fp32(problem), threads);
}

void forward_fp8(const AttentionArgs& args, int threads, void* memory) {
  const AttentionProblem& p = args.problem;
  Arena arena(memory);
  const Workspace space(arena, as_fp32(p));
  AttentionArgs plain = args;
  plain.problem = as_fp32(p);
  const std::int64_t seq_q = p.varlen ? 0 : p.seq_q, seq_k = p.varlen ? 0 : p.seq_k;
  if (p.rounds_to_fp8) {
    parallel_for(p.batch * p.heads_q, threads, [&](std::int64_t n, int) {
      const std::int64_t h = n % p.heads_q, key_head = h / (p.heads_q / p.heads_kv);
      const Sequence s = sequence_of(args, n / p.heads_q);
      const Head q{args.q, p.dtype, p.rotates, p.dim_qk, p.heads_q, h, s.batch, s.q_begin, s.len_q};
      const Head k{args.k, p.dtype, p.rotates, p.dim_qk, p.heads_kv, key_head, s.batch, s.k_begin, s.len_k};
      const Head v{args.v, p.dtype, false, p.dim_v, p.heads_kv, key_head, s.batch, s.k_begin, s.len_k};
      const std::vector<std::size_t> channels = p.residuals ? largest_channels(k) : std::vector<std::size_t>();
      round_head(q, channels, false, seq_q, space.q);
      if (h % (p.heads_q / p.heads_kv) != 0) return;
      round_head(k, channels, true, seq_k, space.k);
      round_head(v, {}, true, seq_k, space.v);
    });
  }
  parallel_for(p.fp8 ? p.batch : 0, threads, [&](std::int64_t b, int) {
    const Sequence s = sequence_of(args, b);
    dequantise({args.q, args.q_scale, p.q_scale_block, p.heads_q, p.dim_qk}, b, s.batch, s.q_begin, s.len_q, seq_q,
               space.q);
    dequantise({args.k, args.k_scale, p.k_scale_block, p.heads_kv, p.dim_qk}, b, s.batch, s.k_begin, s.len_k, seq_k,
               space.k);
    dequantise({args.v, args.v_scale, p.v_scale_block, p.heads_kv, p.dim_v}, b, s.batch, s.k_begin, s.len_k, seq_k,
               space.v);
  });
  const auto compact = [&](float* data, std::int64_t seq, std::int64_t heads, std::int64_t dim) {
    return TensorView{data, p.varlen ? 0 : seq * heads * dim, heads * dim, dim};
  };
  plain.q = compact(space.q, p.seq_q, p.heads_q, plain.problem.dim_qk);
  plain.k = compact(space.k, p.seq_k, p.heads_kv, plain.problem.dim_qk);
  plain.v = compact(space.v, p.seq_k, p.heads_kv, p.dim_v);
  forward(*ops_for(DType::kFloat32), plain, p.dtype, threads, space.rest);
}

}  // namespace tessera::cpu
