#include "attention/backward_convert.h"

#include <algorithm>

#include "attention/gpu.h"
#include "attention/params.h"
#include "base/format.h"
#include "jit/config_text.h"

namespace tessera::attention {

jit::KernelInstance instance_of(const BackwardConvertConfig& config) {
  return {.name = format("backward_convert_{}_v{}", name_of(config.dtype), config.vector),
          .header = "attention/backward_convert.cuh",
          .entry = "backward_convert",
          .params = "BackwardConvertParams",
          .config = jit::config_text("BackwardConvertConfig", config),
          .threads = config.threads,
          .min_blocks = kMemoryBoundCtas,
          .pdl = true};
}

namespace {

// A gradient of [B, seq, heads, dim].
struct Gradient {
  DqSums sums;
  const TensorView& out;
  const int* cu_seqlens;
  std::int64_t seq;  // of the longest sequence if packed
  std::int64_t heads;
  std::int64_t dim;
  int block;
  float scale;
};

std::int64_t tiles_of(DType dtype, std::int64_t seq, std::int64_t dim) {
  const std::int64_t warps = ceil_div(seq, 16) * ceil_div(dim / 8, kConvertTiles);
  return ceil_div(warps, convert_config(dtype, 8).threads / 32);
}

Status enqueue(const cuda::Kernel& kernel, const AttentionProblem& p, const Gradient& of, cuda::CUstream stream) {
  const std::int64_t ctas = tiles_of(p.dtype, of.seq, of.dim);
  BackwardConvertParams params = {};
  params.sums = of.sums;
  params.out = of.out.data;
  params.cu_seqlens = of.cu_seqlens;
  params.strides = strides_of(of.out);
  params.seq = static_cast<int>(of.seq);
  params.block = of.block;
  params.heads = static_cast<unsigned>(of.heads);
  params.chunks = static_cast<unsigned>(of.dim / 8);
  params.blocks = static_cast<unsigned>(ctas);
  params.scale = of.scale;
  const cuda::Grid grid{static_cast<unsigned>(ctas * p.batch * of.heads), 1, 1};
  return cuda::launch(kernel, cuda::Work<BackwardConvertParams>{params, grid}, stream);
}

}  // namespace

std::int64_t convert_tiles(const AttentionProblem& p) { return tiles_of(p.dtype, p.seq_q, p.dim_qk); }
std::int64_t convert_key_tiles(const AttentionProblem& p) {
  return tiles_of(p.dtype, p.seq_k, std::max(p.dim_qk, p.dim_v));
}

Status enqueue_convert(const cuda::Kernel& kernel, const AttentionArgs& args, const DqSums& sums, int block_q,
                       cuda::CUstream stream) {
  const AttentionProblem& p = args.problem;
  return enqueue(kernel, p, {sums, args.dq, args.cu_seqlens_q, p.seq_q, p.heads_q, p.dim_qk, block_q, p.scale}, stream);
}

Status enqueue_convert_keys(const cuda::Kernel& kernel, const AttentionArgs& args, const DqSums& dk_sums,
                            const DqSums& dv_sums, int block_k, cuda::CUstream stream) {
  const AttentionProblem& p = args.problem;
  const Gradient dk = {dk_sums, args.dk, args.cu_seqlens_k, p.seq_k, p.heads_kv, p.dim_qk, block_k, p.scale};
  const Gradient dv = {dv_sums, args.dv, args.cu_seqlens_k, p.seq_k, p.heads_kv, p.dim_v, block_k, 1.0f};
  if (Status s = enqueue(kernel, p, dk, stream); !s.ok()) return s;
  return enqueue(kernel, p, dv, stream);
}

}  // namespace tessera::attention
