// The step before the fp8 forward: V transposed (kernels/attention/value_transpose_sm90.cuh).
#pragma once

#include <cstddef>

#include "attention/problem.h"
#include "attention/value_transpose_config.h"
#include "base/status.h"
#include "cuda/kernel.h"

namespace tessera::attention {

constexpr ValueTransposeConfig kValueTranspose = {.keys = 128, .columns = 128, .threads = 256};
jit::KernelInstance instance_of(const ValueTransposeConfig& config);

// Keys of a row of the transposed V, and its size. Packed, every sequence starts at a multiple of kValueGroup keys.
std::int64_t transposed_pitch(const AttentionProblem& problem);
std::size_t transposed_bytes(const AttentionProblem& problem);

// out: transposed_bytes, a multiple of 16.
Status enqueue_transpose(const cuda::Kernel& kernel, const AttentionArgs& args, void* out, cuda::CUstream stream);

}  // namespace tessera::attention
