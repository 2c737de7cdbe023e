// Attention forward of e4m3 tensors on the CPU: q, k and v are dequantised to fp32, which is exact if scales are powers
// of two, and the forward of fp32 does the rest.
#include <array>

#include "attention/cpu/common.h"
#include "attention/cpu/e4m3.h"
#include "cpu/thread_pool.h"

namespace tessera::cpu {
namespace {

const std::array<float, 256>& e4m3_values() {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values{};
    for (int bits = 0; bits < 256; ++bits) values[static_cast<std::size_t>(bits)] = from_e4m3(bits);
    return values;
  }();
  return table;
}

AttentionProblem as_fp32(AttentionProblem p) {
  p.dtype = DType::kFloat32;
  p.fp8 = false;
  p.q_scale_block = p.k_scale_block = p.v_scale_block = 0;
  return p;
}

// Compact fp32 copies [B, S, H, D], or [total, H, D].
struct Workspace {
  float *q, *k, *v;
  char* rest;

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

}  // namespace

std::size_t fp8_workspace(const AttentionProblem& problem, int threads) {
  Arena arena(nullptr);
  Workspace(arena, problem);
  return arena.used() + forward_workspace(*ops_for(DType::kFloat32), as_fp32(problem), threads);
}

void forward_fp8(const AttentionArgs& args, int threads, void* memory) {
  const AttentionProblem& p = args.problem;
  Arena arena(memory);
  const Workspace space(arena, p);
  AttentionArgs plain = args;
  plain.problem = as_fp32(p);
  parallel_for(p.batch, threads, [&](std::int64_t b, int) {
    const Sequence s = sequence_of(args, b);
    const std::int64_t seq_q = p.varlen ? 0 : p.seq_q, seq_k = p.varlen ? 0 : p.seq_k;
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
  plain.q = compact(space.q, p.seq_q, p.heads_q, p.dim_qk);
  plain.k = compact(space.k, p.seq_k, p.heads_kv, p.dim_qk);
  plain.v = compact(space.v, p.seq_k, p.heads_kv, p.dim_v);
  forward(*ops_for(DType::kFloat32), plain, p.dtype, threads, space.rest);
}

}  // namespace tessera::cpu
