// Cross-entropy of rows of logits, and the sum over rows: steps of recipes (kernels/loss/cross_entropy.cuh and
// reduce_rows.cuh), and the same on the CPU.
#pragma once

#include <vector>

#include "cuda/kernel.h"
#include "engine/device.h"
#include "loss/cross_entropy_config.h"
#include "loss/problem.h"

namespace tessera::loss {

// Rows of logits in the workspace, replaced by their gradient if that is wanted.
struct LogitRows {
  void* data;
  std::int64_t row_stride;  // elements; rows start at multiples of 16 bytes
  std::int64_t first, count;
};

// One CTA per multiprocessor, with most of its shared memory, if a row has more than a half of that.
LossCrossEntropyConfig cross_entropy_config(const LossProblem& problem, const engine::Device& device);
jit::KernelInstance instance_of(const LossCrossEntropyConfig& config);
jit::KernelInstance reduce_rows_instance();
std::vector<jit::KernelInstance> cross_entropy_instances(const engine::Device& device);  // for the gate

// losses: [rows] of the whole problem.
Result<cuda::Work<LossCrossEntropyParams>> cross_entropy_work(const LossArgs& args, const LogitRows& rows,
                                                              float* losses);
cuda::Work<LossReduceRowsParams> reduce_rows_work(const LossArgs& args, const float* losses);

double cross_entropy_time(const LossProblem& problem, std::int64_t rows);  // microseconds

namespace cpu_backend {

void cross_entropy(const LossArgs& args, const LogitRows& rows, float* losses, int threads);
void reduce_rows(const LossArgs& args, const float* losses);

}  // namespace cpu_backend
}  // namespace tessera::loss
