// Every kernel the library can compile, as instances: what the ops launch, the compile gate checks and `tessera
// compile` prints.
#pragma once

#include <string>
#include <vector>

#include "contract/attention_backward.h"
#include "contract/attention_backward_sm90.h"
#include "contract/attention_forward.h"
#include "contract/attention_forward_sm90.h"
#include "contract/backward_preprocess.h"
#include "contract/split_combine.h"
#include "jit/gate.h"
#include "jit/jit.h"

namespace tessera::select {

// The architectures that the gate proves.
const std::vector<std::string>& known_archs();  // "sm_75" ... "sm_90a"

constexpr BackwardPreprocessConfig preprocess_config(DType dtype, int vector) {
  return {.dtype = dtype, .vector = vector, .unroll = 4, .threads = 256};
}
constexpr BackwardConvertConfig convert_config(DType dtype, int vector) {
  return {.dtype = dtype, .vector = vector, .threads = 256};
}
constexpr SplitCombineConfig combine_config(DType dtype, int vector, int unroll) {
  return {.dtype = dtype, .vector = vector, .unroll = unroll, .threads = 256};
}

// The forward's candidates for an architecture (compute: 75, 80, ...): the large tile first, then a small one, then
// where it can be the small one that sums scores in halves.
std::vector<AttentionForwardConfig> forward_configs(int compute, DType dtype, int dim_qk, int dim_v, int vector,
                                                    bool banded, bool general);

// The Hopper forward's, for sm_90a.
std::vector<AttentionForwardSm90Config> forward_sm90_configs(DType dtype, int dim_qk, int dim_v, bool banded,
                                                             bool general);

// The backward's, fast or deterministic.
struct BackwardConfigs {
  AttentionBackwardConfig main;
  BackwardDqConfig dq;  // where main does not add dQ up itself
};
// The large tile first, then one for few queries.
std::vector<BackwardConfigs> backward_configs(int compute, DType dtype, int dim_qk, int dim_v, int vector, bool banded,
                                              bool general, bool deterministic);

// The Hopper backward's, for sm_90a; none where a head dim is above 128.
std::vector<AttentionBackwardSm90Config> backward_sm90_configs(DType dtype, int dim_qk, int dim_v, bool banded);

jit::KernelInstance instance_of(const AttentionBackwardConfig& config);
jit::KernelInstance instance_of(const AttentionBackwardSm90Config& config);
jit::KernelInstance instance_of(const AttentionForwardConfig& config);
jit::KernelInstance instance_of(const AttentionForwardSm90Config& config);
jit::KernelInstance instance_of(const BackwardConvertConfig& config);
jit::KernelInstance instance_of(const BackwardDqConfig& config);
jit::KernelInstance instance_of(const BackwardPreprocessConfig& config);
jit::KernelInstance instance_of(const SplitCombineConfig& config);

// Every candidate of every kernel for an architecture.
std::vector<jit::KernelInstance> kernels_for(const std::string& arch);

Result<jit::GateReport> compile_gate(const std::vector<std::string>& archs, const jit::GateOptions& options);

}  // namespace tessera::select
