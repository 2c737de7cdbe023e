// Shared memory of each architecture: what the selector, the tuner and the compile gate hold kernels against.
#pragma once

namespace tessera {

struct ArchLimits {
  int arch;                     // 75, 80, ...: compute capability times ten
  int shared_memory_per_block;  // bytes, the opt-in maximum, static and dynamic together
};

constexpr ArchLimits kArchLimits[] = {
    {75, 64 * 1024}, {80, 163 * 1024}, {86, 99 * 1024}, {89, 99 * 1024}, {90, 227 * 1024},
};

// Returns arch 0 if the table has no such entry.
constexpr ArchLimits limits_of(int arch) {
  for (const ArchLimits& limits : kArchLimits) {
    if (limits.arch == arch) return limits;
  }
  return {};
}

}  // namespace tessera
