// What the tuning table knows of a problem, for those who plan: read once a process and device, then looked up in
// memory.
//
// TESSERA_NO_TUNING=1 turns the table off.
#pragma once

#include <optional>
#include <string>

#include "cuda/device.h"
#include "ops/attention.h"
#include "select/attention.h"
#include "tune/table.h"

namespace tessera::tune {

// Problems that share a tuned Config: of one dtype, head dims, kind of mask and scores, and of about one size, e.g.
// "forward bf16 d128x128 banded q2^13 k2^13 many". q and k: the nearest power of two to the queries and to the most
// keys that one of them sees. many: tiles of 128 queries, of all heads, are at least as many as multiprocessors; else
// few.
std::string class_of(const AttentionProblem& problem, int multiprocessors);

// Hash of the code of both forward kernels: the loser of a race may have got faster.
std::string source_hash();

// The key's part that says where it was measured.
std::string gpu_key(const cuda::DeviceInfo& device);

// Nothing where the table has no entry for this GPU, driver and code, or one that cannot be read.
std::optional<select::TunedForward> find_tuned(const cuda::DeviceInfo& device, const AttentionProblem& problem);

// From here on every forward on a GPU that it fits is planned with this one; nothing: as the table says. Process-wide,
// for the tuner itself; not in the C ABI.
void force(const std::optional<select::TunedForward>& tuned);

// True where TESSERA_NO_TUNING is set to anything but 0.
bool tuning_forbidden();

}  // namespace tessera::tune
