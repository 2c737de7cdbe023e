// An MLP with few output columns in one kernel for Hopper (kernels/mlp/narrow_sm90.cuh).
#include "mlp/narrow_sm90.h"

#include <algorithm>
#include <climits>

#include "base/arguments.h"
#include "base/arithmetic.h"
#include "base/format.h"
#include "cuda/tensor_map.h"
#include "gemm/gpu.h"
#include "jit/config_text.h"
#include "mlp/family.h"

namespace tessera::mlp {
namespace {

namespace narrow = tessera::mlp_narrow_sm90;
using engine::Device;
using Config = MlpNarrowSm90Config;
using T = MlpTensor;

constexpr std::int64_t kMostColumns = std::int64_t{narrow::kMostSteps} * 64;  // of x

jit::KernelInstance main_kernel(const Config& config) {
  GemmEpilogueConfig activation = {};
  activation.activation = config.activation;
  return {.name = format("mlp_narrow_sm90_{}_h{}s{}{}{}{}", name_of(config.dtype), config.block_h, config.stages,
                         config.cluster > 1 ? "_cluster" : "", config.pairs ? "" : "_single",
                         gemm::epilogue_suffix(activation)),
          .header = "mlp/narrow_sm90.cuh",
          .entry = "mlp_narrow_sm90_forward",
          .params = "MlpNarrowSm90Params",
          .config = jit::config_text("MlpNarrowSm90Config", config),
          .threads = narrow::kThreads,
          .min_blocks = 1,
          .dynamic_smem_bytes = narrow::layout(config).bytes,
          .pdl = true,
          .cluster = config.cluster};
}

// The exact GELU needs more registers.
Config config_of(const MlpProblem& p, int cluster) {
  Config config = {};
  config.dtype = p.dtype;
  config.block_h = p.activation == kGeluErf ? 112 : 160;
  config.stages = p.activation == kGeluErf ? 4 : 3;
  config.cluster = cluster;
  config.activation = p.activation;
  config.pairs = p.n % 2 == 0 && (p.aligned & bit_of(T::kOut)) != 0;
  return config;
}

Result<TensorMap> map_of(const GemmView& view, std::int64_t rows, std::int64_t columns, int box_rows) {
  cuda::TensorBox box;
  box.address = reinterpret_cast<std::uintptr_t>(view.data);
  const auto stride = static_cast<std::uint64_t>(rows <= 1 ? 16 : std::max<std::int64_t>(view.row_stride * 2, 16));
  box.extents = {static_cast<std::uint64_t>(columns), static_cast<std::uint64_t>(rows), 1, 1};
  box.strides = {stride, stride, stride};
  box.columns = 64;
  box.rows = static_cast<std::uint32_t>(box_rows);
  return cuda::encode(box);
}

}  // namespace

std::optional<std::string> narrow_refuses(const MlpProblem& p, const Device& device) {
  if (device.is_cpu()) return "runs on GPUs; the tensors are on the CPU";
  if (device.compute != 90 || !device.specific) return "needs TMA and wgmma (sm_90a)";
  if (p.dtype == DType::kFloat32) return "computes fp16 and bf16";
  if (p.n > narrow::kOutColumns)
    return format("N is {}; up to {} columns are kept in registers", p.n, narrow::kOutColumns);
  if (p.k > kMostColumns) return format("K is {}; up to {} columns of x fit shared memory", p.k, kMostColumns);
  if (p.k == 0 || p.hidden == 0) return "there is nothing to load: K or H is 0";
  for (const T t : {T::kGate, T::kUpBias, T::kDownBias, T::kResidual, T::kBefore}) {
    if (p.has(t)) return "has no gate, no biases and no residual, and keeps nothing";
  }
  for (const T t : {T::kX, T::kUp, T::kDown}) {
    if ((p.aligned & bit_of(t)) == 0) return "needs rows of x, up and down that start at multiples of 16 bytes";
  }
  if (!p.tensor_maps) return "needs positive strides below 2^36 elements";
  constexpr std::int64_t kMost = INT_MAX / 2;
  if (p.m > kMost || p.hidden > kMost) return "has more rows or hidden columns than 32 bits count";
  return std::nullopt;
}

std::vector<Config> narrow_configs(const MlpProblem& p) { return {config_of(p, 2), config_of(p, 1)}; }

std::int64_t narrow_row_tiles(const MlpProblem& p, const Config& config) {
  return ceil_div(p.m, narrow::kBlockM * config.cluster) * config.cluster;
}

unsigned narrow_ctas(const MlpProblem& p, const Config& config, int multiprocessors) {
  const int most = std::max(multiprocessors / config.cluster, 1) * config.cluster;
  return static_cast<unsigned>(std::min<std::int64_t>(narrow_row_tiles(p, config), most));
}

// Microseconds, as for gemm's products.
double narrow_time(const MlpProblem& p, const Device& device, const Config& config) {
  constexpr double kClock = 1550, kMultiplyAdds = 2048;
  const double columns = static_cast<double>(ceil_div(p.hidden, config.block_h) * config.block_h);
  const double terms = static_cast<double>(ceil_div(p.k, 64) * 64) * 1.05 + narrow::kOutColumns;
  const int ctas = std::max(device.multiprocessors / config.cluster * config.cluster, 1);
  const auto rounds = static_cast<double>(ceil_div(narrow_row_tiles(p, config), ctas));
  const double tile = narrow::kBlockM * columns * terms / kMultiplyAdds + 3000;
  // Without a cluster, L2 is asked for twice as much.
  return 3.0 + rounds * tile / kClock * (config.cluster > 1 ? 1.0 : 1.03);
}

Status set_narrow_params(const Config& config, const MlpArgs& args, MlpNarrowSm90Params& params) {
  const MlpProblem& p = args.problem;
  const auto encode = [&](T tensor, std::int64_t rows, std::int64_t columns, int box_rows, TensorMap& to) -> Status {
    const auto map = map_of(args[tensor], rows, columns, box_rows);
    if (!map.ok()) return map.status();
    to = *map;
    return {};
  };
  TESSERA_CHECK(encode(T::kX, p.m, p.k, narrow::kBlockM, params.x));
  TESSERA_CHECK(encode(T::kUp, p.hidden, p.k, config.block_h / config.cluster, params.up));
  TESSERA_CHECK(encode(T::kDown, p.n, p.hidden, narrow::kOutColumns, params.down));
  params.m = static_cast<int>(p.m);
  params.n = static_cast<int>(p.n);
  params.k_steps = static_cast<int>(ceil_div(p.k, 64));
  params.row_tiles = static_cast<int>(narrow_row_tiles(p, config));
  params.hidden_tiles = static_cast<int>(ceil_div(p.hidden, config.block_h));
  return {};
}

namespace {

Status enqueue(const Config& config, const MlpArgs& args, const engine::Launch& launch) {
  const MlpProblem& p = args.problem;
  if (p.m == 0 || p.n == 0) return {};
  const cuda::Kernel& kernel = *launch.kernels[0];
  const auto scope = cuda::ContextScope::enter(kernel.device);  // which the driver needs to encode tensor maps
  if (!scope.ok()) return scope.status();
  cuda::Work<MlpNarrowSm90Params> work = {};
  TESSERA_CHECK(set_narrow_params(config, args, work.params));
  work.params.out = gemm::matrix_of(args[T::kOut]);
  work.grid = {narrow_ctas(p, config, kernel.multiprocessors), 1, 1};
  return cuda::launch(kernel, work, launch.stream);
}

std::vector<engine::Offer> offers(const MlpProblem& p, const Device& device) {
  std::vector<engine::Offer> offers;
  for (const Config& config : narrow_configs(p)) {
    offers.push_back(
        {engine::main_config(config), 0, narrow_time(p, device, config),
         format("{} row tiles of {}; hidden rows stay in registers", narrow_row_tiles(p, config), narrow::kBlockM)});
  }
  return offers;
}

std::optional<Recipe> recipe(const MlpProblem& p, const Device&, const engine::Config& named) {
  for (const Config& config : narrow_configs(p)) {
    if (engine::main_config(config) != named) continue;
    Recipe recipe;
    recipe.problem = p;
    if (!config.pairs) recipe.problem.aligned &= ~bit_of(T::kOut);
    recipe.steps = {{"main", main_kernel(config)}};
    recipe.enqueue = [config](const MlpArgs& args, const engine::Launch& launch) {
      return enqueue(config, args, launch);
    };
    return recipe;
  }
  return std::nullopt;
}

std::vector<engine::Config> searches(const MlpProblem& p, const Device&) {
  std::vector<engine::Config> list;
  for (const Config& config : narrow_configs(p)) list.push_back(engine::main_config(config));
  return list;
}

std::vector<MlpProblem> representatives(const Device&) {
  MlpProblem p;
  p.dtype = DType::kBFloat16;
  p.m = 32000;
  p.k = 512;
  p.hidden = 13650;
  p.n = 32;
  std::vector<MlpProblem> list(4, p);
  list[1].activation = kGeluTanh;
  list[2].activation = kGeluErf;
  list[3].dtype = DType::kFloat16;
  list[3].n = 31;
  return list;
}

}  // namespace

Implementation narrow_sm90() {
  return {"mlp_narrow_sm90",
          MlpFamily::bit_of(MlpOp::kForward),
          {"mlp/narrow_sm90.cuh"},
          narrow_refuses,
          offers,
          recipe,
          searches,
          representatives};
}

}  // namespace tessera::mlp
