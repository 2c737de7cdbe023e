// Speed of the GPU kernels that serve others as steps of a recipe, and how long a kernel's first use takes.
#pragma once

#include <string>
#include <vector>

#include "program/ceiling.h"
#include "program/console.h"
#include "verify/device.h"

namespace tessera::tools {

struct Timing {
  double median = 0, p95 = 0, p99 = 0;  // seconds
  double spread = 0;                    // (95th - 5th percentile) / median
  int runs = 0;
};
Timing summarise(std::vector<double> samples);

struct KernelRow {
  std::string name;
  std::string instance;  // the kernel that served it
  Timing timing;
  double bytes = 0;  // per second
};

// From nothing in memory to a loaded function; the context already exists.
struct FirstUse {
  std::string instance;
  double compile = 0;  // seconds in NVRTC, without any cache
  double from_disk = 0;
  double load = 0;  // into the driver
};

struct KernelBench {
  double copy_bandwidth = 0;  // bytes per second, read plus written, device to device
  std::vector<Unit> units;    // tensor cores through mma.sync and, on Hopper, through wgmma, by type
  std::vector<KernelRow> rows;
  std::vector<FirstUse> first_use;
};

// "mma.sync bf16", "wgmma bf16": operations per second of the tensor cores alone, in the code that the device runs.
Result<Unit> measure_peak(verify::Device& device, bool wgmma, DType dtype, double min_time);

// first_use: also every kernel's first use, which compiles them all.
Result<KernelBench> bench_gpu_kernels(verify::Device& device, const std::string& filter, double min_time,
                                      bool first_use, bool progress);
void print_bench(const KernelBench& bench);
Json json_of(const KernelBench& bench);

}  // namespace tessera::tools
