// The step after a backward that sums dQ in fp32, or dK and dV, too: rounds the sums
// (kernels/attention/backward_convert.cuh).
#pragma once

#include <cstdint>

#include "attention/backward_convert_config.h"
#include "attention/problem.h"
#include "base/status.h"
#include "cuda/kernel.h"

namespace tessera::attention {

constexpr BackwardConvertConfig convert_config(DType dtype, int vector) {
  return {.dtype = dtype, .vector = vector, .threads = 256};
}
jit::KernelInstance instance_of(const BackwardConvertConfig& config);

// CTAs for each head of each sequence: of dQ; of dK or dV, whichever has more.
std::int64_t convert_tiles(const AttentionProblem& problem);
std::int64_t convert_key_tiles(const AttentionProblem& problem);

// block_q, block_k: of the kernel that computed the sums.
Status enqueue_convert(const cuda::Kernel& kernel, const AttentionArgs& args, const DqSums& sums, int block_q,
                       cuda::CUstream stream);
Status enqueue_convert_keys(const cuda::Kernel& kernel, const AttentionArgs& args, const DqSums& dk_sums,
                            const DqSums& dv_sums, int block_k, cuda::CUstream stream);

}  // namespace tessera::attention
