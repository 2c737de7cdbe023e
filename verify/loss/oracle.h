// The oracle: losses and their gradients in scalar fp64, written to be read. tessera/loss.h has the formulas.
//
// A kernel passes if its error against the oracle is at most twice that of the plain computation in fp32, plus a floor.
// Nothing here shares code with the kernels.
#pragma once

#include <cstdint>

#include "loss/problem.h"
#include "verify/host_tensor.h"

namespace tessera::verify::loss {

// Values are rounded to their types already.
struct Inputs {
  LossProblem problem;
  HostTensor params;  // [1, rows, K, 3]
  HostTensor target;  // [1, 1, 1, rows]
};

struct Outputs {
  HostTensor out;      // [1, 1, 1, rows or 1]
  HostTensor dparams;  // [1, 1, rows, 3 K], if wanted
};

Outputs expected(const Inputs& inputs, int threads = 0);
// The plain same-precision computation that sets the scale of acceptable error, rounded to the results' types.
Outputs plain(const Inputs& inputs, int threads = 0);

}  // namespace tessera::verify::loss
