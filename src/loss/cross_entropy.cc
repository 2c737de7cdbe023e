#include "loss/cross_entropy.h"

#include <algorithm>
#include <climits>

#include "base/arithmetic.h"
#include "base/format.h"
#include "gemm/gpu.h"
#include "jit/config_text.h"

namespace tessera::loss {
namespace {

constexpr int kReduceThreads = 512;

bool has_gradient(const LossProblem& p) { return p.dhidden || p.dweight; }

}  // namespace

LossCrossEntropyConfig cross_entropy_config(const LossProblem& p, const engine::Device& device) {
  constexpr std::int64_t kOther = 2048;  // bytes of shared memory that a CTA needs beside the logits, or has no use of
  constexpr int kFew = 512, kMany = 1024;
  if (!has_gradient(p)) return {p.dtype, kFew, false, 0};
  const auto all = static_cast<std::int64_t>(device.shared_memory_per_block);
  const auto logits = [&](std::int64_t bytes, int threads) {
    return static_cast<int>((bytes - kOther) / 2 / (8 * threads) * (8 * threads));
  };
  const int half = logits(all / 2, kFew);
  if (p.classes <= half) return {p.dtype, kFew, true, half};
  return {p.dtype, kMany, true, logits(all, kMany)};
}

jit::KernelInstance instance_of(const LossCrossEntropyConfig& config) {
  return {.name = format("loss_cross_entropy_{}_t{}{}", name_of(config.dtype), config.threads,
                         config.gradient ? format("_gradient_c{}", config.cached) : ""),
          .header = "loss/cross_entropy.cuh",
          .entry = "loss_cross_entropy",
          .params = "LossCrossEntropyParams",
          .config = jit::config_text("LossCrossEntropyConfig", config),
          .threads = config.threads,
          .min_blocks = 1024 / config.threads,
          .dynamic_smem_bytes = config.cached * 2,
          .pdl = true};
}

jit::KernelInstance reduce_rows_instance() {
  const LossReduceRowsConfig config{.threads = kReduceThreads};
  return {.name = format("loss_reduce_rows_{}", config.threads),
          .header = "loss/reduce_rows.cuh",
          .entry = "loss_reduce_rows",
          .params = "LossReduceRowsParams",
          .config = jit::config_text("LossReduceRowsConfig", config),
          .threads = config.threads,
          .min_blocks = 1,
          .dynamic_smem_bytes = 0,
          .pdl = true};
}

std::vector<jit::KernelInstance> cross_entropy_instances(const engine::Device& device) {
  LossProblem p;
  p.op = LossOp::kLinearCrossEntropy;
  p.dtype = DType::kFloat16;  // it limits its logits
  p.classes = 1000;
  std::vector<jit::KernelInstance> list = {reduce_rows_instance(), instance_of(cross_entropy_config(p, device))};
  p.dweight = true;
  list.push_back(instance_of(cross_entropy_config(p, device)));
  if (device.compute >= 80) p.dtype = DType::kBFloat16;
  p.classes = 1000000;
  list.push_back(instance_of(cross_entropy_config(p, device)));
  return list;
}

Result<cuda::Work<LossCrossEntropyParams>> cross_entropy_work(const LossArgs& args, const LogitRows& rows,
                                                              float* losses) {
  const LossProblem& p = args.problem;
  if (rows.count > INT_MAX || p.classes > INT_MAX / 2) {
    return Status(TESSERA_UNSUPPORTED, "loss_cross_entropy: more rows or classes than one grid can cover");
  }
  cuda::Work<LossCrossEntropyParams> work = {};
  work.params = {rows.data,
                 rows.row_stride,
                 static_cast<int>(p.classes),
                 static_cast<const int*>(args.target.data) + rows.first,
                 p.weighted ? static_cast<const float*>(args.dout.data) + rows.first : nullptr,
                 losses + rows.first};
  work.grid = {static_cast<unsigned>(rows.count), 1, 1};
  return work;
}

cuda::Work<LossReduceRowsParams> reduce_rows_work(const LossArgs& args, const float* losses) {
  const LossProblem& p = args.problem;
  cuda::Work<LossReduceRowsParams> work = {};
  work.params = {losses,
                 static_cast<const int*>(args.target.data),
                 p.rows,
                 static_cast<int>(p.classes),
                 p.reduction == Reduction::kMean,
                 static_cast<float*>(args.out.data)};
  work.grid = {1, 1, 1};
  return work;
}

double cross_entropy_time(const LossProblem& p, std::int64_t rows) {
  return gemm::step_time((has_gradient(p) ? 2.0 : 1.0) * static_cast<double>(saturating_product(rows, p.classes, 2)));
}

}  // namespace tessera::loss
