// Checks the contract, for every backend, before anything runs.
#pragma once

#include "attention/problem.h"
#include "base/status.h"
#include "tessera/attention.h"

namespace tessera::attention {

struct CheckedAttention {
  AttentionArgs args;
  tessera_device device{TESSERA_CPU, 0};
};

enum class Look : std::uint8_t {
  kEverything,  // pointers too, and on the CPU what lengths and page tables hold
  kShapes,      // only descriptions are read: for explain, whose tensors may have no data
};

// The caller's tensors as a Problem and views, or a message that names the argument, its value and what is accepted.
Result<CheckedAttention> check(tessera_attention_op op, const tessera_attention* args, Look look);

}  // namespace tessera::attention
