// Attention forward on Hopper (kernels/attention/forward_sm90.cuh).
#pragma once

#include "contract/attention_forward_sm90.h"
#include "cuda/kernel.h"
#include "ops/attention.h"
#include "ops/panel_boxes.h"
#include "ops/status.h"

namespace tessera {

// Q, K and V as the copy engine is to see them.
struct ForwardSm90Boxes {
  PanelBoxes q, k, v;
};

// Pure, as is the work; its tensor maps are yet to be made from the boxes. TESSERA_UNSUPPORTED where one grid cannot
// cover the problem.
Result<ForwardSm90Boxes> forward_sm90_boxes(const AttentionArgs& args, const AttentionForwardSm90Config& config);
Result<cuda::Work<AttentionForwardSm90Params>> forward_sm90_work(const AttentionArgs& args,
                                                                 const AttentionForwardSm90Config& config,
                                                                 int multiprocessors);

// Whether the query heads of a key head can be the rows of the Config's tiles.
bool can_join_heads(const AttentionProblem& problem, const AttentionForwardSm90Config& config);

std::size_t forward_sm90_workspace(const AttentionForwardSm90Config& config);

// kernel: loaded from the Config's instance.
Status enqueue_forward_sm90(const cuda::Kernel& kernel, const AttentionArgs& args,
                            const AttentionForwardSm90Config& config, void* workspace, cuda::CUstream stream);

}  // namespace tessera
