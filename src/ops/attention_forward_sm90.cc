#include "ops/attention_forward_sm90.h"

#include <algorithm>
#include <climits>

#include "ops/attention_params.h"
#include "ops/extents.h"

namespace tessera {
namespace {

Status encode_all(const PanelBoxes& boxes, PanelMaps& maps) {
  for (const cuda::TensorBox& box : boxes) {
    const auto map = cuda::encode(box);
    if (!map.ok()) return map.status();
    maps.by_width[map_index(static_cast<int>(box.columns))] = *map;
  }
  return {};
}

}  // namespace

Result<ForwardSm90Boxes> forward_sm90_boxes(const AttentionArgs& args, const AttentionForwardSm90Config& config) {
  const AttentionProblem& p = args.problem;
  const std::int64_t joined = config.joined ? p.heads_q / p.heads_kv : 0;
  Result<ForwardSm90Boxes> boxes(std::in_place);
  Status s =
      panel_boxes(args.q, query_extents(p, p.dim_qk), block_q_of(config), config.narrowest_panel, boxes->q, joined);
  if (s.ok()) s = panel_boxes(args.k, key_extents(p, p.dim_qk), config.block_k, config.narrowest_panel, boxes->k);
  if (s.ok()) s = panel_boxes(args.v, key_extents(p, p.dim_v), config.block_k, config.narrowest_panel, boxes->v);
  if (!s.ok()) boxes = std::move(s);
  return boxes;
}

Result<cuda::Work<AttentionForwardSm90Params>> forward_sm90_work(const AttentionArgs& args,
                                                                 const AttentionForwardSm90Config& config,
                                                                 int multiprocessors) {
  Result<cuda::Work<AttentionForwardSm90Params>> work(std::in_place);
  const AttentionProblem& p = args.problem;
  const std::int64_t heads_a_key = p.heads_q / p.heads_kv;
  const std::int64_t heads = config.joined ? p.heads_kv : p.heads_q;
  const std::int64_t group = config.joined ? 1 : heads_a_key;  // columns that share keys
  const std::int64_t q_tiles = ceil_div(p.seq_q * (config.joined ? heads_a_key : 1), block_q_of(config));
  const std::int64_t columns = p.batch * heads;
  const std::int64_t tiles = saturating_product(q_tiles, p.batch, heads);
  if (tiles > INT_MAX) {
    work = Status(TESSERA_UNSUPPORTED, "attention_forward_sm90: more rows than one grid can cover");
    return work;
  }
  const std::int64_t head_bytes = saturating_product(p.seq_k, p.dim_qk + p.dim_v, 2);
  AttentionForwardSm90Params& params = work->params;
  fill_problem(params, args);
  fill_outputs(params, args);
  params.q_tiles = static_cast<unsigned>(q_tiles);
  params.columns = static_cast<unsigned>(columns);
  params.together = divisor(columns_together(columns, head_bytes, group));
  params.by_heads = divisor(static_cast<unsigned>(heads));
  params.by_group = divisor(params.group);
  const auto blocks =
      static_cast<unsigned>(std::min<std::int64_t>(tiles, std::int64_t{multiprocessors} * config.blocks));
  work->grid = {blocks, 1, 1};
  return work;
}

bool can_join_heads(const AttentionProblem& problem, const AttentionForwardSm90Config& config) {
  const std::int64_t group = problem.heads_q / problem.heads_kv;
  return group > 1 && block_q_of(config) % group == 0 && !config.general &&
         saturating_product(problem.seq_q, group, 1) <= INT_MAX - block_q_of(config);
}

std::size_t forward_sm90_workspace(const AttentionForwardSm90Config& config) {
  return config.tickets ? sizeof(unsigned) : 0;
}

Status enqueue_forward_sm90(const cuda::Kernel& kernel, const AttentionArgs& args,
                            const AttentionForwardSm90Config& config, void* workspace, cuda::CUstream stream) {
  auto what = forward_sm90_work(args, config, kernel.multiprocessors);
  if (!what.ok()) return what.status();
  if (args.problem.batch == 0 || args.problem.seq_q == 0) return {};
  const auto boxes = forward_sm90_boxes(args, config);
  if (!boxes.ok()) return boxes.status();
  // The driver makes tensor maps only where a context is current.
  const auto scope = cuda::ContextScope::enter(kernel.device);
  if (!scope.ok()) return scope.status();
  if (Status s = encode_all(boxes->q, what->params.q); !s.ok()) return s;
  if (Status s = encode_all(boxes->k, what->params.k); !s.ok()) return s;
  if (Status s = encode_all(boxes->v, what->params.v); !s.ok()) return s;
  if (config.tickets) {
    what->params.ticket = static_cast<unsigned*>(workspace);
    if (Status s = cuda::zero(kernel.device, workspace, sizeof(unsigned), stream); !s.ok()) return s;
  }
  return cuda::launch(kernel, *what, stream);
}

}  // namespace tessera
