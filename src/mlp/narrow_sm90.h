// The host side of kernels/mlp/narrow_sm90.cuh, for other kernels that are built on it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/device.h"
#include "mlp/narrow_sm90_config.h"
#include "mlp/problem.h"

namespace tessera::mlp {

std::optional<std::string> narrow_refuses(const MlpProblem& problem, const engine::Device& device);
// The first is the best one.
std::vector<MlpNarrowSm90Config> narrow_configs(const MlpProblem& problem);
double narrow_time(const MlpProblem& problem, const engine::Device& device, const MlpNarrowSm90Config& config);

// All of Params but out. The context of the device is entered.
Status set_narrow_params(const MlpNarrowSm90Config& config, const MlpArgs& args, MlpNarrowSm90Params& params);
std::int64_t narrow_row_tiles(const MlpProblem& problem, const MlpNarrowSm90Config& config);
unsigned narrow_ctas(const MlpProblem& problem, const MlpNarrowSm90Config& config, int multiprocessors);

}  // namespace tessera::mlp
