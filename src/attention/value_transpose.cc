#include "attention/value_transpose.h"

#include <climits>

#include "attention/gpu.h"
#include "attention/params.h"
#include "jit/config_text.h"

namespace tessera::attention {

jit::KernelInstance instance_of(const ValueTransposeConfig& config) {
  return {.name = "value_transpose",
          .header = "attention/value_transpose_sm90.cuh",
          .entry = "value_transpose",
          .params = "ValueTransposeParams",
          .config = jit::config_text("ValueTransposeConfig", config),
          .threads = config.threads,
          .min_blocks = kMemoryBoundCtas,
          .dynamic_smem_bytes = value_transpose_shared_bytes(config),
          .pdl = true};
}

std::int64_t transposed_pitch(const AttentionProblem& p) {
  return p.varlen ? value_start(p.total_k, p.batch) + kValueGroup : value_length(p.seq_k);
}

std::size_t transposed_bytes(const AttentionProblem& p) {
  return static_cast<std::size_t>((p.varlen ? 1 : p.batch) * p.heads_kv * p.dim_v * transposed_pitch(p));
}

Status enqueue_transpose(const cuda::Kernel& kernel, const AttentionArgs& args, void* out, cuda::CUstream stream) {
  const AttentionProblem& p = args.problem;
  const std::int64_t tiles = ceil_div(value_length(p.seq_k), std::int64_t{kValueTranspose.keys});
  const std::int64_t blocks = saturating_product(tiles, p.heads_kv, p.batch);
  if (blocks > INT_MAX) return Status(TESSERA_UNSUPPORTED, "value_transpose: more keys than one grid can cover");
  ValueTransposeParams params = {};
  params.v = args.v.data;
  params.out = out;
  params.cu_seqlens = args.cu_seqlens_k;
  params.strides = strides_of(args.v);
  params.pitch = transposed_pitch(p);
  params.seq_k = static_cast<int>(p.seq_k);
  params.dim_v = static_cast<int>(p.dim_v);
  params.heads = static_cast<unsigned>(p.heads_kv);
  params.tiles = static_cast<unsigned>(tiles);
  const cuda::Grid grid{static_cast<unsigned>(blocks), 1, 1};
  return cuda::launch(kernel, cuda::Work<ValueTransposeParams>{params, grid}, stream);
}

}  // namespace tessera::attention
