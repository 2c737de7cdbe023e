// The step that combines split-KV partial results on a GPU (kernels/attention/split_combine.cuh).
#pragma once

#include "attention/problem.h"
#include "attention/split_combine_config.h"
#include "base/status.h"
#include "cuda/kernel.h"

namespace tessera::attention {

// Packed variable length: batch = 1 and seq = total_q.
struct CombineArgs {
  DType dtype = DType::kFloat16;  // of o: fp16 or bf16
  std::int64_t splits = 0;        // at least 1
  std::int64_t batch = 0;
  std::int64_t seq = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;         // of V
  const float* o_partial = nullptr;  // [splits, B, Hq, Sq, Dv], contiguous
  const float* lse_partial =
      nullptr;   // [splits, B, Hq, Sq], contiguous; -inf: that split saw no key, its o is not read
  TensorView o;  // written
  RowView lse;   // written, may be null
};

constexpr SplitCombineConfig combine_config(DType dtype, int vector, int unroll) {
  return {.dtype = dtype, .vector = vector, .unroll = unroll, .threads = 256};
}
jit::KernelInstance instance_of(const SplitCombineConfig& config);

// Pure: which instance, with which arguments. multiprocessors: of the device it will run on.
Result<cuda::KernelLaunch<SplitCombineParams>> combine_launch(const CombineArgs& args, int multiprocessors);

// Loads the kernel if it is not loaded on this device yet, and enqueues it.
Status split_combine(int device, const CombineArgs& args, cuda::CUstream stream);

// Bytes that the kernel must move, for bandwidth.
double combine_bytes(const CombineArgs& args);

}  // namespace tessera::attention
