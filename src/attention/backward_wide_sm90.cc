// Attention backward on Hopper above head dim 128, dQ summed by atomics: backward_preprocess.cuh,
// backward_wide_sm90.cuh, backward_convert.cuh.
#include "attention/backward_wide_sm90.h"

#include <algorithm>
#include <climits>

#include "attention/atom_boxes.h"
#include "attention/backward_convert.h"
#include "attention/backward_preprocess.h"
#include "attention/backward_steps.h"
#include "attention/family.h"
#include "attention/gpu.h"
#include "attention/params.h"
#include "base/format.h"
#include "cuda/tensor_map.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

using Config = AttentionBackwardWideSm90Config;

struct BackwardWideSm90Tile {
  int q_stages;
  int d_o_stages;
  int p_stages;
  int ds_stages;
  int kept_steps;
  int kept_ds_steps;
  int dq_columns;
  int dq_registers;
};

// By counting registers. The P and the dS warpgroup hold dV and dK (a register for two columns), an accumulator of 64
// queries (32) and its 16-bit operand (16). Up to head dim 192 they have room for columns of K and V (4 for 16 columns),
// and the dQ warpgroup for dS (4 for 16 keys); above, there is only room for most of dS.
constexpr BackwardWideSm90Tile backward_wide_sm90_tile(int dim_qk, int dim_v) {
  constexpr int kSumsAndColumns = 112;
  const int dim = std::max(dim_qk, dim_v);
  BackwardWideSm90Tile tile = {};
  tile.d_o_stages = 2;
  tile.p_stages = 1;
  tile.ds_stages = 2;
  tile.dq_columns = kWidestAtom;
  if (dim > 192) {
    tile.q_stages = 2;
    tile.kept_steps = 0;
    tile.kept_ds_steps = 3;
    tile.dq_registers = 72;
  } else {
    tile.q_stages = 3;
    tile.kept_steps = dim_qk == dim_v ? (kSumsAndColumns - dim / 2) / 4 : 0;
    tile.kept_ds_steps = 4;
    tile.dq_registers = 80;
  }
  return tile;
}

}  // namespace

AttentionBackwardWideSm90Config backward_wide_sm90_config(DType dtype, int dim_qk, int dim_v, bool masked) {
  const BackwardWideSm90Tile tile = backward_wide_sm90_tile(dim_qk, dim_v);
  return {.dtype = dtype,
          .dim_qk = dim_qk,
          .dim_v = dim_v,
          .q_stages = tile.q_stages,
          .d_o_stages = tile.d_o_stages,
          .p_stages = tile.p_stages,
          .ds_stages = tile.ds_stages,
          .kept_steps = tile.kept_steps,
          .kept_ds_steps = tile.kept_ds_steps,
          .dq_columns = tile.dq_columns,
          .dq_registers = tile.dq_registers,
          .masked = masked};
}

namespace {

Config config_for(const AttentionProblem& p) {
  return backward_wide_sm90_config(p.dtype, static_cast<int>(p.dim_qk), static_cast<int>(p.dim_v), is_masked(p));
}

// Everything but tensor maps and buffers. The caller has checked that one grid covers the problem.
cuda::Work<AttentionBackwardWideSm90Params> work_of(const AttentionArgs& args) {
  const AttentionProblem& p = args.problem;
  const std::int64_t k_tiles = ceil_div(p.seq_k, kBackwardWideTile);
  AttentionBackwardWideSm90Params params = {};
  params.dk = args.dk.data;
  params.dv = args.dv.data;
  params.cu_seqlens_q = args.cu_seqlens_q;
  params.cu_seqlens_k = args.cu_seqlens_k;
  params.dk_strides = strides_of(args.dk);
  params.dv_strides = strides_of(args.dv);
  params.seq_q = static_cast<int>(p.seq_q);
  params.seq_k = static_cast<int>(p.seq_k);
  params.heads_q = static_cast<unsigned>(p.heads_q);
  params.group = static_cast<unsigned>(p.heads_q / p.heads_kv);
  params.k_tiles = static_cast<unsigned>(k_tiles);
  params.band = band_of(p);
  params.scale = p.scale;
  const std::int64_t columns = p.batch * p.heads_kv;
  // Q and dO, of 16 bits, and dQ's sums, of 32.
  const std::int64_t head_bytes = saturating_product(p.seq_q, params.group, 6 * p.dim_qk + 2 * p.dim_v);
  params.columns = static_cast<unsigned>(columns);
  params.together = divisor(columns_together(columns, head_bytes));
  params.by_heads = divisor(static_cast<unsigned>(p.heads_kv));
  return {params, {static_cast<unsigned>(k_tiles * columns), 1, 1}};
}

// Bytes for delta, LSE and dQ's sums; TESSERA_UNSUPPORTED if that is beyond what can be addressed, or one of the kernels
// would need more CTAs than a grid has.
Result<std::size_t> workspace_of(const AttentionProblem& problem) {
  if (!fits_a_grid(ceil_div(problem.seq_k, kBackwardWideTile), problem, problem.heads_kv) ||
      !fits_a_grid(convert_tiles(problem), problem, problem.heads_q)) {
    return Status(TESSERA_UNSUPPORTED, "attention_backward_wide_sm90: more rows than one grid can cover");
  }
  const std::int64_t bytes = backward_bytes(problem, kBackwardWideTile);
  if (bytes == LLONG_MAX) {
    return Status(TESSERA_UNSUPPORTED, "attention_backward_wide_sm90: its workspace cannot be addressed");
  }
  return static_cast<std::size_t>(bytes);
}

jit::KernelInstance main_kernel(const Config& config) {
  return {.name = format("attention_backward_wide_sm90_{}_d{}x{}_{}x{}{}", name_of(config.dtype), config.dim_qk,
                         config.dim_v, kBackwardWideTile, kBackwardWideTile, config.masked ? "_masked" : ""),
          .header = "attention/backward_wide_sm90.cuh",
          .entry = "attention_backward_wide_sm90",
          .params = "AttentionBackwardWideSm90Params",
          .config = jit::config_text("AttentionBackwardWideSm90Config", config),
          .threads = kBackwardWideThreads,
          .min_blocks = 1,
          .dynamic_smem_bytes = backward_wide_sm90_layout(config).bytes,
          .pdl = true};
}

// Boxes of 64 x 64.
Status encode(const TensorView& view, const TensorExtents& extents, TensorMap& map) {
  AtomBoxes boxes;
  if (Status s = atom_boxes(view, extents, kBackwardWideTile, kWidestAtom, boxes); !s.ok()) return s;
  const auto made = cuda::encode(boxes.box[0]);  // all swizzle atoms are of one width
  if (!made.ok()) return made.status();
  map = *made;
  return {};
}

Status enqueue(const AttentionArgs& args, const engine::Launch& launch) {
  const AttentionProblem& p = args.problem;
  cuda::Work<AttentionBackwardWideSm90Params> work = work_of(args);
  const BackwardBuffers buffers = backward_buffers(p, kBackwardWideTile, launch.workspace);
  AttentionBackwardWideSm90Params& params = work.params;
  params.lse_log2 = buffers.lse_log2.data;
  params.delta = buffers.delta.data;
  params.row_strides = strides_of(buffers.delta);
  params.dq_sums = buffers.sums;
  {
    // The driver makes tensor maps only if a context is current.
    const auto scope = cuda::ContextScope::enter(launch.kernels[1]->device);
    if (!scope.ok()) return scope.status();
    if (Status s = encode(args.q, query_extents(p, p.dim_qk), params.q); !s.ok()) return s;
    if (Status s = encode(args.d_o, query_extents(p, p.dim_v), params.d_o); !s.ok()) return s;
    if (Status s = encode(args.k, key_extents(p, p.dim_qk), params.k); !s.ok()) return s;
    if (Status s = encode(args.v, key_extents(p, p.dim_v), params.v); !s.ok()) return s;
  }
  if (Status s = enqueue_preprocess(*launch.kernels[0], args, buffers, launch.stream); !s.ok()) return s;
  if (Status s = cuda::launch(*launch.kernels[1], work, launch.stream); !s.ok()) return s;
  return enqueue_convert(*launch.kernels[2], args, buffers.sums, kBackwardWideTile, launch.stream);
}

std::optional<std::string> refuses(const AttentionProblem& p, const Device& device) {
  if (auto reason = gpu_refuses(p, device)) return reason;
  if (auto reason = hopper_refuses(p, device)) return reason;
  if (p.deterministic) return "sums dQ by atomics, in any order";
  if (has_score_mod(p)) return "takes neither softcap nor ALiBi nor a scale that is not above 0";
  if (p.batch == 0 || p.seq_q == 0 || p.seq_k == 0 || (p.varlen && (p.total_q == 0 || p.total_k == 0))) {
    return "there is nothing to load";
  }
  if (p.dim_qk <= 128 && p.dim_v <= 128) {
    return format("takes head dims above 128, not {}", std::max(p.dim_qk, p.dim_v));
  }
  const auto workspace = workspace_of(p);
  if (!workspace.ok()) return workspace.status().message();
  return std::nullopt;
}

std::vector<engine::Offer> offers(const AttentionProblem& p, const Device& device) {
  constexpr double kRate = 1.8;  // relative to the portable kernel's large tile
  const Config config = config_for(p);
  const auto workspace = workspace_of(p);
  if (!workspace.ok()) return {};
  if (static_cast<std::size_t>(backward_wide_sm90_layout(config).bytes) > device.shared_memory_per_block) return {};
  const double rows = static_cast<double>(ceil_div(p.seq_q, kBackwardWideTile) * kBackwardWideTile);
  return {{engine::main_config(config), *workspace, predicted_backward_time(p, device, rows, kRate),
           format("computes {:.3g} rows per head; dQ summed in fp32 by atomics", rows)}};
}

std::optional<Recipe> recipe(const AttentionProblem& p, const Device&, const engine::Config& named) {
  const Config config = config_for(p);
  const auto workspace = workspace_of(p);
  if (!workspace.ok() || engine::main_config(config) != named) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  recipe.steps = {{"preprocess", instance_of(preprocess_config(config.dtype, 8))},
                  {"main", main_kernel(config)},
                  {"convert", instance_of(convert_config(config.dtype, 8))}};
  recipe.workspace = *workspace;
  recipe.enqueue = enqueue;
  return recipe;
}

constexpr int kDims[] = {136, 176, 192, 200, 256};

std::vector<AttentionProblem> representatives(const Device& device) {
  std::vector<AttentionProblem> list;
  if (device.compute != 90 || !device.specific) return list;
  const auto add = [&](int dim_qk, int dim_v, bool masked) {
    list.push_back(with_variant(representative(device, AttentionOp::kBackward, dim_qk, dim_v), {masked, false}));
  };
  for (const bool masked : {false, true}) {
    for (const int dim : kDims) add(dim, dim, masked);
    add(192, 128, masked);
  }
  add(64, 256, true);
  add(256, 64, true);
  return list;
}

}  // namespace

Implementation backward_wide_sm90() {
  return {"attention_backward_wide_sm90",
          AttentionFamily::bit_of(AttentionOp::kBackward),
          {"attention/backward_preprocess.cuh", "attention/backward_wide_sm90.cuh", "attention/backward_convert.cuh"},
          refuses,
          offers,
          recipe,
          nullptr,
          representatives};
}

}  // namespace tessera::attention
