#include "ops/attention_forward.h"

#include <climits>

#include "ops/band.h"
#include "ops/extents.h"
#include "select/kernels.h"

namespace tessera {

Result<cuda::KernelLaunch<AttentionForwardParams>> forward_launch(const AttentionArgs& args,
                                                                  const AttentionForwardConfig& config) {
  const AttentionProblem& p = args.problem;
  const std::int64_t q_tiles = ceil_div(p.seq_q, config.block_q);
  if (saturating_product(q_tiles, p.batch, p.heads_q) > INT_MAX) {
    return Status(TESSERA_UNSUPPORTED, "attention_forward: more rows than one grid can cover");
  }
  AttentionForwardParams params = {};
  params.q = args.q.data;
  params.k = args.k.data;
  params.v = args.v.data;
  params.o = args.o.data;
  params.lse = args.lse.data;
  params.cu_seqlens_q = args.cu_seqlens_q;
  params.cu_seqlens_k = args.cu_seqlens_k;
  params.alibi_slopes = args.alibi_slopes;
  params.q_strides = strides_of(args.q);
  params.k_strides = strides_of(args.k);
  params.v_strides = strides_of(args.v);
  params.o_strides = strides_of(args.o);
  params.lse_strides = strides_of(args.lse);
  params.alibi_batch_stride = args.alibi_batch_stride;
  params.seq_q = static_cast<int>(p.seq_q);
  params.seq_k = static_cast<int>(p.seq_k);
  params.heads_q = static_cast<unsigned>(p.heads_q);
  params.group = static_cast<unsigned>(p.heads_q / p.heads_kv);
  params.q_tiles = static_cast<unsigned>(q_tiles);
  params.band = band_of(p);
  params.scale = p.scale;
  params.softcap = p.softcap;
  const cuda::Grid grid{static_cast<unsigned>(q_tiles * p.batch * p.heads_q), 1, 1};
  return cuda::KernelLaunch<AttentionForwardParams>{select::instance_of(config), params, grid};
}

Status enqueue_forward(const cuda::Kernel& kernel, const AttentionArgs& args, const AttentionForwardConfig& config,
                       cuda::CUstream stream) {
  const auto what = forward_launch(args, config);
  return what.ok() ? cuda::launch(kernel, *what, stream) : what.status();
}

}  // namespace tessera
