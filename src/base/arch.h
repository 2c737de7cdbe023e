// The known architectures and their shared memory: what the selector, the tuner and the compile gate hold kernels against.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace tessera {

struct ArchLimits {
  int arch;                     // 75, 80, ...: compute capability times ten
  int shared_memory_per_block;  // bytes, the opt-in maximum, static and dynamic together
};

// In order.
constexpr ArchLimits kArchLimits[] = {
    {75, 64 * 1024},  {80, 163 * 1024},  {86, 99 * 1024},   {87, 163 * 1024}, {89, 99 * 1024},
    {90, 227 * 1024}, {100, 227 * 1024}, {103, 227 * 1024}, {120, 99 * 1024}, {121, 99 * 1024},
};

// Returns arch 0 if the table has no such entry.
constexpr ArchLimits limits_of(int arch) {
  for (const ArchLimits& limits : kArchLimits) {
    if (limits.arch == arch) return limits;
  }
  return {};
}

// "sm_75", ..., "sm_90", "sm_90a", ...: the letter enables instructions that only this architecture has; of those known
// here, only sm_90 has kernels that use them.
inline std::vector<std::string> arch_names() {
  std::vector<std::string> names;
  for (const ArchLimits& limits : kArchLimits) {
    names.push_back("sm_" + std::to_string(limits.arch));
    if (limits.arch == 90) names.emplace_back("sm_90a");
  }
  return names;
}

// The architecture whose code a GPU of this one runs: its own, or the newest one before it that is known here and to the
// compiler, whose PTX every newer GPU runs. compiler: what it compiles for; empty: it did not say. 0: there is none.
constexpr int portable_arch(int arch, std::span<const int> compiler) {
  int newest = 0;
  for (const ArchLimits& limits : kArchLimits) {
    bool compiles = compiler.empty();
    for (const int known : compiler) compiles = compiles || known == limits.arch;
    if (compiles && limits.arch <= arch) newest = limits.arch;
  }
  return newest;
}

}  // namespace tessera
