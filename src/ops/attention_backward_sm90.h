// Attention backward on Hopper (kernels/attention/backward_sm90.cuh), dQ summed by atomics: backward_preprocess.cuh,
// the kernel, backward_convert.cuh, one after the other on a stream.
#pragma once

#include <vector>

#include "contract/attention_backward_sm90.h"
#include "cuda/kernel.h"
#include "jit/jit.h"
#include "ops/attention.h"
#include "ops/panel_boxes.h"
#include "ops/status.h"

namespace tessera {

struct BackwardSm90Boxes {
  PanelBoxes q, d_o, k, v;
};

// Pure, as is the work; its tensor maps are yet to be made from the boxes, and its buffers to be named.
Result<BackwardSm90Boxes> backward_sm90_boxes(const AttentionArgs& args, const AttentionBackwardSm90Config& config);
Result<cuda::Work<AttentionBackwardSm90Params>> backward_sm90_work(const AttentionArgs& args,
                                                                   const AttentionBackwardSm90Config& config);

// The kernels in the order of their launches.
std::vector<jit::KernelInstance> backward_sm90_kernels(const AttentionBackwardSm90Config& config);

// Bytes for delta, LSE and dQ's sums; TESSERA_UNSUPPORTED where that is beyond what can be addressed, or one of the
// kernels would need more blocks than a grid has.
Result<std::size_t> backward_sm90_workspace(const AttentionProblem& problem, const AttentionBackwardSm90Config& config);

// kernels: loaded from backward_sm90_kernels. workspace: aligned to 256 bytes.
Status enqueue_backward_sm90(const std::vector<const cuda::Kernel*>& kernels, const AttentionArgs& args,
                             const AttentionBackwardSm90Config& config, void* workspace, cuda::CUstream stream);

}  // namespace tessera
