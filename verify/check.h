// One case on a device, judged against the fp64 oracle, through the public C ABI.
#pragma once

#include <string>

#include "verify/case.h"
#include "verify/device.h"

namespace tessera::verify {

enum class Outcome { kPassed, kFailed, kRefused };
const char* name_of(Outcome outcome);

struct Report {
  Outcome outcome = Outcome::kFailed;
  std::string detail;      // of a failure or a refusal
  double worst_ratio = 0;  // error divided by what the rule allows
  std::string worst_tensor;
  std::string kernel;         // that served it
  std::string config;         // of that kernel: engine::text_of(Config)
  std::size_t workspace = 0;  // bytes
  int runs = 0;
  bool judged = false;       // it ran to its end; a failure is a wrong result
  bool runs_differ = false;  // bitwise; a failure if equal runs are promised
};

// repeat: how many times the case is run. Every result that differs from the first is judged too, and if equal runs are
// promised, a difference is a failure. threads: of the oracle; 0: all.
Report check(const Case& c, Device& device, int repeat, int threads);
// The same on several devices, one after the other, with the same inputs: the oracle is asked once for all of them.
std::vector<Report> check(const Case& c, const std::vector<Device*>& devices, int repeat, int threads);

// The same with inputs and expected results that already exist.
Report check_trial(const Case& c, Trial& trial, Device& device, int repeat, int threads);

// Runs a call once and brings back what it wrote.
Status run_once(Call& call, Device& device);

// Why no kernel serves it: "kernel: reason; kernel: reason".
std::string reasons_of(const engine::Explanation& explanation);

}  // namespace tessera::verify
