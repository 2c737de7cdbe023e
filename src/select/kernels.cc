#include "select/kernels.h"

#include <algorithm>

#include "jit/config_text.h"
#include "ops/attention.h"
#include "ops/format.h"

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

jit::KernelInstance instance_of(const BackwardPreprocessConfig& config) {
  return {.name = format("backward_preprocess_{}_v{}", name_of(config.dtype), config.vector),
          .header = "attention/backward_preprocess.cuh",
          .entry = "backward_preprocess",
          .params = "BackwardPreprocessParams",
          .config = jit::config_text("BackwardPreprocessConfig", config),
          .threads = config.threads,
          .min_blocks = kMinBlocks};
}

jit::KernelInstance instance_of(const SplitCombineConfig& config) {
  return {.name = format("split_combine_{}_v{}_u{}", name_of(config.dtype), config.vector, config.unroll),
          .header = "attention/split_combine.cuh",
          .entry = "split_combine",
          .params = "SplitCombineParams",
          .config = jit::config_text("SplitCombineConfig", config),
          .threads = config.threads,
          .min_blocks = kMinBlocks};
}

std::vector<jit::KernelInstance> kernels_for(const std::string&) {
  // Neither kernel knows its head dim when it is compiled, so these few are all there are, on every architecture.
  std::vector<jit::KernelInstance> list;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int vector : {8, 1}) list.push_back(instance_of(preprocess_config(dtype, vector)));
    for (const int unroll : {4, 8}) list.push_back(instance_of(combine_config(dtype, 4, unroll)));
    list.push_back(instance_of(combine_config(dtype, 1, 4)));
  }
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
