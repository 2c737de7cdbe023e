#include "ops/attention_forward.h"

#include <algorithm>
#include <climits>

#include "select/kernels.h"

namespace tessera {
namespace {

Strides strides_of(const TensorView& view) { return {view.batch_stride, view.seq_stride, view.head_stride}; }

int band_of(std::int64_t window) {
  return static_cast<int>(window < 0 ? kUnbounded : std::min<std::int64_t>(window, kUnbounded));
}

}  // namespace

Result<cuda::KernelLaunch<AttentionForwardParams>> forward_launch(const AttentionArgs& args,
                                                                  const AttentionForwardConfig& config) {
  const AttentionProblem& p = args.problem;
  const std::int64_t q_tiles = (p.seq_q + config.block_q - 1) / config.block_q;
  // In floating point, where a product that overflows 64 bits is still too large.
  if (static_cast<double>(q_tiles) * static_cast<double>(p.batch) * static_cast<double>(p.heads_q) > INT_MAX) {
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
  params.lse_strides = {args.lse.batch_stride, args.lse.head_stride};
  params.alibi_batch_stride = args.alibi_batch_stride;
  params.seq_q = static_cast<int>(p.seq_q);
  params.seq_k = static_cast<int>(p.seq_k);
  params.heads_q = static_cast<unsigned>(p.heads_q);
  params.group = static_cast<unsigned>(p.heads_q / p.heads_kv);
  params.q_tiles = static_cast<unsigned>(q_tiles);
  params.band = {.left = band_of(p.window_left),
                 .right = p.causal ? 0 : band_of(p.window_right),
                 .bottom_right = p.alignment == Alignment::kBottomRight};
  params.scale = p.scale;
  params.softcap = p.softcap;
  const cuda::Grid grid{static_cast<unsigned>(q_tiles * p.batch * p.heads_q), 1, 1};
  return cuda::KernelLaunch<AttentionForwardParams>{select::instance_of(config), params, grid};
}

Status attention_forward(int device, const AttentionArgs& args, const AttentionForwardConfig& config,
                         cuda::CUstream stream) {
  const auto what = forward_launch(args, config);
  if (!what.ok()) return what.status();
  const auto kernel = cuda::load_kernel(device, what->instance);
  if (!kernel.ok()) return kernel.status();
  return cuda::launch(**kernel, *what, stream);
}

}  // namespace tessera
