// A device as the selector sees it: a plain value, so that explain and the gate can ask about absent devices.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tessera::engine {

struct Device {
  enum class Kind { kCpu, kCuda };

  Kind kind = Kind::kCpu;
  std::string name;                         // for people: "sm_90a", "cuda:0, NVIDIA H200, sm_90a", "cpu, 8 threads"
  int compute = 0;                          // CUDA: 10 * major + minor
  bool specific = false;                    // CUDA: code may use what this architecture alone has, as in sm_90a
  int multiprocessors = 132;                // CUDA: SMs; an H200's if only the architecture is known
  std::size_t shared_memory_per_block = 0;  // CUDA: the opt-in limit
  int index = -1;                           // CUDA: of a GPU that is here and runs its own code; libraries need it
  int threads = 1;                          // CPU

  bool is_cpu() const { return kind == Kind::kCpu; }
};

Device cpu_device(int threads);

// A GPU by its architecture alone: a name of base/arch.h.
Result<Device> cuda_device(std::string_view arch);

}  // namespace tessera::engine
