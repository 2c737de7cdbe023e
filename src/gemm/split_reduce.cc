#include "gemm/split_reduce.h"

#include <algorithm>
#include <climits>
#include <vector>

#include "base/format.h"
#include "gemm/gpu.h"
#include "jit/config_text.h"

namespace tessera::gemm {
namespace {

constexpr int kThreads = kReduceThreads;

}  // namespace

GemmSplitReduceConfig reduce_config(const GemmProblem& problem, bool shifted, bool transposed) {
  GemmSplitReduceConfig config = {};
  set_epilogue(problem, config);
  config.shifted = shifted;
  config.transposed = transposed;
  return config;
}

jit::KernelInstance instance_of(const GemmSplitReduceConfig& config) {
  return {.name = format("gemm_split_reduce_{}_{}{}{}{}{}", name_of(config.dtype), name_of(config.out_dtype),
                         config.pairs ? "" : "_v1", config.shifted ? "_shifted" : "",
                         config.transposed ? "_transposed" : "", epilogue_suffix(epilogue_of(config))),
          .header = "gemm/split_reduce.cuh",
          .entry = "gemm_split_reduce",
          .params = "GemmSplitReduceParams",
          .config = jit::config_text("GemmSplitReduceConfig", config),
          .threads = kThreads,
          .min_blocks = 4,
          .dynamic_smem_bytes = 0,
          .pdl = true};
}

Result<cuda::Work<GemmSplitReduceParams>> reduce_work(const GemmArgs& args, const float* partial, std::int64_t stride,
                                                      std::span<const Index> first, bool transposed) {
  const GemmProblem& p = args.problem;
  const std::int64_t across = ceil_div(p.n, transposed ? kReduceTile : 2);
  const std::int64_t blocks = transposed ? saturating_product(across, ceil_div(p.m, kReduceTile))
                                         : ceil_div(saturating_product(across, ceil_div(p.m, 2)), kThreads);
  if (blocks > INT_MAX) return Status(TESSERA_UNSUPPORTED, "gemm_split_reduce: more rows than one grid can cover");
  cuda::Work<GemmSplitReduceParams> work = {};
  work.params.partial = partial;
  work.params.partial_stride = stride;
  std::copy(first.begin(), first.end(), work.params.first);
  work.params.epilogue = epilogue_params(args);
  work.params.m = static_cast<int>(p.m);
  work.params.n = static_cast<int>(p.n);
  work.params.splits = static_cast<unsigned>(first.size());
  work.params.column_pairs = static_cast<unsigned>(across);
  work.grid = {static_cast<unsigned>(blocks), 1, 1};
  return work;
}

Result<cuda::Work<GemmSplitReduceParams>> reduce_work(const GemmArgs& args, const float* partial, int splits) {
  const std::int64_t stride = partial_stride(args.problem);
  std::vector<Index> first(static_cast<std::size_t>(splits));
  for (int i = 0; i < splits; ++i) first[static_cast<std::size_t>(i)] = i * args.problem.m * stride;
  return reduce_work(args, partial, stride, first);
}

double reduce_time(const GemmProblem& problem, int splits) {
  constexpr double kFromL2 = 0.6;  // of the time that memory takes
  return step_time(kFromL2 * static_cast<double>(partial_bytes(problem, splits)));
}

}  // namespace tessera::gemm
