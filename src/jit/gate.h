// The compile gate compiles kernels for GPUs that need not be present and checks ptxas's report: no spills, no more
// shared memory than the architecture gives a CTA, no serialised wgmma.
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
  double seconds = 0;  // of the compiler; 0 if the image came from the cache
  Origin origin = Origin::kCompiled;
  std::string failure;  // empty: passed

  bool passed() const { return failure.empty(); }
};

struct GateReport {
  std::vector<GateRow> rows;  // in the order of the requests
  double seconds = 0;         // wall clock, of the whole run

  int failures() const;
};

struct GateOptions {
  int threads = 1;
  bool use_cache = true;
  // Called after each row, by the thread that made it; calls do not overlap.
  std::function<void(const GateRow& row, int done, int total)> progress = {};
};

// Fails only if there is no NVRTC or no memory; each row carries its own failure.
Result<GateReport> run_gate(const std::vector<CompileRequest>& requests, const GateOptions& options);

// Fewer requests that show nearly as much: of each kernel, some that have between them every two values of Config fields
// that any request has together. min_blocks and the architecture count as fields.
std::vector<CompileRequest> pairwise(const std::vector<CompileRequest>& requests);

// Why an image with this report must not be used on this architecture; empty if it may be used.
std::string refusal(const Resources& resources, int dynamic_smem_bytes, const std::string& arch);

}  // namespace tessera::jit
