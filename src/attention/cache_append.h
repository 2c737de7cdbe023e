// The step before a forward kernel that serves decode with new keys (kernels/attention/cache_append.cuh).
#pragma once

#include <cstddef>

#include "attention/cache_append_config.h"
#include "attention/problem.h"
#include "base/status.h"
#include "cuda/kernel.h"
#include "jit/jit.h"

namespace tessera::attention {

constexpr CacheAppendConfig append_config(DType dtype, int vector) {
  return {.dtype = dtype, .vector = vector, .threads = 256};
}
jit::KernelInstance instance_of(const CacheAppendConfig& config);

// Bytes for the lengths after the append and the rotated queries; 0 if there are no new keys.
std::size_t append_workspace(const AttentionProblem& problem);

// Enqueues the step. `args` becomes what follows it: the problem without new keys.
Status enqueue_append(const cuda::Kernel& kernel, AttentionArgs& args, void* workspace, cuda::CUstream stream);

}  // namespace tessera::attention
