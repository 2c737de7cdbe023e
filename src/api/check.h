// The contract, checked in one place for every backend before anything runs.
#pragma once

#include "ops/attention.h"
#include "ops/status.h"
#include "tessera/tessera.h"

namespace tessera::api {

struct CheckedAttention {
  AttentionArgs args;
  tessera_device device{TESSERA_CPU, 0};
};

enum class Look : std::uint8_t {
  kEverything,  // pointers too, and on the CPU what lengths and page tables hold
  kShapes,      // nothing is dereferenced but the descriptions: for explain, where there may be no data
};

// The caller's tensors as a Problem and views, or a sentence that names the argument, its value and what is accepted.
Result<CheckedAttention> check_attention(tessera_attention_op op, const tessera_attention* args, Look look);

}  // namespace tessera::api
