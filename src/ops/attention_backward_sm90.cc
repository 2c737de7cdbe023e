#include "ops/attention_backward_sm90.h"

#include <algorithm>
#include <climits>

#include "ops/attention_params.h"
#include "ops/backward_steps.h"
#include "ops/extents.h"
#include "select/kernels.h"

namespace tessera {
namespace {

// All panels of this kernel are of one width.
Status encode_one(const PanelBoxes& boxes, TensorMap& map) {
  const auto made = cuda::encode(boxes.box[0]);
  if (!made.ok()) return made.status();
  map = *made;
  return {};
}

}  // namespace

Result<BackwardSm90Boxes> backward_sm90_boxes(const AttentionArgs& args, const AttentionBackwardSm90Config& config) {
  const AttentionProblem& p = args.problem;
  Result<BackwardSm90Boxes> boxes(std::in_place);
  Status s = panel_boxes(args.q, query_extents(p, p.dim_qk), config.block_q, kWidestPanel, boxes->q);
  if (s.ok()) s = panel_boxes(args.d_o, query_extents(p, p.dim_v), config.block_q, kWidestPanel, boxes->d_o);
  if (s.ok()) s = panel_boxes(args.k, key_extents(p, p.dim_qk), block_k_of(config), kWidestPanel, boxes->k);
  if (s.ok()) s = panel_boxes(args.v, key_extents(p, p.dim_v), block_k_of(config), kWidestPanel, boxes->v);
  if (!s.ok()) boxes = std::move(s);
  return boxes;
}

Result<cuda::Work<AttentionBackwardSm90Params>> backward_sm90_work(const AttentionArgs& args,
                                                                   const AttentionBackwardSm90Config& config) {
  const AttentionProblem& p = args.problem;
  const std::int64_t k_tiles = ceil_div(p.seq_k, block_k_of(config));
  if (!fits_a_grid(k_tiles, p, p.heads_kv)) {
    return Status(TESSERA_UNSUPPORTED, "attention_backward_sm90: more rows than one grid can cover");
  }
  AttentionBackwardSm90Params params = {};
  params.dk = args.dk.data;
  params.dv = args.dv.data;
  params.cu_seqlens_q = args.cu_seqlens_q;
  params.cu_seqlens_k = args.cu_seqlens_k;
  params.dk_strides = strides_of(args.dk);
  params.dv_strides = strides_of(args.dv);
  params.seq_q = static_cast<int>(p.seq_q);
  params.seq_k = static_cast<int>(p.seq_k);
  params.heads_q = static_cast<unsigned>(p.heads_q);
  params.group = static_cast<unsigned>(p.heads_q / p.heads_kv);
  params.k_tiles = static_cast<unsigned>(k_tiles);
  params.band = band_of(p);
  params.scale = p.scale;
  const std::int64_t columns = p.batch * p.heads_kv;
  // Q and dO, of 16 bits, and dQ's sums, of 32.
  const std::int64_t head_bytes = saturating_product(p.seq_q, params.group, 6 * p.dim_qk + 2 * p.dim_v);
  params.columns = static_cast<unsigned>(columns);
  params.together = divisor(columns_together(columns, head_bytes));
  params.by_heads = divisor(static_cast<unsigned>(p.heads_kv));
  return cuda::Work<AttentionBackwardSm90Params>{params, {static_cast<unsigned>(k_tiles * columns), 1, 1}};
}

std::vector<jit::KernelInstance> backward_sm90_kernels(const AttentionBackwardSm90Config& config) {
  return {select::instance_of(select::preprocess_config(config.dtype, 8)), select::instance_of(config),
          select::instance_of(select::convert_config(config.dtype, 8))};
}

Result<std::size_t> backward_sm90_workspace(const AttentionProblem& problem,
                                            const AttentionBackwardSm90Config& config) {
  if (!fits_a_grid(ceil_div(problem.seq_k, block_k_of(config)), problem, problem.heads_kv) ||
      !fits_a_grid(convert_tiles(problem), problem, problem.heads_q)) {
    return Status(TESSERA_UNSUPPORTED, "attention_backward_sm90: more rows than one grid can cover");
  }
  const std::int64_t bytes = backward_bytes(problem, config.block_q);
  if (bytes == LLONG_MAX) {
    return Status(TESSERA_UNSUPPORTED, "attention_backward_sm90: its workspace cannot be addressed");
  }
  return static_cast<std::size_t>(bytes);
}

Status enqueue_backward_sm90(const std::vector<const cuda::Kernel*>& kernels, const AttentionArgs& args,
                             const AttentionBackwardSm90Config& config, void* workspace, cuda::CUstream stream) {
  auto work = backward_sm90_work(args, config);
  if (!work.ok()) return work.status();
  const auto boxes = backward_sm90_boxes(args, config);
  if (!boxes.ok()) return boxes.status();
  const BackwardBuffers buffers = backward_buffers(args.problem, config.block_q, workspace);
  AttentionBackwardSm90Params& params = work->params;
  params.lse_log2 = buffers.lse_log2.data;
  params.delta = buffers.delta.data;
  params.row_strides = strides_of(buffers.delta);
  params.dq_sums = buffers.sums;
  {
    // The driver makes tensor maps only where a context is current.
    const auto scope = cuda::ContextScope::enter(kernels[1]->device);
    if (!scope.ok()) return scope.status();
    if (Status s = encode_one(boxes->q, params.q); !s.ok()) return s;
    if (Status s = encode_one(boxes->d_o, params.d_o); !s.ok()) return s;
    if (Status s = encode_one(boxes->k, params.k); !s.ok()) return s;
    if (Status s = encode_one(boxes->v, params.v); !s.ok()) return s;
  }
  if (Status s = enqueue_preprocess(*kernels[0], args, buffers, stream); !s.ok()) return s;
  if (Status s = cuda::launch(*kernels[1], *work, stream); !s.ok()) return s;
  return enqueue_convert(*kernels[2], args, buffers.sums, config.block_q, stream);
}

}  // namespace tessera
