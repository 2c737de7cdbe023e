#include "ops/attention_backward.h"

#include <climits>

#include "ops/attention_params.h"
#include "ops/backward_steps.h"
#include "ops/extents.h"

namespace tessera {
namespace {

// Of dQ's sums; 0: dQ is made by a kernel of its own.
int sums_block_q(const select::BackwardConfigs& configs) { return configs.main.adds_dq ? configs.main.block_q : 0; }

AttentionBackwardParams params_of(const AttentionArgs& args, const BackwardBuffers& buffers) {
  AttentionBackwardParams params = {};
  fill_inputs(params, args);
  params.d_o = args.d_o.data;
  params.lse_log2 = buffers.lse_log2.data;
  params.delta = buffers.delta.data;
  params.dq = args.dq.data;
  params.dk = args.dk.data;
  params.dv = args.dv.data;
  params.d_o_strides = strides_of(args.d_o);
  params.dq_strides = strides_of(args.dq);
  params.dk_strides = strides_of(args.dk);
  params.dv_strides = strides_of(args.dv);
  params.row_strides = strides_of(buffers.delta);
  params.dq_sums = buffers.sums;
  return params;
}

// Blocks of each of the kernels that follow the preprocess: tiles for each head of each sequence.
struct Tiles {
  std::int64_t main;
  std::int64_t convert;
  std::int64_t dq;
};

Tiles tiles_of(const AttentionProblem& p, const select::BackwardConfigs& configs) {
  return {ceil_div(p.seq_k, configs.main.block_k), convert_tiles(p), ceil_div(p.seq_q, configs.dq.block_q)};
}

// That it fits a grid, backward_workspace has found.
template <class Params>
Status launch_tiles(const cuda::Kernel& kernel, const Params& params, std::int64_t tiles, const AttentionProblem& p,
                    std::int64_t heads, cuda::CUstream stream) {
  const cuda::Grid grid{static_cast<unsigned>(tiles * p.batch * heads), 1, 1};
  return cuda::launch(kernel, cuda::Work<Params>{params, grid}, stream);
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
  const std::int64_t bytes = backward_bytes(problem, sums_block_q(configs));
  if (bytes == LLONG_MAX) return Status(TESSERA_UNSUPPORTED, "attention_backward: its workspace cannot be addressed");
  return static_cast<std::size_t>(bytes);
}

Status enqueue_backward(const std::vector<const cuda::Kernel*>& kernels, const AttentionArgs& args,
                        const select::BackwardConfigs& configs, void* workspace, cuda::CUstream stream) {
  const AttentionProblem& p = args.problem;
  const BackwardBuffers buffers = backward_buffers(p, sums_block_q(configs), workspace);
  if (Status s = enqueue_preprocess(*kernels[0], args, buffers, stream); !s.ok()) return s;

  AttentionBackwardParams params = params_of(args, buffers);
  const Tiles tiles = tiles_of(p, configs);
  params.tiles = static_cast<unsigned>(tiles.main);
  if (Status s = launch_tiles(*kernels[1], params, tiles.main, p, p.heads_kv, stream); !s.ok()) return s;
  if (configs.main.adds_dq) {
    return enqueue_convert(*kernels[2], args, buffers.sums, configs.main.block_q, stream);
  }
  params.tiles = static_cast<unsigned>(tiles.dq);
  return launch_tiles(*kernels[2], params, tiles.dq, p, p.heads_q, stream);
}

}  // namespace tessera
