// A kernel instance on a device: compiled or taken from the cache (src/jit), loaded once, launched with its Params by
// value.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "jit/jit.h"

namespace tessera::cuda {

struct Kernel {
  jit::KernelInstance instance;
  int device = 0;
  int multiprocessors = 0;  // of the device
  bool pdl = false;
  CUfunction function = nullptr;
  int registers = 0;
  int local_bytes = 0;
  int static_smem_bytes = 0;
  jit::Origin origin = jit::Origin::kCompiled;  // of the image, when it was loaded
  double image_seconds = 0;                     // to compile it or to find it in the cache
  double load_seconds = 0;                      // to load it into the driver
};

// Loads once per device, instance and target; may be called from any thread. The pointer is valid until the process
// exits.
Result<const Kernel*> load_kernel(int device, const jit::KernelInstance& instance, const jit::Target& target);
// For the architecture whose code the device runs: its own, unless another was chosen (code_arch.h).
Result<const Kernel*> load_kernel(int device, const jit::KernelInstance& instance);

struct Grid {
  unsigned x = 0;
  unsigned y = 1;
  unsigned z = 1;
};

// params is copied before the call returns.
Status launch(const Kernel& kernel, Grid grid, const void* params, CUstream stream);

// Sets the words of device memory, on the stream. bytes: a multiple of 4.
Status fill(int device, void* data, unsigned word, std::int64_t bytes, CUstream stream);
inline Status zero(int device, void* data, std::int64_t bytes, CUstream stream) {
  return fill(device, data, 0, bytes, stream);
}

// What an op asks of a kernel, before any device is involved. An empty grid (x = 0) means that there is nothing to do.
template <class Params>
struct Work {
  static_assert(std::is_trivially_copyable_v<Params>);
  Params params;
  Grid grid;
};

template <class Params>
Status launch(const Kernel& kernel, const Work<Params>& work, CUstream stream) {
  if (work.grid.x == 0) return {};
  return launch(kernel, work.grid, &work.params, stream);
}

// The same, with the kernel to load.
template <class Params>
struct KernelLaunch : Work<Params> {
  jit::KernelInstance instance;
};

}  // namespace tessera::cuda
