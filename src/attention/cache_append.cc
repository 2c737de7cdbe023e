#include "attention/cache_append.h"

#include <algorithm>

#include "attention/gpu.h"
#include "attention/params.h"
#include "base/format.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

constexpr std::int64_t kAligned = 256;

std::int64_t length_bytes(const AttentionProblem& p) { return ceil_div(p.batch * 4, kAligned) * kAligned; }

}  // namespace

jit::KernelInstance instance_of(const CacheAppendConfig& config) {
  return {.name = format("cache_append_{}_v{}", name_of(config.dtype), config.vector),
          .header = "attention/cache_append.cuh",
          .entry = "cache_append",
          .params = "CacheAppendParams",
          .config = jit::config_text("CacheAppendConfig", config),
          .threads = config.threads,
          .min_blocks = kMemoryBoundCtas,
          .pdl = true};
}

std::size_t append_workspace(const AttentionProblem& p) {
  if (p.seq_new == 0) return 0;
  const std::int64_t rows = saturating_product(p.batch, p.seq_q, p.heads_q);
  const std::int64_t queries = p.rotary_dim > 0 ? saturating_product(rows, p.dim_qk, 2) : 0;
  return static_cast<std::size_t>(length_bytes(p)) + static_cast<std::size_t>(queries);
}

Status enqueue_append(const cuda::Kernel& kernel, AttentionArgs& args, void* workspace, cuda::CUstream stream) {
  AttentionProblem& p = args.problem;
  CacheAppendParams params = {};
  params.cache = kv_cache_of(args);
  params.rotary_seqlens = args.rotary_seqlens;
  params.lengths = static_cast<int*>(workspace);
  params.q = args.q.data;
  params.q_rotated = static_cast<char*>(workspace) + length_bytes(p);
  params.k_new = args.k_new.data;
  params.v_new = args.v_new.data;
  params.k = args.k.data;
  params.v = args.v.data;
  params.rotary_cos = args.rotary_cos;
  params.rotary_sin = args.rotary_sin;
  params.q_strides = strides_of(args.q);
  params.k_new_strides = strides_of(args.k_new);
  params.v_new_strides = strides_of(args.v_new);
  params.k_strides = strides_of(args.k);
  params.v_strides = strides_of(args.v);
  params.rotary_cos_stride = args.rotary_cos_stride;
  params.rotary_sin_stride = args.rotary_sin_stride;
  params.rotary_rows = static_cast<int>(std::min<std::int64_t>(p.rotary_rows, kUnbounded));
  params.rotary_dim = static_cast<int>(p.rotary_dim);
  params.rotary_interleaved = p.rotary_interleaved ? 1 : 0;
  params.rotary_advances = is_masked(p) ? 1 : 0;
  params.seq_q = static_cast<int>(p.seq_q);
  params.seq_new = static_cast<int>(p.seq_new);
  params.heads_q = static_cast<int>(p.heads_q);
  params.heads_kv = static_cast<int>(p.heads_kv);
  params.dim_qk = static_cast<int>(p.dim_qk);
  params.dim_v = static_cast<int>(p.dim_v);
  // Chunks of the largest tensor, a few for each thread.
  constexpr std::int64_t kChunks = 4 * 256;
  const std::int64_t rows = std::max(p.seq_new * p.heads_kv * std::max(p.dim_qk, p.dim_v),
                                     p.rotary_dim > 0 ? p.seq_q * p.heads_q * p.dim_qk : 0);
  params.ctas = static_cast<unsigned>(std::clamp<std::int64_t>(ceil_div(rows / 8, kChunks), 1, 1024));
  const cuda::Grid grid{static_cast<unsigned>(p.batch) * params.ctas, 1, 1};
  if (Status s = cuda::launch(kernel, cuda::Work<CacheAppendParams>{params, grid}, stream); !s.ok()) return s;
  args.cache_seqlens = params.lengths;
  if (p.rotary_dim > 0) {
    args.q = {params.q_rotated, p.seq_q * p.heads_q * p.dim_qk, p.heads_q * p.dim_qk, p.dim_qk};
  }
  p.seq_new = p.rotary_dim = 0;
  return {};
}

}  // namespace tessera::attention
