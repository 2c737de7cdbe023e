#include "ops/attention_backward.h"

#include <climits>

#include "ops/attention_params.h"
#include "ops/extents.h"
#include "ops/preprocess.h"

namespace tessera {
namespace {

// Packed sequences are one batch to whatever does not ask where they end.
std::int64_t batches(const AttentionProblem& p) { return p.varlen ? 1 : p.batch; }
std::int64_t rows_per_head(const AttentionProblem& p) { return p.varlen ? p.total_q : p.seq_q; }

// Of dQ's sums, per head. Packed, every sequence starts at a multiple of block_q.
std::int64_t sum_rows(const AttentionProblem& p, int block_q) {
  if (!p.varlen) return ceil_div(p.seq_q, block_q) * block_q;
  return padded_start(p.total_q, p.batch, block_q);
}

// Where things are in the workspace, in bytes.
struct Workspace {
  std::int64_t delta;     // float [B, Hq, Sq]
  std::int64_t lse_log2;  // likewise
  std::int64_t sums;
  std::int64_t sum_bytes;
  std::int64_t bytes;  // beyond all reason where the sizes overflow
};

Workspace workspace_of(const AttentionProblem& p, const select::BackwardConfigs& configs) {
  constexpr std::int64_t kAlignment = 256;
  constexpr auto kFloat = static_cast<std::int64_t>(sizeof(float));
  const auto aligned = [](std::int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; };
  const std::int64_t rows = saturating_product(batches(p), p.heads_q, rows_per_head(p));
  const std::int64_t sums =
      configs.main.adds_dq
          ? saturating_product(saturating_product(batches(p), p.heads_q, sum_rows(p, configs.main.block_q)), p.dim_qk,
                               1)
          : 0;
  if (saturating_product(rows, 4 * kFloat, 1) > LLONG_MAX / 4 || saturating_product(sums, kFloat, 1) > LLONG_MAX / 4) {
    return {0, 0, 0, 0, LLONG_MAX};
  }
  Workspace at = {};
  at.lse_log2 = at.delta + aligned(rows * kFloat);
  at.sums = at.lse_log2 + aligned(rows * kFloat);
  at.sum_bytes = sums * kFloat;
  at.bytes = at.sums + aligned(at.sum_bytes);
  return at;
}

AttentionBackwardParams params_of(const AttentionArgs& args, const RowView& lse_log2, const RowView& delta) {
  AttentionBackwardParams params = {};
  fill_inputs(params, args);
  params.d_o = args.d_o.data;
  params.lse_log2 = lse_log2.data;
  params.delta = delta.data;
  params.dq = args.dq.data;
  params.dk = args.dk.data;
  params.dv = args.dv.data;
  params.d_o_strides = strides_of(args.d_o);
  params.dq_strides = strides_of(args.dq);
  params.dk_strides = strides_of(args.dk);
  params.dv_strides = strides_of(args.dv);
  params.row_strides = strides_of(delta);
  return params;
}

// Blocks of each of the kernels that follow the preprocess: tiles for each head of each sequence.
struct Tiles {
  std::int64_t main;
  std::int64_t convert;
  std::int64_t dq;
};

Tiles tiles_of(const AttentionProblem& p, const select::BackwardConfigs& configs) {
  const std::int64_t convert_warps = ceil_div(p.seq_q, 16) * ceil_div(p.dim_qk / 8, kConvertTiles);
  return {ceil_div(p.seq_k, configs.main.block_k),
          ceil_div(convert_warps, select::convert_config(p.dtype, 8).threads / 32),
          ceil_div(p.seq_q, configs.dq.block_q)};
}

bool fits_a_grid(std::int64_t tiles, const AttentionProblem& p, std::int64_t heads) {
  return saturating_product(tiles, p.batch, heads) <= INT_MAX;
}

// That it fits a grid, backward_workspace has found.
template <class Params>
Status launch_tiles(const cuda::Kernel& kernel, const Params& params, std::int64_t tiles, const AttentionProblem& p,
                    std::int64_t heads, cuda::CUstream stream) {
  const cuda::Grid grid{static_cast<unsigned>(tiles * p.batch * heads), 1, 1};
  return cuda::launch(kernel, cuda::Work<Params>{params, grid}, stream);
}

BackwardConvertParams convert_params(const AttentionArgs& args, const DqSums& sums, int block_q) {
  const AttentionProblem& p = args.problem;
  BackwardConvertParams params = {};
  params.dq_sums = sums;
  params.dq = args.dq.data;
  params.cu_seqlens_q = args.cu_seqlens_q;
  params.dq_strides = strides_of(args.dq);
  params.seq_q = static_cast<int>(p.seq_q);
  params.block_q = block_q;
  params.heads = static_cast<unsigned>(p.heads_q);
  params.chunks = static_cast<unsigned>(p.dim_qk / 8);
  params.scale = p.scale;
  return params;
}

}  // namespace

std::vector<jit::KernelInstance> backward_kernels(const select::BackwardConfigs& configs, bool vectors) {
  const int vector = vectors ? 8 : 1;
  const DType dtype = configs.main.dtype;
  return {select::instance_of(select::preprocess_config(dtype, vector)), select::instance_of(configs.main),
          configs.main.adds_dq ? select::instance_of(select::convert_config(dtype, vector))
                               : select::instance_of(configs.dq)};
}

Result<std::size_t> backward_workspace(const AttentionProblem& problem, const select::BackwardConfigs& configs) {
  const Tiles tiles = tiles_of(problem, configs);
  if (!fits_a_grid(tiles.main, problem, problem.heads_kv) ||
      !fits_a_grid(configs.main.adds_dq ? tiles.convert : tiles.dq, problem, problem.heads_q)) {
    return Status(TESSERA_UNSUPPORTED, "attention_backward: more rows than one grid can cover");
  }
  const std::int64_t bytes = workspace_of(problem, configs).bytes;
  if (bytes == LLONG_MAX) return Status(TESSERA_UNSUPPORTED, "attention_backward: its workspace cannot be addressed");
  return static_cast<std::size_t>(bytes);
}

Status enqueue_backward(const std::vector<const cuda::Kernel*>& kernels, const AttentionArgs& args,
                        const select::BackwardConfigs& configs, void* workspace, cuda::CUstream stream) {
  const AttentionProblem& p = args.problem;
  const Workspace at = workspace_of(p, configs);
  const auto place = [&](std::int64_t offset) {
    return reinterpret_cast<float*>(static_cast<char*>(workspace) + offset);
  };
  const std::int64_t rows = rows_per_head(p);
  const RowView delta{place(at.delta), p.varlen ? 0 : p.heads_q * rows, rows};
  const RowView lse_log2{place(at.lse_log2), delta.batch_stride, delta.head_stride};

  PreprocessArgs preprocess;
  preprocess.dtype = p.dtype;
  preprocess.batch = batches(p);
  preprocess.seq = rows;
  preprocess.heads = p.heads_q;
  preprocess.head_dim = p.dim_v;
  preprocess.o = args.o;
  preprocess.d_o = args.d_o;
  preprocess.lse = args.lse;
  preprocess.d_lse = args.d_lse;
  preprocess.delta = delta;
  preprocess.lse_log2 = lse_log2;
  const auto first = preprocess_work(preprocess, select::preprocess_config(p.dtype, p.vectors ? 8 : 1));
  if (!first.ok()) return first.status();
  if (Status s = cuda::launch(*kernels[0], *first, stream); !s.ok()) return s;

  AttentionBackwardParams params = params_of(args, lse_log2, delta);
  params.dq_sums = {place(at.sums), sum_rows(p, configs.main.block_q)};
  if (configs.main.adds_dq) {
    if (Status s = cuda::zero(kernels[1]->device, params.dq_sums.data, at.sum_bytes, stream); !s.ok()) return s;
  }
  const Tiles tiles = tiles_of(p, configs);
  params.tiles = static_cast<unsigned>(tiles.main);
  if (Status s = launch_tiles(*kernels[1], params, tiles.main, p, p.heads_kv, stream); !s.ok()) return s;
  if (configs.main.adds_dq) {
    BackwardConvertParams convert = convert_params(args, params.dq_sums, configs.main.block_q);
    convert.blocks = static_cast<unsigned>(tiles.convert);
    return launch_tiles(*kernels[2], convert, tiles.convert, p, p.heads_q, stream);
  }
  params.tiles = static_cast<unsigned>(tiles.dq);
  return launch_tiles(*kernels[2], params, tiles.dq, p, p.heads_q, stream);
}

}  // namespace tessera
