// The sum of partial products and their epilogue (kernels/gemm/split_reduce.cuh): the last step of split-K recipes.
#pragma once

#include <span>

#include "cuda/kernel.h"
#include "gemm/problem.h"
#include "gemm/split_reduce_config.h"

namespace tessera::gemm {

// shifted: columns of partial results begin anywhere. transposed: they are of the transposed product.
GemmSplitReduceConfig reduce_config(const GemmProblem& problem, bool shifted, bool transposed = false);
jit::KernelInstance instance_of(const GemmSplitReduceConfig& config);

// first: where out begins in each partial result, in elements from `partial` on; rows are `stride` apart.
Result<cuda::Work<GemmSplitReduceParams>> reduce_work(const GemmArgs& args, const float* partial, std::int64_t stride,
                                                      std::span<const Index> first, bool transposed = false);
// Of [splits, M, partial_stride].
Result<cuda::Work<GemmSplitReduceParams>> reduce_work(const GemmArgs& args, const float* partial, int splits);
double reduce_time(const GemmProblem& problem, int splits);

}  // namespace tessera::gemm
