// The backward's preprocess on a GPU (kernels/attention/backward_preprocess.cuh).
#pragma once

#include "contract/backward_preprocess.h"
#include "cuda/kernel.h"
#include "ops/attention.h"
#include "ops/status.h"

namespace tessera {

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
  RowView delta;              // written: sum dO * O - dLSE; 0 where LSE is -inf
  RowView lse_log2;           // written: LSE * log2(e); +inf where LSE is -inf
  void* zeroed = nullptr;     // written: zeros, where there are rows at all; a multiple of 16, as its size
  std::int64_t zeroed_bytes = 0;
};

// Pure: what computes `args` with this Config, whose dtype is the arguments' and whose vectors their rows allow.
Result<cuda::Work<BackwardPreprocessParams>> preprocess_work(const PreprocessArgs& args,
                                                             const BackwardPreprocessConfig& config);
// The same with the Config that suits them best, and its instance.
Result<cuda::KernelLaunch<BackwardPreprocessParams>> preprocess_launch(const PreprocessArgs& args);

// Loads the kernel where this device has not, and enqueues it.
Status backward_preprocess(int device, const PreprocessArgs& args, cuda::CUstream stream);

// Bytes that the kernel must move: what a time is held against.
double preprocess_bytes(const PreprocessArgs& args);

}  // namespace tessera
