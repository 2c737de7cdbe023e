// Attention forward of e4m3 on any GPU that has it (kernels/attention/forward_fp8.cuh).
#include <algorithm>
#include <climits>

#include "attention/family.h"
#include "attention/forward_fp8_config.h"
#include "attention/fp8_params.h"
#include "attention/gpu.h"
#include "attention/params.h"
#include "attention/quantize_fp8.h"
#include "base/format.h"
#include "jit/config_text.h"

namespace tessera::attention {
namespace {

using Config = AttentionForwardFp8Config;

// 32 rows per warp halve the shared-memory traffic of 16, where the registers suffice.
Config config_for(const AttentionProblem& p) {
  constexpr std::int64_t kLargestDimOf32Rows = 64;
  const bool score_mod = has_score_mod(p);
  const bool wide = std::max(p.dim_qk, p.dim_v) <= kLargestDimOf32Rows && !score_mod;
  return {.dtype = p.dtype,
          .dim_qk = static_cast<int>(p.dim_qk),
          .dim_v = static_cast<int>(p.dim_v),
          .block_q = wide ? 128 : 64,
          .warps = 4,
          .masked = is_masked(p),
          .score_mod = score_mod,
          .v_blocks = p.v_scale_block > 0};
}

jit::KernelInstance main_kernel(const Config& config) {
  return {.name = format("attention_forward_fp8_{}_d{}x{}_{}w{}{}{}{}", name_of(config.dtype), config.dim_qk,
                         config.dim_v, config.block_q, config.warps, config.masked ? "_masked" : "",
                         config.score_mod ? "_score_mod" : "", config.v_blocks ? "_v_blocks" : ""),
          .header = "attention/forward_fp8.cuh",
          .entry = "attention_forward_fp8",
          .params = "AttentionForwardFp8Params",
          .config = jit::config_text("AttentionForwardFp8Config", config),
          .threads = config.warps * 32,
          .min_blocks = 1,
          .dynamic_smem_bytes = forward_fp8_shared_bytes(config),
          .pdl = true};
}

Status enqueue(const Config& config, const AttentionArgs& given, const engine::Launch& launch) {
  if (given.problem.batch == 0 || given.problem.seq_q == 0) return {};
  AttentionArgs args = given;
  if (given.problem.rounds_to_fp8) {
    const cuda::Kernel& kernel = *launch.kernels[0];
    const Rounding rounding = rounding_of(given.problem, false);
    if (Status s = cuda::zero(kernel.device, launch.workspace, rounding.scales, launch.stream); !s.ok()) return s;
    auto rounded =
        enqueue_rounding(given, rounding, kernel, static_cast<char*>(launch.workspace), nullptr, launch.stream);
    if (!rounded.ok()) return rounded.status();
    args = *rounded;
  }
  const AttentionProblem& p = args.problem;
  const std::int64_t q_tiles = ceil_div(p.seq_q, config.block_q);
  if (saturating_product(q_tiles, p.batch, p.heads_q) > INT_MAX) {
    return Status(TESSERA_UNSUPPORTED, "attention_forward_fp8: more rows than one grid can cover");
  }
  AttentionForwardFp8Params params = {};
  fill_inputs(params, args);
  fill_outputs(params, args);
  params.q_strides = strides_of(halved(args.q));
  params.k_strides = strides_of(halved(args.k));
  params.v_strides = strides_of(halved(args.v));
  params.q_scale = scales_of(args.q_scale, p.q_scale_block);
  params.k_scale = scales_of(args.k_scale, p.k_scale_block);
  params.v_scale = scales_of(args.v_scale, p.v_scale_block);
  params.q_tiles = static_cast<unsigned>(q_tiles);
  const cuda::Grid grid{static_cast<unsigned>(q_tiles * p.batch * p.heads_q), 1, 1};
  return cuda::launch(*launch.kernels.back(), cuda::Work<AttentionForwardFp8Params>{params, grid}, launch.stream);
}

std::size_t workspace_of(const AttentionProblem& p) { return p.rounds_to_fp8 ? rounding_of(p, false).bytes : 0; }

// The kernel sums in fp32 up to this head dim; above, registers are short, and the tensor cores truncate.
constexpr std::int64_t kLargestSummedDim = 128;

std::optional<std::string> refuses(const AttentionProblem& p, const Device& device) {
  if (auto reason = fp8_refuses(p, device)) return reason;
  if (device.compute < 89) return "e4m3 needs sm_89 or newer";
  if (!p.vectors) return "needs rows at multiples of 16 bytes";
  if (p.dim_v > kLargestSummedDim && needs_fp32_sums(p)) {
    return format(
        "above head dim {} of v, sums of more than {} keys would lose 1 % and more; TESSERA_FP8_FAST allows it",
        kLargestSummedDim, kTruncatedKeys);
  }
  if (!fp8_hopper_refuses(p, device)) return "attention_forward_fp8_sm90 is faster here";
  return std::nullopt;
}

// Microseconds, roughly: e4m3 has twice the tensor cores' rate, but as many exponentials.
double predicted_time(const AttentionProblem& p, const Device& device, double computed) {
  constexpr double kStart = 4.5;
  constexpr double kOf16Bits = 1.3;
  const double rate =
      portable_rate(device) * kOf16Bits * 64.0 / static_cast<double>(std::max<std::int64_t>({p.dim_qk, p.dim_v, 1}));
  return kStart + computed / rate * static_cast<double>(p.batch) * static_cast<double>(p.heads_q);
}

std::vector<engine::Offer> offers(const AttentionProblem& given, const Device& device) {
  const AttentionProblem p = as_e4m3(given);
  const Config config = config_for(p);
  if (static_cast<std::size_t>(forward_fp8_shared_bytes(config)) > device.shared_memory_per_block) return {};
  const double computed = computed_scores(p, config.block_q, kScaleKeys).all;
  return {{engine::main_config(config), workspace_of(given), predicted_time(p, device, computed),
           fp8_remark(given, computed)}};
}

std::optional<Recipe> recipe(const AttentionProblem& p, const Device& /*device*/, const engine::Config& named) {
  const Config config = config_for(as_e4m3(p));
  if (engine::main_config(config) != named) return std::nullopt;
  Recipe recipe;
  recipe.problem = p;
  recipe.problem.tensor_maps = false;
  if (p.rounds_to_fp8) recipe.steps.push_back({"quantize", instance_of(rounding_config(p, false))});
  recipe.steps.push_back({"main", main_kernel(config)});
  recipe.workspace = workspace_of(p);
  recipe.enqueue = [config](const AttentionArgs& args, const engine::Launch& launch) {
    return enqueue(config, args, launch);
  };
  return recipe;
}

std::vector<engine::Config> searches(const AttentionProblem& p, const Device& /*device*/) {
  return {engine::main_config(config_for(as_e4m3(p)))};
}

std::vector<AttentionProblem> representatives(const Device& device) {
  std::vector<AttentionProblem> list;
  if (device.compute != 89) return list;  // newer ones share its code
  const auto add = [&](int dim_qk, int dim_v, const Variant& variant, std::int64_t v_block) {
    list.push_back(with_variant(representative(device, AttentionOp::kForward, dim_qk, dim_v), variant));
    list.back().fp8 = true;
    list.back().v_scale_block = v_block;
    if (dim_v > kLargestSummedDim) list.back().seq_q = list.back().seq_k = kTruncatedKeys;
  };
  for (const int dim : {64, 80, 128, 256}) add(dim, dim, {true, false}, 0);
  for (const int dim : {80, 128}) add(dim, dim, {false, false}, 0);
  add(64, 64, {true, true}, 64);
  add(256, 256, {true, true}, 128);
  list.push_back(representative(device, AttentionOp::kForward, 128, 128));
  list.back().rounds_to_fp8 = true;
  return list;
}

}  // namespace

Implementation forward_fp8() {
  return {"attention_forward_fp8",
          AttentionFamily::bit_of(AttentionOp::kForward),
          {"attention/forward_fp8.cuh", "attention/quantize_fp8.cuh"},
          refuses,
          offers,
          recipe,
          searches,
          representatives};
}

}  // namespace tessera::attention
