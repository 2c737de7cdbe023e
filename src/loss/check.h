// Checks the contract, for every backend, before anything runs.
#pragma once

#include "base/arguments.h"
#include "base/status.h"
#include "loss/problem.h"
#include "tessera/loss.h"

namespace tessera::loss {

struct CheckedLoss {
  LossArgs args;
  tessera_device device{TESSERA_CPU, 0};
};

// The caller's tensors as a Problem and views, or a message that names the argument, its value and what is accepted.
Result<CheckedLoss> check(tessera_loss_op op, const tessera_loss* args, Look look);

}  // namespace tessera::loss
