// Attention backward on a GPU: backward_preprocess.cuh, then backward.cuh and either backward_convert.cuh (dQ summed by
// atomics) or backward_dq.cuh (deterministic), one after the other on a stream.
#pragma once

#include <vector>

#include "cuda/kernel.h"
#include "ops/attention.h"
#include "ops/status.h"
#include "select/kernels.h"

namespace tessera {

// The kernels in the order of their launches. vectors: AttentionProblem's.
std::vector<jit::KernelInstance> backward_kernels(const select::BackwardConfigs& configs, bool vectors);

// Bytes for delta, LSE and dQ's sums; TESSERA_UNSUPPORTED where that is beyond what can be addressed, or one of the
// kernels would need more blocks than a grid has.
Result<std::size_t> backward_workspace(const AttentionProblem& problem, const select::BackwardConfigs& configs);

// kernels: loaded from backward_kernels. workspace: aligned to 256 bytes.
Status enqueue_backward(const std::vector<const cuda::Kernel*>& kernels, const AttentionArgs& args,
                        const select::BackwardConfigs& configs, void* workspace, cuda::CUstream stream);

}  // namespace tessera
