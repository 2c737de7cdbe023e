// The families, as the `tessera` program and the tests see them. Adding one adds a line to family.cc.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
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

  // What the compile gate compiles for an architecture.
  std::vector<jit::KernelInstance> (*gate)(const engine::Device& device);

  // A small problem from two numbers, for `fuzz`; the same everywhere. What mostly decides the kernel instance is drawn
  // from `kind`, so that many problems of a few kinds need few instances. Null: there is none.
  std::unique_ptr<Case> (*random)(std::uint64_t number, std::uint64_t kind) = nullptr;
  // What `tessera kernels` times beside the cases.
  std::vector<StepCase> (*steps)() = [] { return std::vector<StepCase>(); };
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

// What families make of flags.
inline const std::map<std::string, DType> kDTypes{
    {"fp32", DType::kFloat32}, {"fp16", DType::kFloat16}, {"bf16", DType::kBFloat16}};
Status read_number(const std::string& flag, const std::string& text, std::int64_t& to);
Status read_number(const std::string& flag, const std::string& text, float& to);
// Those of the numbers that are given; `least` to 2^`bits` is accepted.
Status read_sizes(const FlagValues& values, const std::vector<std::pair<const char*, std::int64_t*>>& sizes,
                  std::int64_t least, int bits);
// Where tensors without data are said to be: alignment counts on GPUs only. A GPU that is asked about by its architecture
// need not be present.
tessera_device place_of(tessera_device device, const char* arch);
// What a C function such as tessera_gemm_explain writes.
Result<std::string> text_from(
    const std::function<tessera_status(char* text, std::size_t capacity, std::size_t* needed)>& write);

// A family's own structs, each as a Case.
template <class Stored>
std::vector<std::unique_ptr<Case>> as_cases(const std::vector<Stored>& list,
                                            std::unique_ptr<Case> (*as_case)(const Stored&)) {
  std::vector<std::unique_ptr<Case>> cases;
  for (const Stored& c : list) cases.push_back(as_case(c));
  return cases;
}

}  // namespace tessera::verify
