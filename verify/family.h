// The families, as the `tessera` program and the tests see them. Adding one adds a line to family.cc.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/device.h"
#include "jit/jit.h"
#include "tessera/tessera.h"
#include "verify/case.h"

namespace tessera::verify {

// A flag of the command line that describes a problem.
struct Flag {
  std::string name;  // "--sq"
  std::string type;  // "N"; empty: a switch without a value
  std::string help;
  std::string initial;  // shown as the default; empty: none
  std::vector<std::string> choices;
  int least = 1, most = 1;  // values
};
// The values given for each flag; a switch has an empty list.
using FlagValues = std::map<std::string, std::vector<std::string>>;

// A kernel that serves others, with arguments to time it on.
struct StepRun {
  std::string instance;                      // the kernel's
  double bytes = 0;                          // that it must move
  std::function<Status(void* stream)> call;  // holds its memory
};
struct StepCase {
  std::string name;
  std::function<Result<StepRun>(int device)> make;
};

struct Family {
  const char* name;
  const char* examples;  // of problems by flags, for --help: lines of "--sq 4096 --d 80 --causal"

  const std::vector<std::string>& (*suite_names)();
  std::vector<std::unique_ptr<Case>> (*suite)(std::string_view name);

  // Problems by flags, for `explain` and `tune`.
  std::vector<Flag> (*flags)();
  Result<std::unique_ptr<Case>> (*described)(const FlagValues& values);
  // arch: null for the device itself. The C ABI's answer.
  Result<std::string> (*explain)(const FlagValues& values, tessera_device device, const char* arch,
                                 tessera_explain_format format);

  // What the compile gate compiles for an architecture, and the kernels that `tessera kernels` lists.
  std::vector<jit::KernelInstance> (*gate)(const engine::Device& device);
  std::vector<StepCase> (*steps)();

  // A small problem from a number, for `fuzz`; the same everywhere. Null: there is none.
  std::unique_ptr<Case> (*random)(std::uint64_t number) = nullptr;
};

const std::vector<const Family*>& families();

// Over all families: names of suites, their cases, and what the gate compiles.
std::vector<std::string> suite_names();
std::vector<std::unique_ptr<Case>> suite(std::string_view name);

// The architectures that GPU kernels are known to compile for (base/arch.h; of those that have instructions of their own,
// with these), and those of which the gate compiles every instance unless it is told otherwise.
std::vector<std::string> known_archs();
const std::vector<std::string>& gate_archs();
std::vector<jit::KernelInstance> gate_instances(const std::string& arch);
// Headers below kernels/ of every kernel that the gate compiles, sorted.
std::vector<std::string> kernel_headers();

}  // namespace tessera::verify
