// Checks the contract, for every backend, before anything runs.
#pragma once

#include "base/arguments.h"
#include "base/status.h"
#include "norm/problem.h"
#include "tessera/norm.h"

namespace tessera::norm {

struct CheckedNorm {
  NormArgs args;
  tessera_device device{TESSERA_CPU, 0};
};

// The caller's tensors as a Problem and views, or a message that names the argument, its value and what is accepted.
Result<CheckedNorm> check(tessera_norm_op op, const tessera_norm* args, Look look);

}  // namespace tessera::norm
