// Which version of each kernel's device code was verified, where and when: results/<gpu>/verified.json.
//
//   {"kernels": {"attention/forward.cuh": {"hash": "...", "archs": {"sm_80": {"gpu": ..., "date": ..., "by": ...}}}}}
#pragma once

#include <string>
#include <vector>

#include "cli/console.h"
#include "ops/status.h"

namespace tessera::cli {

// Headers of all kernels that the library compiles: "attention/forward.cuh", ...
std::vector<std::string> kernel_headers();

struct KernelState {
  enum class Verified { kYes, kChanged, kNever };
  std::string header;
  std::string hash;  // of the code as it is now
  Verified verified = Verified::kNever;
  std::string where;  // "sm_75, sm_80 and sm_90a on NVIDIA H200, 2026-11-15"; of the older code where it changed
};

// Every kernel against the records in the subfolders of `results`.
std::vector<KernelState> kernel_states(const std::string& results);

struct Proof {
  std::string arch;  // whose code ran
  std::string gpu;
  std::string by;  // "verify full, 1322 cases"
};

// Refuses where kernels come from a folder (TESSERA_KERNEL_SOURCES): a record speaks of the library.
Status may_record();

// Prints and adds to the JSON that kernels come from a folder, where they do.
void note_sources(Json& json);

// Writes into the record that these kernels, as they are now, were verified. What it says of older code of theirs goes.
Status record_verified(const std::string& file, const std::vector<std::string>& headers, const Proof& proof);

// "2026-11-15", in UTC.
std::string today();

}  // namespace tessera::cli
