// The step before every backward on a GPU (kernels/attention/backward_preprocess.cuh).
#pragma once

#include "attention/backward_preprocess_config.h"
#include "attention/problem.h"
#include "base/status.h"
#include "cuda/kernel.h"

namespace tessera::attention {

// Packed variable length: batch = 1 and seq = total_q, since no row needs to know its sequence.
struct PreprocessArgs {
  DType dtype = DType::kFloat16;  // fp16 or bf16
  std::int64_t batch = 0;
  std::int64_t seq = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;  // of V
  TensorView o, d_o;          // read
  RowView lse;                // read, natural log
  RowView d_lse;              // read, may be null
  RowView delta;              // written: sum dO * O - dLSE; 0 if LSE is -inf
  RowView lse_log2;           // written: LSE * log2(e); +inf if LSE is -inf
  void* zeroed = nullptr;     // written: zeros, if there are any rows; address and size are multiples of 16
  std::int64_t zeroed_bytes = 0;
};

constexpr BackwardPreprocessConfig preprocess_config(DType dtype, int vector) {
  return {.dtype = dtype, .vector = vector, .unroll = 4, .threads = 256};
}
jit::KernelInstance instance_of(const BackwardPreprocessConfig& config);

// Pure: what computes `args` with this Config, whose dtype is the arguments' and whose vectors their rows allow.
Result<cuda::Work<BackwardPreprocessParams>> preprocess_work(const PreprocessArgs& args,
                                                             const BackwardPreprocessConfig& config);
// The same with the best Config for them, and its instance.
Result<cuda::KernelLaunch<BackwardPreprocessParams>> preprocess_launch(const PreprocessArgs& args);

// Loads the kernel if it is not loaded on this device yet, and enqueues it.
Status backward_preprocess(int device, const PreprocessArgs& args, cuda::CUstream stream);

// Bytes that the kernel must move, for bandwidth.
double preprocess_bytes(const PreprocessArgs& args);

}  // namespace tessera::attention
