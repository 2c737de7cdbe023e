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

struct PackedNames {
  const char* cu_seqlens;
  const char* tensor;
  const char* max_seqlen;
};
// The longest sequence that cu_seqlens in host memory has, or a message. given_max: 0 if none was given.
Result<std::int64_t> longest_sequence(const PackedNames& names, const std::int32_t* cu, std::int64_t batch,
                                      std::int64_t rows, std::int64_t given_max);

}  // namespace tessera::attention
