#include "gemm/split_reduce.h"

#include <climits>

#include "base/format.h"
#include "gemm/gpu.h"
#include "jit/config_text.h"

namespace tessera::gemm {
namespace {

constexpr int kThreads = 256;

}  // namespace

GemmSplitReduceConfig reduce_config(const GemmProblem& problem) {
  GemmSplitReduceConfig config = {};
  set_epilogue(problem, config);
  return config;
}

jit::KernelInstance instance_of(const GemmSplitReduceConfig& config) {
  return {.name = format("gemm_split_reduce_{}_{}{}{}", name_of(config.dtype), name_of(config.out_dtype),
                         config.pairs ? "" : "_v1", epilogue_suffix(epilogue_of(config))),
          .header = "gemm/split_reduce.cuh",
          .entry = "gemm_split_reduce",
          .params = "GemmSplitReduceParams",
          .config = jit::config_text("GemmSplitReduceConfig", config),
          .threads = kThreads,
          .min_blocks = 4,
          .dynamic_smem_bytes = 0,
          .pdl = true};
}

Result<cuda::Work<GemmSplitReduceParams>> reduce_work(const GemmArgs& args, const float* partial, int splits) {
  const GemmProblem& p = args.problem;
  const std::int64_t pairs = ceil_div(p.n, 2);
  const std::int64_t blocks = ceil_div(saturating_product(pairs, ceil_div(p.m, 2)), kThreads);
  if (blocks > INT_MAX) return Status(TESSERA_UNSUPPORTED, "gemm_split_reduce: more rows than one grid can cover");
  cuda::Work<GemmSplitReduceParams> work = {};
  work.params.partial = partial;
  work.params.partial_stride = partial_stride(p);
  work.params.epilogue = epilogue_params(args);
  work.params.m = static_cast<int>(p.m);
  work.params.n = static_cast<int>(p.n);
  work.params.splits = static_cast<unsigned>(splits);
  work.params.column_pairs = static_cast<unsigned>(pairs);
  work.grid = {static_cast<unsigned>(blocks), 1, 1};
  return work;
}

double reduce_time(const GemmProblem& problem, int splits) {
  return step_time(static_cast<double>(partial_bytes(problem, splits)));
}

}  // namespace tessera::gemm
