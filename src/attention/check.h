// Checks the contract, for every backend, before anything runs.
#pragma once

#include "attention/problem.h"
#include "base/arguments.h"
#include "base/status.h"
#include "tessera/attention.h"

namespace tessera::attention {

struct CheckedAttention {
  AttentionArgs args;
  tessera_device device{TESSERA_CPU, 0};
};

// The caller's tensors as a Problem and views, or a message that names the argument, its value and what is accepted.
Result<CheckedAttention> check(tessera_attention_op op, const tessera_attention* args, Look look);

}  // namespace tessera::attention
