// The sum of partial products and their epilogue (kernels/gemm/split_reduce.cuh): the last step of split-K recipes.
#pragma once

#include "cuda/kernel.h"
#include "gemm/problem.h"
#include "gemm/split_reduce_config.h"

namespace tessera::gemm {

GemmSplitReduceConfig reduce_config(const GemmProblem& problem);
jit::KernelInstance instance_of(const GemmSplitReduceConfig& config);

Result<cuda::Work<GemmSplitReduceParams>> reduce_work(const GemmArgs& args, const float* partial, int splits);
double reduce_time(const GemmProblem& problem, int splits);

}  // namespace tessera::gemm
