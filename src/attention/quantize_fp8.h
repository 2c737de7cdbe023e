// Activations to e4m3 with scales, as the fp8 forward takes them (kernels/attention/quantize_fp8.cuh).
#pragma once

#include <optional>
#include <string>

#include "attention/problem.h"
#include "attention/quantize_fp8_config.h"
#include "base/status.h"
#include "cuda/kernel.h"
#include "jit/jit.h"
#include "tessera/attention.h"

namespace tessera::attention {

// Checks the arguments, then runs on their device.
Status quantize_fp8(const tessera_quantize_fp8* args, void* stream);

// One tensor of a launch. out and scale: as QuantizedTensor has them.
struct ToQuantize {
  TensorView x;
  TensorView out;
  float* scale = nullptr;
  unsigned* found = nullptr;  // [groups][found_words], zeroed; not with blocks
  unsigned found_words = 2;
  const std::int32_t* cu_seqlens = nullptr;
  std::int64_t pitch = 0;
  std::int64_t batch = 0, seq = 0, heads = 0;
  bool per_batch = true, per_head = true;  // what has a scale of its own
};

// dim_v: 0 for one tensor alone. rows: of a block that has a scale, 0: heads have.
QuantizeFp8Config quantize_config(DType dtype, std::int64_t dim, std::int64_t dim_v, std::int64_t rows = 0);
jit::KernelInstance instance_of(const QuantizeFp8Config& config);

// A step before an fp8 forward: q, k and v are rounded to e4m3 (TESSERA_FP8). Its part of a workspace, in bytes.
struct Rounding {
  bool transposes_v = false;  // for attention_forward_fp8_sm90
  int rows = 0;               // k and v alone, with scales of so many rows: their forward rounds q. 0: scales of heads
  std::size_t found = 0;      // up to `scales`, zeroed before
  std::size_t scales = 0;     // [heads of k, q and v], or [heads of k and v][tiles]
  std::size_t k = 0, q = 0, v = 0;
  std::size_t bytes = 0;
};
Rounding rounding_of(const AttentionProblem& problem, bool transposes_v, int rows = 0);
QuantizeFp8Config rounding_config(const AttentionProblem& problem, bool transposes_v, int rows = 0);
// The problem of the forward: e4m3, with the columns that a rounding adds. One of e4m3 is returned as it is.
AttentionProblem as_e4m3(const AttentionProblem& problem);
// Returns the arguments of the forward; v's strides are not set if it is transposed. kernel: of rounding_config.
// tile_counter: of the forward, which is set to 0; may be null.
Result<AttentionArgs> enqueue_rounding(const AttentionArgs& args, const Rounding& rounding, const cuda::Kernel& kernel,
                                       char* workspace, unsigned* tile_counter, cuda::CUstream stream);

}  // namespace tessera::attention
