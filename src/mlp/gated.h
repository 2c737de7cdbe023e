// What is between the layers of a gated MLP, element by element: a step of its recipes (kernels/mlp/gated.cuh), and the same
// on the CPU.
#pragma once

#include "cuda/kernel.h"
#include "mlp/gated_config.h"
#include "mlp/problem.h"

namespace tessera::mlp {

MlpGatedConfig gated_config(const MlpProblem& problem, bool vector);
jit::KernelInstance instance_of(const MlpGatedConfig& config);

// args: with those tensors that are in the workspace; hidden's data may be null in the backward.
Result<cuda::Work<MlpGatedParams>> gated_work(const MlpArgs& args, const MlpGatedConfig& config);
void run_gated(const MlpArgs& args, int threads);

double gated_time(const MlpProblem& problem);  // microseconds

}  // namespace tessera::mlp
