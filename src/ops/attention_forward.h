// Attention forward on a GPU (kernels/attention/forward.cuh).
#pragma once

#include "contract/attention_forward.h"
#include "cuda/kernel.h"
#include "ops/attention.h"
#include "ops/status.h"

namespace tessera {

// Pure: the launch that computes `args` with this Config. TESSERA_UNSUPPORTED where one grid cannot cover it.
Result<cuda::KernelLaunch<AttentionForwardParams>> forward_launch(const AttentionArgs& args,
                                                                  const AttentionForwardConfig& config);

// kernel: loaded from the Config's instance.
Status enqueue_forward(const cuda::Kernel& kernel, const AttentionArgs& args, const AttentionForwardConfig& config,
                       cuda::CUstream stream);

}  // namespace tessera
