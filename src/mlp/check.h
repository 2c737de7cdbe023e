// Checks the contract, for every backend, before anything runs.
#pragma once

#include "base/arguments.h"
#include "base/status.h"
#include "mlp/problem.h"
#include "tessera/mlp.h"

namespace tessera::mlp {

struct CheckedMlp {
  MlpArgs args;
  tessera_device device{TESSERA_CPU, 0};
};

// The caller's tensors as a Problem and views, or a message that names the argument, its value and what is accepted.
Result<CheckedMlp> check(tessera_mlp_op op, const tessera_mlp* args, Look look);

}  // namespace tessera::mlp
