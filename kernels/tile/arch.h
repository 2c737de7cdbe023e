// Resource limits of each architecture. The compile gate and the kernels' static_asserts read the same table.
#pragma once

namespace tessera {

struct ArchLimits {
  int arch;                     // 75, 80, ...: compute capability times ten
  int shared_memory_per_block;  // bytes, the opt-in maximum, static and dynamic together
  int shared_memory_per_sm;     // bytes
  int threads_per_sm;
  int registers_per_thread;
};

constexpr int kRegistersPerSm = 65536;

constexpr ArchLimits kArchLimits[] = {
    {75, 64 * 1024, 64 * 1024, 1024, 255},   {80, 163 * 1024, 164 * 1024, 2048, 255},
    {86, 99 * 1024, 100 * 1024, 1536, 255},  {89, 99 * 1024, 100 * 1024, 1536, 255},
    {90, 227 * 1024, 228 * 1024, 2048, 255},
};

// Returns arch 0 if the table has no such entry.
constexpr ArchLimits limits_of(int arch) {
  for (const ArchLimits& limits : kArchLimits) {
    if (limits.arch == arch) return limits;
  }
  return {};
}

}  // namespace tessera
