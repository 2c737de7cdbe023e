// Activations of rows, and their derivatives.
#pragma once

#include <cstdint>

namespace tessera::gemm::cpu_backend {

// activation: kSilu and the like. `to` may be x.
void activated(int activation, const float* x, std::int64_t count, float* to);
void derivative(int activation, const float* x, std::int64_t count, float* to);

}  // namespace tessera::gemm::cpu_backend
