#include "ops/attention_forward.h"

#include <climits>

#include "ops/attention_params.h"
#include "ops/extents.h"

namespace tessera {

Result<cuda::Work<AttentionForwardParams>> forward_work(const AttentionArgs& args,
                                                        const AttentionForwardConfig& config) {
  const AttentionProblem& p = args.problem;
  const std::int64_t q_tiles = ceil_div(p.seq_q, config.block_q);
  if (saturating_product(q_tiles, p.batch, p.heads_q) > INT_MAX) {
    return Status(TESSERA_UNSUPPORTED, "attention_forward: more rows than one grid can cover");
  }
  AttentionForwardParams params = {};
  fill_inputs(params, args);
  fill_outputs(params, args);
  params.q_tiles = static_cast<unsigned>(q_tiles);
  const cuda::Grid grid{static_cast<unsigned>(q_tiles * p.batch * p.heads_q), 1, 1};
  return cuda::Work<AttentionForwardParams>{params, grid};
}

Status enqueue_forward(const cuda::Kernel& kernel, const AttentionArgs& args, const AttentionForwardConfig& config,
                       cuda::CUstream stream) {
  const auto work = forward_work(args, config);
  return work.ok() ? cuda::launch(kernel, *work, stream) : work.status();
}

}  // namespace tessera
