// One case on a device, judged against the fp64 oracle, through the public C ABI.
#pragma once

#include <string>

#include "cases/cases.h"
#include "cli/device.h"
#include "tests/oracle/sampled.h"

namespace tessera::cli {

enum class Outcome { kPassed, kFailed, kRefused };
const char* name_of(Outcome outcome);

struct Report {
  Outcome outcome = Outcome::kFailed;
  std::string detail;      // of a failure or a refusal
  double worst_ratio = 0;  // error over what the rule allows
  std::string worst_tensor;
  std::string kernel;         // that served it
  std::string config;         // of that kernel
  std::size_t workspace = 0;  // bytes
  int runs = 0;
  bool runs_differ = false;  // bitwise; a failure where equal runs are promised
};

// repeat: how often the case is run. Every result that differs from the first is judged too, and where equal runs are
// promised (all but a backward that is not `deterministic`), a difference is a failure. threads: of the oracle; 0: all.
Report check_case(const cases::Case& c, Device& device, int repeat, int threads);

// A forward's inputs and what the oracle makes of them, where the case is run by one kernel after the other.
struct PreparedForward {
  cases::Case c;
  oracle::Inputs inputs;
  oracle::Sample sample;  // where c.sample > 0
  oracle::Outputs exact, plain;
};
PreparedForward prepare_forward(const cases::Case& c, int threads);
// As check_case.
Report check_prepared(const PreparedForward& prepared, Device& device, int repeat);

}  // namespace tessera::cli
