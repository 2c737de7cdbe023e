#include "ops/attention_backward.h"

#include <climits>

#include "ops/band.h"
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
  const AttentionProblem& p = args.problem;
  AttentionBackwardParams params = {};
  params.q = args.q.data;
  params.k = args.k.data;
  params.v = args.v.data;
  params.d_o = args.d_o.data;
  params.lse_log2 = lse_log2.data;
  params.delta = delta.data;
  params.dq = args.dq.data;
  params.dk = args.dk.data;
  params.dv = args.dv.data;
  params.cu_seqlens_q = args.cu_seqlens_q;
  params.cu_seqlens_k = args.cu_seqlens_k;
  params.alibi_slopes = args.alibi_slopes;
  params.q_strides = strides_of(args.q);
  params.k_strides = strides_of(args.k);
  params.v_strides = strides_of(args.v);
  params.d_o_strides = strides_of(args.d_o);
  params.dq_strides = strides_of(args.dq);
  params.dk_strides = strides_of(args.dk);
  params.dv_strides = strides_of(args.dv);
  params.row_strides = strides_of(delta);
  params.alibi_batch_stride = args.alibi_batch_stride;
  params.seq_q = static_cast<int>(p.seq_q);
  params.seq_k = static_cast<int>(p.seq_k);
  params.heads_q = static_cast<unsigned>(p.heads_q);
  params.group = static_cast<unsigned>(p.heads_q / p.heads_kv);
  params.band = band_of(p);
  params.scale = p.scale;
  params.softcap = p.softcap;
  return params;
}

// `tiles` for each of `heads` heads of a batch, one block each.
Status launch_tiles(const cuda::Kernel& kernel, AttentionBackwardParams params, std::int64_t tiles, std::int64_t batch,
                    std::int64_t heads, cuda::CUstream stream) {
  const std::int64_t blocks = saturating_product(tiles, batch, heads);
  if (blocks > INT_MAX) return {TESSERA_UNSUPPORTED, "attention_backward: more rows than one grid can cover"};
  if (blocks == 0) return {};
  params.tiles = static_cast<unsigned>(tiles);
  return cuda::launch(kernel, {static_cast<unsigned>(blocks), 1, 1}, &params, stream);
}

Status launch_convert(const cuda::Kernel& kernel, const AttentionArgs& args, const DqSums& sums, int block_q,
                      cuda::CUstream stream) {
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
  const std::int64_t warps = ceil_div(p.seq_q, 16) * ceil_div(params.chunks, kConvertTiles);
  const std::int64_t tiles = ceil_div(warps, kernel.instance.threads / 32);
  const std::int64_t blocks = saturating_product(tiles, p.batch, p.heads_q);
  if (blocks > INT_MAX) return {TESSERA_UNSUPPORTED, "attention_backward: more rows than one grid can cover"};
  if (blocks == 0) return {};
  params.blocks = static_cast<unsigned>(tiles);
  params.scale = p.scale;
  return cuda::launch(kernel, {static_cast<unsigned>(blocks), 1, 1}, &params, stream);
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
  preprocess.one_by_one = !p.vectors;
  const auto first = preprocess_launch(preprocess);
  if (!first.ok()) return first.status();
  if (Status s = cuda::launch(*kernels[0], *first, stream); !s.ok()) return s;

  AttentionBackwardParams params = params_of(args, lse_log2, delta);
  params.dq_sums = {place(at.sums), sum_rows(p, configs.main.block_q)};
  if (configs.main.adds_dq) {
    if (Status s = cuda::zero(kernels[1]->device, params.dq_sums.data, at.sum_bytes, stream); !s.ok()) return s;
  }
  if (Status s =
          launch_tiles(*kernels[1], params, ceil_div(p.seq_k, configs.main.block_k), p.batch, p.heads_kv, stream);
      !s.ok()) {
    return s;
  }
  if (configs.main.adds_dq) {
    return launch_convert(*kernels[2], args, params.dq_sums, configs.main.block_q, stream);
  }
  return launch_tiles(*kernels[2], params, ceil_div(p.seq_q, configs.dq.block_q), p.batch, p.heads_q, stream);
}

}  // namespace tessera
