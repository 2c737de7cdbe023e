#include "select/kernels.h"

#include <algorithm>

#include "jit/config_text.h"
#include "ops/attention.h"
#include "ops/format.h"
#include "select/device.h"

namespace tessera::select {

const std::vector<std::string>& known_archs() {
  static const std::vector<std::string> archs = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"};
  return archs;
}

namespace {

// 1024 threads on an SM, what sm_75 can hold, at 64 registers each. Where no minimum is stated, ptxas saves registers
// by using one load's result before it issues the next.
constexpr int kMinBlocks = 4;

}  // namespace

std::vector<AttentionForwardConfig> forward_configs(int compute, DType dtype, int dim_qk, int dim_v, int vector,
                                                    bool banded, bool general) {
  const ForwardTile large = forward_tile(compute, dim_qk, dim_v, banded, general);
  const ForwardTile small = small_forward_tile(compute, dim_qk, dim_v, banded, general);
  const auto config_of = [&](const ForwardTile& tile, bool in_halves) -> AttentionForwardConfig {
    return {.dtype = dtype,
            .dim_qk = dim_qk,
            .dim_v = dim_v,
            .block_q = tile.block_q,
            .block_k = tile.block_k,
            .warps = tile.warps,
            .in_halves = in_halves,
            .vector = vector,
            .banded = banded,
            .general = general};
  };
  std::vector<AttentionForwardConfig> configs = {config_of(large, false)};
  if (small.block_q != large.block_q || small.block_k != large.block_k) configs.push_back(config_of(small, false));
  if (can_sum_in_halves(compute, dim_v, vector, general)) configs.push_back(config_of(small, true));
  return configs;
}

std::vector<AttentionForwardSm90Config> forward_sm90_configs(DType dtype, int dim_qk, int dim_v, bool banded,
                                                             bool general) {
  std::vector<AttentionForwardSm90Config> configs;
  const auto add = [&](const ForwardSm90Tile& tile, bool tickets, bool split) {
    if (tile.consumers == 0) return;
    configs.push_back({.dtype = dtype,
                       .dim_qk = dim_qk,
                       .dim_v = dim_v,
                       .consumers = tile.consumers,
                       .block_k = tile.block_k,
                       .stages = tile.stages,
                       .q_stages = tile.q_stages,
                       .blocks = tile.blocks,
                       .narrowest_panel = tile.narrowest_panel,
                       .joined = false,
                       .split = split,
                       .ping_pong = tile.ping_pong,
                       .polynomial = 0,
                       .tickets = tickets,
                       .banded = banded,
                       .general = general});
  };
  add(forward_sm90_tile(dim_qk, dim_v, general), false, false);
  if (banded) add(forward_sm90_tile(dim_qk, dim_v, general), true, false);
  add(short_forward_sm90_tile(dim_qk, dim_v, general), false, false);
  add(paired_forward_sm90_tile(dim_qk, dim_v, general), false, false);
  add(small_forward_sm90_tile(dim_qk, dim_v, general), false, false);
  add(split_forward_sm90_tile(dim_qk, dim_v, general), false, true);
  return configs;
}

std::vector<BackwardConfigs> backward_configs(int compute, DType dtype, int dim_qk, int dim_v, int vector, bool banded,
                                              bool general, bool deterministic) {
  const bool staged = vector == 1;
  const BackwardDqTile dq = backward_dq_tile(compute, dim_qk, dim_v, general);
  const BackwardDqConfig dq_config = {.dtype = dtype,
                                      .dim_qk = dim_qk,
                                      .dim_v = dim_v,
                                      .block_q = dq.block_q,
                                      .block_k = dq.block_k,
                                      .warps = dq.warps,
                                      .stages = staged ? 1 : dq.stages,
                                      .blocks_per_sm = staged ? 1 : dq.blocks_per_sm,
                                      .vector = vector,
                                      .banded = banded,
                                      .general = general};
  const BackwardTile large = staged ? staged_backward_tile(compute, dim_qk, dim_v, banded, general)
                                    : backward_tile(compute, dim_qk, dim_v, banded, general);
  const BackwardTile small = small_backward_tile(compute, dim_qk, dim_v);
  std::vector<BackwardConfigs> list;
  for (const BackwardTile& tile : {large, small}) {
    if (!list.empty() && small.block_q == large.block_q && small.block_k == large.block_k) continue;
    list.push_back({.main = {.dtype = dtype,
                             .dim_qk = dim_qk,
                             .dim_v = dim_v,
                             .block_q = tile.block_q,
                             .block_k = tile.block_k,
                             .warps = tile.warps,
                             .stages = tile.stages,
                             .kept_steps = tile.kept_steps,
                             .adds_dq = !deterministic,
                             .dq_unroll = tile.dq_unroll,
                             .blocks_per_sm = tile.blocks_per_sm,
                             .vector = vector,
                             .banded = banded,
                             .general = general},
                    .dq = dq_config});
  }
  return list;
}

std::vector<AttentionBackwardSm90Config> backward_sm90_configs(DType dtype, int dim_qk, int dim_v, bool banded) {
  const BackwardSm90Tile tile = backward_sm90_tile(dim_qk, dim_v);
  if (tile.consumers == 0) return {};
  return {{.dtype = dtype,
           .dim_qk = dim_qk,
           .dim_v = dim_v,
           .consumers = tile.consumers,
           .block_q = tile.block_q,
           .stages = tile.stages,
           .ds_stages = tile.ds_stages,
           .overlaps = tile.overlaps,
           .keeps_k = tile.keeps_k,
           .keeps_v = tile.keeps_v,
           .dq_columns = tile.dq_columns,
           .dq_registers = tile.dq_registers,
           .banded = banded}};
}

jit::KernelInstance instance_of(const AttentionBackwardConfig& config) {
  return {
      .name = format("attention_backward_{}_d{}x{}_{}x{}w{}{}{}{}{}", name_of(config.dtype), config.dim_qk,
                     config.dim_v, config.block_q, config.block_k, config.warps, config.adds_dq ? "" : "_no_dq",
                     config.banded ? "_banded" : "", config.general ? "_general" : "", config.vector == 1 ? "_v1" : ""),
      .header = "attention/backward.cuh",
      .entry = "attention_backward",
      .params = "AttentionBackwardParams",
      .config = jit::config_text("AttentionBackwardConfig", config),
      .threads = config.warps * 32,
      .min_blocks = config.blocks_per_sm,
      .dynamic_smem_bytes = backward_layout(config).bytes,
      .starts_early = true};
}

jit::KernelInstance instance_of(const AttentionBackwardSm90Config& config) {
  return {.name = format("attention_backward_sm90_{}_d{}x{}_{}x{}{}", name_of(config.dtype), config.dim_qk,
                         config.dim_v, config.block_q, block_k_of(config), config.banded ? "_banded" : ""),
          .header = "attention/backward_sm90.cuh",
          .entry = "attention_backward_sm90",
          .params = "AttentionBackwardSm90Params",
          .config = jit::config_text("AttentionBackwardSm90Config", config),
          .threads = threads_of(config),
          .min_blocks = 1,
          .dynamic_smem_bytes = backward_sm90_layout(config).bytes,
          .starts_early = true};
}

jit::KernelInstance instance_of(const BackwardDqConfig& config) {
  return {.name = format("backward_dq_{}_d{}x{}_{}x{}w{}{}{}{}", name_of(config.dtype), config.dim_qk, config.dim_v,
                         config.block_q, config.block_k, config.warps, config.banded ? "_banded" : "",
                         config.general ? "_general" : "", config.vector == 1 ? "_v1" : ""),
          .header = "attention/backward_dq.cuh",
          .entry = "backward_dq",
          .params = "AttentionBackwardParams",
          .config = jit::config_text("BackwardDqConfig", config),
          .threads = config.warps * 32,
          .min_blocks = config.blocks_per_sm,
          .dynamic_smem_bytes = backward_dq_shared_bytes(config),
          .starts_early = true};
}

jit::KernelInstance instance_of(const BackwardConvertConfig& config) {
  return {.name = format("backward_convert_{}_v{}", name_of(config.dtype), config.vector),
          .header = "attention/backward_convert.cuh",
          .entry = "backward_convert",
          .params = "BackwardConvertParams",
          .config = jit::config_text("BackwardConvertConfig", config),
          .threads = config.threads,
          .min_blocks = kMinBlocks,
          .starts_early = true};
}

jit::KernelInstance instance_of(const AttentionForwardConfig& config) {
  return {
      .name = format("attention_forward_{}_d{}x{}_{}x{}w{}{}{}{}{}", name_of(config.dtype), config.dim_qk, config.dim_v,
                     config.block_q, config.block_k, config.warps, config.in_halves ? "_halves" : "",
                     config.banded ? "_banded" : "", config.general ? "_general" : "", config.vector == 1 ? "_v1" : ""),
      .header = "attention/forward.cuh",
      .entry = "attention_forward",
      .params = "AttentionForwardParams",
      .config = jit::config_text("AttentionForwardConfig", config),
      .threads = config.warps * 32,
      .min_blocks = 1,
      .dynamic_smem_bytes = forward_shared_bytes(config),
      .starts_early = true};
}

jit::KernelInstance instance_of(const AttentionForwardSm90Config& config) {
  return {.name = format("attention_forward_sm90_{}_d{}x{}_{}x{}{}{}{}{}{}", name_of(config.dtype), config.dim_qk,
                         config.dim_v, block_q_of(config), config.block_k, config.split ? "_split" : "",
                         config.joined ? "_joined" : "", config.banded ? "_banded" : "",
                         config.general ? "_general" : "", config.tickets ? "_tickets" : ""),
          .header = "attention/forward_sm90.cuh",
          .entry = "attention_forward_sm90",
          .params = "AttentionForwardSm90Params",
          .config = jit::config_text("AttentionForwardSm90Config", config),
          .threads = threads_of(config),
          .min_blocks = config.blocks,
          .dynamic_smem_bytes = forward_sm90_layout(config).bytes,
          .starts_early = true};
}

jit::KernelInstance instance_of(const BackwardPreprocessConfig& config) {
  return {.name = format("backward_preprocess_{}_v{}", name_of(config.dtype), config.vector),
          .header = "attention/backward_preprocess.cuh",
          .entry = "backward_preprocess",
          .params = "BackwardPreprocessParams",
          .config = jit::config_text("BackwardPreprocessConfig", config),
          .threads = config.threads,
          .min_blocks = kMinBlocks,
          .starts_early = true};
}

jit::KernelInstance instance_of(const SplitCombineConfig& config) {
  return {.name = format("split_combine_{}_v{}_u{}", name_of(config.dtype), config.vector, config.unroll),
          .header = "attention/split_combine.cuh",
          .entry = "split_combine",
          .params = "SplitCombineParams",
          .config = jit::config_text("SplitCombineConfig", config),
          .threads = config.threads,
          .min_blocks = kMinBlocks,
          .starts_early = true};
}

namespace {

// Dims that stand for all multiples of 8: each tile shape's largest, odd counts of 16 and of 8, and the common ones.
constexpr int kForwardDims[] = {8, 16, 24, 40, 64, 72, 80, 88, 96, 112, 128, 160, 192, 256};
constexpr int kForwardSm90Dims[] = {8, 64, 72, 80, 96, 112, 128, 192, 256};
constexpr int kBackwardSm90Dims[] = {8, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128};
constexpr int kBackwardDims[] = {8, 64, 80, 128, 256};
constexpr int kMoreBackwardDims[] = {56,  72,  96,
                                     104, 112, 192};  // banded only, which needs the most registers of the common ones

struct Variant {
  bool banded;
  bool general;
};
constexpr Variant kVariants[] = {{false, false}, {true, false}, {true, true}};

void add_forward_sm90(std::vector<jit::KernelInstance>& list, DType dtype, int dim_qk, int dim_v,
                      const Variant& variant) {
  for (const AttentionForwardSm90Config& config :
       forward_sm90_configs(dtype, dim_qk, dim_v, variant.banded, variant.general)) {
    list.push_back(instance_of(config));
    if (config.general || (dim_qk != 64 && dim_qk != 128)) continue;
    AttentionForwardSm90Config joined = config;
    joined.joined = true;
    list.push_back(instance_of(joined));
  }
}

void add_backward(std::vector<jit::KernelInstance>& list, int compute, DType dtype, int dim_qk, int dim_v, int vector,
                  const Variant& variant) {
  const auto configs = [&](bool deterministic) {
    return backward_configs(compute, dtype, dim_qk, dim_v, vector, variant.banded, variant.general, deterministic);
  };
  list.push_back(instance_of(configs(false).front().main));
  list.push_back(instance_of(configs(true).front().main));
  list.push_back(instance_of(configs(true).front().dq));
  if (configs(false).size() > 1 && dim_qk % 64 == 0) list.push_back(instance_of(configs(false).back().main));
}

}  // namespace

std::vector<jit::KernelInstance> kernels_for(const std::string& arch) {
  // These do not know their head dim when they are compiled: these few are all there are.
  std::vector<jit::KernelInstance> list;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int vector : {8, 1}) {
      list.push_back(instance_of(preprocess_config(dtype, vector)));
      list.push_back(instance_of(convert_config(dtype, vector)));
    }
    for (const int unroll : {4, 8}) list.push_back(instance_of(combine_config(dtype, 4, unroll)));
    list.push_back(instance_of(combine_config(dtype, 1, 4)));
  }
  // The others are made for exactly the head dim at hand; in the type that most use.
  const auto device = cuda_device(arch);
  if (!device.ok()) return list;
  const int compute = device->compute;
  const DType dtype = compute < 80 ? DType::kFloat16 : DType::kBFloat16;
  for (const Variant& variant : kVariants) {
    for (const int dim : kForwardDims) {
      for (const AttentionForwardConfig& config :
           forward_configs(compute, dtype, dim, dim, 8, variant.banded, variant.general)) {
        if (!config.in_halves || dim % 64 == 0) list.push_back(instance_of(config));
      }
    }
    if (compute == 90) {
      for (const int dim : kForwardSm90Dims) add_forward_sm90(list, dtype, dim, dim, variant);
      add_forward_sm90(list, dtype, 192, 128, variant);
      if (!variant.general) {
        const auto add = [&](int dim_qk, int dim_v) {
          for (const auto& config : backward_sm90_configs(dtype, dim_qk, dim_v, variant.banded)) {
            list.push_back(instance_of(config));
          }
        };
        for (const int dim : kBackwardSm90Dims) add(dim, dim);
        add(128, 64);
        add(64, 128);
      }
    }
    if (compute == 89) continue;  // what sm_86 runs
    for (const int dim : kBackwardDims) add_backward(list, compute, dtype, dim, dim, 8, variant);
    if (!variant.banded || variant.general) continue;
    for (const int dim : kMoreBackwardDims) add_backward(list, compute, dtype, dim, dim, 8, variant);
  }
  for (const AttentionForwardConfig& config : forward_configs(compute, dtype, 80, 64, 1, true, true)) {
    list.push_back(instance_of(config));
  }
  add_backward(list, compute, dtype, 80, 64, 1, {true, true});
  for (const int dim : {128, 256}) add_backward(list, compute, dtype, dim, dim, 1, {true, false});
  add_backward(list, compute, dtype, 192, 128, 8, {true, false});
  return list;
}

Result<jit::GateReport> compile_gate(const std::vector<std::string>& archs, const jit::GateOptions& options) {
  std::vector<jit::CompileRequest> requests;
  for (const std::string& arch : archs) {
    if (std::find(known_archs().begin(), known_archs().end(), arch) == known_archs().end()) {
      return Status(TESSERA_INVALID_ARGUMENT, format("unknown arch {}; known are {}", arch, join(known_archs(), ", ")));
    }
    for (jit::KernelInstance& instance : kernels_for(arch))
      requests.push_back({std::move(instance), {arch, false}, {}, {}});
  }
  return jit::run_gate(requests, options);
}

}  // namespace tessera::select
