// The oracle: norms, their gradients and rotary embedding in scalar fp64, written to be read. tessera/norm.h has the
// formulas.
//
// A kernel passes if its error against the oracle is at most twice that of the plain computation in fp32, plus a floor.
// Nothing here shares code with the kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "norm/problem.h"
#include "verify/host_tensor.h"

namespace tessera::verify::norm {

// Matrices are [1, 1, rows, N], vectors [1, 1, 1, N], statistics [1, 1, 1, rows]; of rotary, x is [B, S, H, D] and the
// tables are [1, 1, T, R / 2]. Values are rounded to their types already. Empty if not given.
struct Inputs {
  NormProblem problem;
  HostTensor x, residual, weight, bias;
  HostTensor dout, dsum, rstd, mean;
  HostTensor cos, sin;
  std::vector<std::int32_t> positions;  // [B, S]
  double eps = 0;
};

struct Outputs {
  HostTensor out, sum, rstd, mean;  // forward; rotary: out
  HostTensor dx, dweight, dbias;    // backward
};

Outputs expected(const Inputs& inputs, int threads = 0);
// The plain same-precision computation that sets the scale of acceptable error, rounded to the results' types.
Outputs plain(const Inputs& inputs, int threads = 0);

}  // namespace tessera::verify::norm
