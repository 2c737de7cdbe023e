// Checks the contract, for every backend, before anything runs.
#pragma once

#include "base/arguments.h"
#include "base/status.h"
#include "moe/problem.h"
#include "tessera/moe.h"

namespace tessera::moe {

struct CheckedMoe {
  MoeArgs args;
  tessera_device device{TESSERA_CPU, 0};
};

// The caller's tensors as a Problem and views, or a message that names the argument, its value and what is accepted.
Result<CheckedMoe> check(tessera_moe_op op, const tessera_moe* args, Look look);

}  // namespace tessera::moe
