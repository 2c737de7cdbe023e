#include "attention/split_combine.h"

#include <algorithm>
#include <climits>

#include "attention/gpu.h"
#include "attention/params.h"
#include "base/arithmetic.h"
#include "base/format.h"
#include "jit/config_text.h"

namespace tessera::attention {
jit::KernelInstance instance_of(const SplitCombineConfig& config) {
  return {.name = format("split_combine_{}_v{}_u{}", name_of(config.dtype), config.vector, config.unroll),
          .header = "attention/split_combine.cuh",
          .entry = "split_combine",
          .params = "SplitCombineParams",
          .config = jit::config_text("SplitCombineConfig", config),
          .threads = config.threads,
          .min_blocks = kMemoryBoundCtas,
          .pdl = true};
}

Result<cuda::KernelLaunch<SplitCombineParams>> combine_launch(const CombineArgs& args, int multiprocessors) {
  if (args.dtype != DType::kFloat16 && args.dtype != DType::kBFloat16) {
    return Status(TESSERA_UNSUPPORTED, format("split_combine writes fp16 and bf16, not {}", name_of(args.dtype)));
  }
  if (args.splits < 1 || args.splits > INT_MAX / 64 || args.batch < 0 || args.seq < 0 || args.heads < 0 ||
      args.heads > INT_MAX || args.head_dim < 1 || args.head_dim > INT_MAX) {
    return Status(TESSERA_INVALID_ARGUMENT, format("split_combine: splits {}, batch {}, seq {}, heads {}, head dim {}",
                                                   args.splits, args.batch, args.seq, args.heads, args.head_dim));
  }
  const bool wide = args.head_dim % 4 == 0 && reinterpret_cast<std::uintptr_t>(args.o_partial) % 16 == 0 &&
                    allows_vectors(args.o, args.batch, args.seq, args.heads, 2, 4);
  SplitCombineConfig config = combine_config(args.dtype, wide ? 4 : 1, 4);
  const std::int64_t rows = saturating_product(args.batch, args.heads, args.seq);
  const std::int64_t vectors = args.head_dim / config.vector;
  const std::int64_t lanes = std::min<std::int64_t>(vectors, config.threads);
  const std::int64_t groups = config.threads / lanes;

  // Few rows cannot fill the device. Then several groups share a row's splits, until there are enough threads.
  std::int64_t rows_per_block = groups;
  const std::int64_t threads_wanted = std::int64_t{multiprocessors} * 2048;
  const auto split_groups = [&] { return std::min(groups / rows_per_block, args.splits); };
  while (rows_per_block > 1 && split_groups() < args.splits &&
         static_cast<double>(rows) * static_cast<double>(vectors * split_groups()) <
             static_cast<double>(threads_wanted)) {
    rows_per_block /= 2;
  }
  if (config.vector == 4 && args.splits > 4 * split_groups()) config.unroll = 8;

  const std::int64_t blocks = ceil_div(rows, rows_per_block);
  const std::int64_t chunks = ceil_div(vectors, lanes);
  if (blocks > INT_MAX || chunks > 65535) {
    return Status(TESSERA_UNSUPPORTED, "split_combine: more rows than one grid can cover");
  }

  SplitCombineParams params = {};
  params.o_partial = args.o_partial;
  params.lse_partial = args.lse_partial;
  params.o = args.o.data;
  params.lse = args.lse.data;
  params.o_strides = strides_of(args.o);
  params.lse_strides = strides_of(args.lse);
  params.rows = rows;
  params.seq = args.seq;
  params.head_dim = args.head_dim;
  params.heads = static_cast<unsigned>(args.heads);
  params.splits = static_cast<unsigned>(args.splits);
  params.lanes_per_row = static_cast<unsigned>(lanes);
  params.split_groups = static_cast<unsigned>(split_groups());
  params.rows_per_block = static_cast<unsigned>(rows_per_block);
  const cuda::Grid grid{static_cast<unsigned>(blocks), static_cast<unsigned>(chunks), 1};
  return cuda::KernelLaunch<SplitCombineParams>{{params, grid}, instance_of(config)};
}

Status split_combine(int device, const CombineArgs& args, cuda::CUstream stream) {
  const auto info = cuda::device(device);
  if (!info.ok()) return info.status();
  const auto what = combine_launch(args, info->multiprocessors);
  if (!what.ok()) return what.status();
  const auto kernel = cuda::load_kernel(device, what->instance);
  if (!kernel.ok()) return kernel.status();
  return cuda::launch(**kernel, *what, stream);
}

double combine_bytes(const CombineArgs& args) {
  const double rows = static_cast<double>(args.batch) * static_cast<double>(args.heads) * static_cast<double>(args.seq);
  const double dim = static_cast<double>(args.head_dim);
  return rows * (static_cast<double>(args.splits) * (4 * dim + 4) + 2 * dim + (args.lse.data != nullptr ? 4 : 0));
}

}  // namespace tessera::attention
