#include "attention/backward_convert.h"

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

std::int64_t convert_tiles(const AttentionProblem& p) {
  const std::int64_t warps = ceil_div(p.seq_q, 16) * ceil_div(p.dim_qk / 8, kConvertTiles);
  return ceil_div(warps, convert_config(p.dtype, 8).threads / 32);
}

Status enqueue_convert(const cuda::Kernel& kernel, const AttentionArgs& args, const DqSums& sums, int block_q,
                       cuda::CUstream stream) {
  const AttentionProblem& p = args.problem;
  const std::int64_t ctas = convert_tiles(p);
  BackwardConvertParams params = {};
  params.dq_sums = sums;
  params.dq = args.dq.data;
  params.cu_seqlens_q = args.cu_seqlens_q;
  params.dq_strides = strides_of(args.dq);
  params.seq_q = static_cast<int>(p.seq_q);
  params.block_q = block_q;
  params.heads = static_cast<unsigned>(p.heads_q);
  params.chunks = static_cast<unsigned>(p.dim_qk / 8);
  params.blocks = static_cast<unsigned>(ctas);
  params.scale = p.scale;
  const cuda::Grid grid{static_cast<unsigned>(ctas * p.batch * p.heads_q), 1, 1};
  return cuda::launch(kernel, cuda::Work<BackwardConvertParams>{params, grid}, stream);
}

}  // namespace tessera::attention
