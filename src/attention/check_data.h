// Beyond shapes: what lengths, indices and page tables in host memory hold, and what addresses and strides allow.
#pragma once

#include "attention/problem.h"
#include "base/status.h"

namespace tessera::attention {

struct PackedNames {
  const char* cu_seqlens;
  const char* tensor;
  const char* max_seqlen;
};
// The longest of packed sequences, or a message. given_max: 0 if none was given.
Result<std::int64_t> longest_sequence(const PackedNames& names, const std::int32_t* cu, std::int64_t batch,
                                      std::int64_t rows, std::int64_t given_max);

// What a GPU checks on the device, for each sequence of a KV cache.
Status check_cache(const AttentionArgs& args);

// Whether every row of every activation starts at a multiple of 16 bytes.
bool rows_allow_vectors(const AttentionArgs& args);
// Whether TMA takes the strides of what it loads.
bool strides_allow_tensor_maps(const AttentionArgs& args);

}  // namespace tessera::attention
