// Which version of each kernel's device code was verified, on which GPU and when: results/<gpu>/verified.json.
//
//   {"kernels": {"attention/forward.cuh": {"hash": "...", "archs": {"sm_80": {"gpu": ..., "date": ..., "by": ...}}}}}
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace tessera::results {

struct KernelState {
  enum class Verified { kYes, kChanged, kNever };
  std::string header;  // "attention/forward.cuh"
  std::string hash;    // of the code as it is now
  Verified verified = Verified::kNever;
  std::string where;  // "sm_80 on NVIDIA H200, 2026-11-15"; if the code has changed, where the older code was verified
};

// The state of each of these kernels according to the records in the subfolders of `results`.
std::vector<KernelState> kernel_states(const std::string& results, const std::vector<std::string>& headers);

struct Proof {
  std::string arch;  // whose code ran
  std::string gpu;
  std::string by;  // "verify full, 1322 cases"
};

// An error if kernels come from a folder (TESSERA_KERNEL_SOURCES): records are about the kernels in the library.
Status may_record();

// Adds to the record that these kernels, as they are now, were verified. Entries about their older code are removed.
Status record_verified(const std::string& file, const std::vector<std::string>& headers, const Proof& proof);

}  // namespace tessera::results
