#include "attention/backward_preprocess.h"

#include <algorithm>
#include <climits>

#include "attention/gpu.h"
#include "attention/params.h"
#include "base/arithmetic.h"
#include "base/format.h"
#include "jit/config_text.h"

namespace tessera::attention {
jit::KernelInstance instance_of(const BackwardPreprocessConfig& config) {
  return {.name = format("backward_preprocess_{}_v{}", name_of(config.dtype), config.vector),
          .header = "attention/backward_preprocess.cuh",
          .entry = "backward_preprocess",
          .params = "BackwardPreprocessParams",
          .config = jit::config_text("BackwardPreprocessConfig", config),
          .threads = config.threads,
          .min_blocks = kMemoryBoundCtas,
          .pdl = true};
}

Result<cuda::KernelLaunch<BackwardPreprocessParams>> preprocess_launch(const PreprocessArgs& args) {
  const bool wide = args.head_dim % 8 == 0 && allows_vectors(args.o, args.batch, args.seq, args.heads, 2, 8) &&
                    allows_vectors(args.d_o, args.batch, args.seq, args.heads, 2, 8);
  const BackwardPreprocessConfig config = preprocess_config(args.dtype, wide ? 8 : 1);
  const auto work = preprocess_work(args, config);
  if (!work.ok()) return work.status();
  return cuda::KernelLaunch<BackwardPreprocessParams>{*work, instance_of(config)};
}

Result<cuda::Work<BackwardPreprocessParams>> preprocess_work(const PreprocessArgs& args,
                                                             const BackwardPreprocessConfig& config) {
  if (args.dtype != DType::kFloat16 && args.dtype != DType::kBFloat16) {
    return Status(TESSERA_UNSUPPORTED, format("backward_preprocess takes fp16 and bf16, not {}", name_of(args.dtype)));
  }
  if (args.batch < 0 || args.seq < 0 || args.heads < 0 || args.head_dim < 1 || args.head_dim > INT_MAX) {
    return Status(TESSERA_INVALID_ARGUMENT, format("backward_preprocess: batch {}, seq {}, heads {}, head dim {}",
                                                   args.batch, args.seq, args.heads, args.head_dim));
  }
  const std::int64_t vectors = args.head_dim / config.vector;
  const int lanes = static_cast<int>(std::min<std::int64_t>(vectors, 32));
  const std::int64_t rows = preprocess_rows_per_block(config, lanes);
  const std::int64_t tiles = ceil_div(args.seq, rows);
  const std::int64_t blocks = saturating_product(tiles, args.batch, args.heads);
  if (blocks > INT_MAX) {
    return Status(TESSERA_UNSUPPORTED, "backward_preprocess: more rows than one grid can cover");
  }

  BackwardPreprocessParams params = {};
  params.o = args.o.data;
  params.d_o = args.d_o.data;
  params.lse = args.lse.data;
  params.d_lse = args.d_lse.data;
  params.delta = args.delta.data;
  params.lse_log2 = args.lse_log2.data;
  params.o_strides = strides_of(args.o);
  params.d_o_strides = strides_of(args.d_o);
  params.lse_strides = strides_of(args.lse);
  params.d_lse_strides = strides_of(args.d_lse);
  params.delta_strides = strides_of(args.delta);
  params.lse_log2_strides = strides_of(args.lse_log2);
  params.zeroed = args.zeroed;
  params.zeroed_words = args.zeroed_bytes / 16;
  params.zeroed_a_block = ceil_div(params.zeroed_words, std::max<std::int64_t>(blocks, 1));
  params.seq = args.seq;
  params.heads = static_cast<unsigned>(args.heads);
  params.seq_tiles = static_cast<unsigned>(tiles);
  params.vectors = static_cast<unsigned>(vectors);
  params.lanes_per_row = static_cast<unsigned>(lanes);
  const cuda::Grid grid{static_cast<unsigned>(blocks), 1, 1};
  return cuda::Work<BackwardPreprocessParams>{params, grid};
}

Status backward_preprocess(int device, const PreprocessArgs& args, cuda::CUstream stream) {
  const auto what = preprocess_launch(args);
  if (!what.ok()) return what.status();
  const auto kernel = cuda::load_kernel(device, what->instance);
  if (!kernel.ok()) return kernel.status();
  return cuda::launch(**kernel, *what, stream);
}

double preprocess_bytes(const PreprocessArgs& args) {
  const double rows = static_cast<double>(args.batch) * static_cast<double>(args.heads) * static_cast<double>(args.seq);
  return rows * (4.0 * static_cast<double>(args.head_dim) + (args.d_lse.data != nullptr ? 16 : 12));
}

}  // namespace tessera::attention
