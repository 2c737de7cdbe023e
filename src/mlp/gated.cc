#include "mlp/gated.h"

#include <algorithm>
#include <climits>

#include "base/format.h"
#include "cpu/thread_pool.h"
#include "gemm/cpu/elements.h"
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

void run_gated(const MlpArgs& args, int threads) {
  using namespace gemm::cpu_backend;
  const MlpProblem& p = args.problem;
  const auto read = [&](MlpTensor t, std::int64_t row, std::int64_t column) {
    return load(p.dtype, args[t].data, row * args[t].row_stride + column);
  };
  const auto write = [&](MlpTensor t, std::int64_t row, std::int64_t column, float value) {
    if (args[t].data != nullptr) store(p.dtype, args[t].data, row * args[t].row_stride + column, value);
  };
  tessera::cpu::parallel_for(p.m, std::max(threads, 1), [&](std::int64_t row, int) {
    for (std::int64_t column = 0; column < p.hidden; ++column) {
      const float before = read(MlpTensor::kBefore, row, column), gate = read(MlpTensor::kBeforeGate, row, column);
      const float f = activated(p.activation, gate);
      if (p.op == MlpOp::kBackward) {
        const float dhidden = read(MlpTensor::kDhidden, row, column);
        write(MlpTensor::kDbefore, row, column, dhidden * f);
        write(MlpTensor::kDbeforeGate, row, column, dhidden * before * derivative(p.activation, gate));
      }
      write(MlpTensor::kHidden, row, column, before * f);
    }
  });
}

double gated_time(const MlpProblem& p) {
  const double matrices = p.op == MlpOp::kBackward ? 6 : 3;
  return gemm::step_time(matrices * static_cast<double>(saturating_product(p.m, p.hidden, 2)));
}

}  // namespace tessera::mlp
