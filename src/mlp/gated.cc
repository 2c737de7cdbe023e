#include "mlp/gated.h"

#include <algorithm>
#include <climits>

#include "base/format.h"
#include "cpu/elements.h"
#include "cpu/thread_pool.h"
#include "gemm/cpu/activations.h"
#include "gemm/gpu.h"
#include "jit/config_text.h"

namespace tessera::mlp {
namespace {

constexpr int kThreads = 256;

}  // namespace

MlpGatedConfig gated_config(const MlpProblem& p, bool vector) {
  return {p.dtype, p.activation, p.op == MlpOp::kBackward, vector ? 8 : 1};
}

jit::KernelInstance instance_of(const MlpGatedConfig& config) {
  return {.name = format("mlp_gated_{}_{}{}{}", name_of(config.dtype), activation_name(config.activation),
                         config.gradient ? "_gradient" : "", config.vector == 1 ? "_v1" : ""),
          .header = "mlp/gated.cuh",
          .entry = "mlp_gated",
          .params = "MlpGatedParams",
          .config = jit::config_text("MlpGatedConfig", config),
          .threads = kThreads,
          .min_blocks = 4,
          .dynamic_smem_bytes = 0,
          .pdl = true};
}

Result<cuda::Work<MlpGatedParams>> gated_work(const MlpArgs& args, const MlpGatedConfig& config) {
  const MlpProblem& p = args.problem;
  const std::int64_t chunks = ceil_div(p.hidden, config.vector);
  const std::int64_t blocks = ceil_div(saturating_product(p.m, chunks), kThreads);
  if (blocks > INT_MAX) return Status(TESSERA_UNSUPPORTED, "mlp_gated: more rows than one grid can cover");
  const auto matrix = [&](MlpTensor t) { return gemm::matrix_of(args[t]); };
  cuda::Work<MlpGatedParams> work = {};
  work.params = {matrix(MlpTensor::kBefore),
                 matrix(MlpTensor::kBeforeGate),
                 matrix(MlpTensor::kHidden),
                 matrix(MlpTensor::kDhidden),
                 matrix(MlpTensor::kDbefore),
                 matrix(MlpTensor::kDbeforeGate),
                 p.m,
                 static_cast<int>(p.hidden),
                 static_cast<unsigned>(chunks)};
  work.grid = {static_cast<unsigned>(blocks), 1, 1};
  return work;
}

namespace {

TESSERA_CLONED void gated_row(const MlpArgs& args, std::int64_t row) {
  using namespace gemm::cpu_backend;
  constexpr std::int64_t kChunk = 256;
  const MlpProblem& p = args.problem;
  const bool backward = p.op == MlpOp::kBackward;
  float before[kChunk], gate[kChunk], slope[kChunk], dhidden[kChunk], hidden[kChunk];
  for (std::int64_t first = 0; first < p.hidden; first += kChunk) {
    const std::int64_t count = std::min(kChunk, p.hidden - first);
    const auto read = [&](MlpTensor t, float* to) {
      tessera::cpu::load_row(p.dtype, args[t].data, row * args[t].row_stride + first, count, to);
    };
    const auto write = [&](MlpTensor t, const float* from) {
      if (args[t].data == nullptr) return;
      tessera::cpu::store_row(p.dtype, args[t].data, row * args[t].row_stride + first, count, from);
    };
    read(MlpTensor::kBefore, before);
    read(MlpTensor::kBeforeGate, gate);
    if (backward) derivative(p.activation, gate, count, slope);
    activated(p.activation, gate, count, gate);
    for (std::int64_t i = 0; i < count; ++i) hidden[i] = before[i] * gate[i];
    if (backward) {
      read(MlpTensor::kDhidden, dhidden);
      for (std::int64_t i = 0; i < count; ++i) before[i] *= dhidden[i] * slope[i];
      for (std::int64_t i = 0; i < count; ++i) dhidden[i] *= gate[i];
      write(MlpTensor::kDbefore, dhidden);
      write(MlpTensor::kDbeforeGate, before);
    }
    write(MlpTensor::kHidden, hidden);
  }
}

}  // namespace

void run_gated(const MlpArgs& args, int threads) {
  tessera::cpu::parallel_for(args.problem.m, std::max(threads, 1),
                             [&](std::int64_t row, int) { gated_row(args, row); });
}

double gated_time(const MlpProblem& p) {
  const double matrices = p.op == MlpOp::kBackward ? 6 : 3;
  return gemm::step_time(matrices * static_cast<double>(saturating_product(p.m, p.hidden, 2)));
}

}  // namespace tessera::mlp
