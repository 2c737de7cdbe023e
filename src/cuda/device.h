// The GPUs of this machine and their primary contexts, which the CUDA runtime and PyTorch use too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "jit/jit.h"

namespace tessera::cuda {

struct DeviceInfo {
  int index = 0;
  std::string name;
  int major = 0;  // compute capability
  int minor = 0;
  int multiprocessors = 0;
  int threads_per_multiprocessor = 0;
  int shared_memory_per_block = 0;           // bytes, without opting in
  int shared_memory_per_block_optin = 0;     // bytes
  int shared_memory_per_multiprocessor = 0;  // bytes
  std::int64_t memory_bytes = 0;
  std::int64_t l2_bytes = 0;
  int clock_khz = 0;         // the highest; 0: not reported
  int memory_clock_khz = 0;  // likewise
  int memory_bus_bits = 0;
  int driver_version = 0;  // 13000 for CUDA 13.0, the newest that the driver supports
};

// Queried from the driver once. TESSERA_NO_DEVICE and the reason if there is no driver or no GPU.
Result<std::vector<DeviceInfo>> devices();
Result<DeviceInfo> device(int index);

// The architecture that kernels are compiled for: "sm_90a" for compute capability 9.0, "sm_86" for 8.6.
std::string arch_of(const DeviceInfo& device);

// The primary context, retained for the life of the process.
Result<CUcontext> primary_context(int device);

// Makes the device's primary context current on this thread; the destructor restores the previous one.
class ContextScope {
 public:
  static Result<ContextScope> enter(int device);
  ContextScope(ContextScope&& other) noexcept : driver_(other.driver_) { other.driver_ = nullptr; }
  ContextScope& operator=(ContextScope&&) = delete;
  ~ContextScope();

 private:
  explicit ContextScope(const Driver* driver) : driver_(driver) {}
  const Driver* driver_;  // null: nothing to restore
};

}  // namespace tessera::cuda
