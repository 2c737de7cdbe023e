// The compile gate: kernels compiled for GPUs that need not be there, and ptxas's report held against the rules: no
// spill, no more shared memory than the architecture gives a block, no serialised wgmma.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "jit/jit.h"

namespace tessera::jit {

struct GateRow {
  std::string kernel;
  std::string config;
  std::string arch;
  Resources resources;
  int dynamic_smem_bytes = 0;
  double seconds = 0;  // of the compiler; 0 where the image came from the cache
  Origin origin = Origin::kCompiled;
  std::string failure;  // empty: passed

  bool passed() const { return failure.empty(); }
};

struct GateReport {
  std::vector<GateRow> rows;  // in the order of the requests
  double seconds = 0;         // from start to end

  int failures() const;
};

struct GateOptions {
  int threads = 1;
  bool use_cache = true;
  // Called after each row by the thread that made it, one at a time.
  std::function<void(const GateRow& row, int done, int total)> progress = {};
};

// A report always comes where NVRTC is there; rows carry their own failures.
Result<GateReport> run_gate(const std::vector<CompileRequest>& requests, const GateOptions& options);

// Why an image with this report may not be used on this architecture; empty: it may.
std::string refusal(const Resources& resources, int dynamic_smem_bytes, const std::string& arch);

}  // namespace tessera::jit
